"""`StopMatcher`: finds stop strings in a growing text, and holds back only what may still become one."""

from collections.abc import Sequence


class StopMatcher:
    """The stop string that is complete first wins; of several that end at the same place, the longest one.

    It makes no difference how the text is cut into feeds.

    `matched` is the stop string that ended the text, else None.
    """

    def __init__(self, stops: Sequence[str], *, shows_stop: bool = False) -> None:
        """With `shows_stop` the text ends with the stop string, else before it."""
        self._shows_stop = shows_stop
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Add text; returns what may be shown now. Nothing more comes after a match."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._shows_stop else start]
        num_held = max(_num_begun(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """The text has ended: what was held back cannot become a stop string any more."""
        held, self._held = self._held, ""
        return held


def _num_begun(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
