"""`StepSizes`: how many steps computed how many tokens, prompt and answer together. One number for each bucket."""

from bisect import bisect_left

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets; one more bucket holds larger steps."""


class StepSizes:
    """Counts since the start. `counts` has a number for each bucket, not summed up."""

    def __init__(self) -> None:
        self.counts = [0] * (len(STEP_TOKENS) + 1)
        self.num_tokens = 0

    def note(self, num_tokens: int) -> None:
        """A step of so many tokens was launched."""
        self.counts[bisect_left(STEP_TOKENS, num_tokens)] += 1
        self.num_tokens += num_tokens
