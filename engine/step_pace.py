"""`StepPace`: how many prompt tokens a step may take beside decodes, so that streams do not stutter. Reads no clock.

A step computes everything it holds before any stream gets its next token. A chunk of 512 prompt tokens takes half a
second on a CPU; chunks of 64 take a tenth of that each, and the whole prompt no longer. When nothing decodes nobody
waits, and the full chunk is used.
"""

MIN_PROMPT_TOKENS = 32
"""Fewer make a prompt slow and a step hardly shorter; a multiple of it is taken."""

_SLOWER_WEIGHT = 0.5  # a step that took long is believed at once,
_FASTER_WEIGHT = 0.1  # one that took little when others agree
_MIN_PROMPT_SHARE = 0.1  # of a step's time: measured times scatter, and no rate may become 0


class StepPace:
    """Bounds the time of a step by what a prompt token took in the steps before."""

    def __init__(self, target_s: float, seconds_per_token: float) -> None:
        """`target_s` is the aim for a step's time; `seconds_per_token` is what warming up measured."""
        self._target_s = target_s
        self._seconds_per_token = seconds_per_token
        self._decode_s = 0.0

    @property
    def max_prompt_tokens(self) -> int:
        """Prompt tokens of a step that also decodes.

        Where decoding alone takes more than half of the target, prompts may take as long as it does: on a slow device
        they would not advance otherwise.
        """
        prompt_s = max(self._target_s - self._decode_s, self._decode_s)
        num_tokens = int(prompt_s / self._seconds_per_token)
        return max(MIN_PROMPT_TOKENS, num_tokens // MIN_PROMPT_TOKENS * MIN_PROMPT_TOKENS)

    def observe(self, *, num_decodes: int, num_prompt_tokens: int, step_s: float) -> None:
        """Learn from a step that took `step_s` seconds."""
        if num_prompt_tokens == 0:
            self._decode_s = _blend(self._decode_s, step_s) if self._decode_s else step_s
            return
        decode_s = self._decode_s if num_decodes else 0.0
        prompt_s = max(step_s - decode_s, step_s * _MIN_PROMPT_SHARE)
        self._seconds_per_token = _blend(self._seconds_per_token, prompt_s / num_prompt_tokens)


def _blend(old: float, new: float) -> float:
    weight = _SLOWER_WEIGHT if new > old else _FASTER_WEIGHT
    return old + weight * (new - old)
