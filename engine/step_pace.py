"""`StepPace`: bounds the prompt tokens of a step while others decode, so that streams do not stutter. Reads no clock.

No stream gets its next token before the whole step is computed. A chunk of 512 prompt tokens takes half a second on a
CPU; chunks of 64 take a tenth of that each, and the whole prompt takes no longer. If nothing decodes, nobody waits and
the full chunk is used.
"""

MIN_PROMPT_TOKENS = 32
"""The minimum, and the unit of rounding: fewer tokens slow the prompt down and hardly shorten the step."""

_SLOWER_WEIGHT = 0.5  # a slow step counts at once;
_FASTER_WEIGHT = 0.1  # a fast one counts little until others agree
_MIN_PROMPT_SHARE = 0.1  # of a step's time: measurements are noisy, and no rate may become 0


class StepPace:
    """Bounds the time of a step, given how long a prompt token took in earlier steps."""

    def __init__(self, target_s: float, seconds_per_token: float) -> None:
        """`target_s` is the target for a step's time; `seconds_per_token` comes from the warm-up."""
        self._target_s = target_s
        self._seconds_per_token = seconds_per_token
        self._decode_s = 0.0

    @property
    def max_prompt_tokens(self) -> int:
        """Prompt tokens of a step that also decodes.

        If decoding alone takes more than half of the target, prompts may take as long as decoding does: otherwise they
        would not advance on a slow device.
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
        seconds_per_token = prompt_s / num_prompt_tokens
        was_short = step_s <= max(self._target_s, 2 * self._decode_s)
        if was_short and seconds_per_token > self._seconds_per_token:
            return  # a step takes much of its time for any number of tokens, so few tokens say nothing about many
        self._seconds_per_token = _blend(self._seconds_per_token, seconds_per_token)


def _blend(old: float, new: float) -> float:
    weight = _SLOWER_WEIGHT if new > old else _FASTER_WEIGHT
    return old + weight * (new - old)
