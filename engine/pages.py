"""Allocator of KV pages: reference counts of pages in use, free pages, and idle ones kept for the prefix cache."""

from collections.abc import Callable, Iterable

from engine.errors import EngineError


class PageError(EngineError):
    """More pages were asked for than there are, or one was released that nobody holds."""


class PageAllocator:
    """Every page is in exactly one state.

    free    nobody refers to it, nothing in it matters       (taken first, the last released first: it is warm)
    in use  one or more sequences refer to it
    idle    nobody refers to it, but `keep` was called        (taken when none is free, the longest idle first)

    `on_reuse(page)` is called when an idle page is about to be handed out, so that its contents can be forgotten.
    """

    def __init__(self, num_pages: int, on_reuse: Callable[[int], None] | None = None) -> None:
        self.num_pages = num_pages
        self.on_reuse = on_reuse
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: dict[int, None] = {}  # ordered: longest idle first
        self._references = [0] * num_pages
        self._kept = bytearray(num_pages)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out now."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages that some sequence refers to."""
        return self.num_pages - self.num_available

    def num_references(self, page: int) -> int:
        """How many times the page is referred to."""
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each. Raises `PageError`, and takes none, if fewer are available."""
        if count > self.num_available:
            raise PageError(f"{count} pages wanted, {self.num_available} of {self.num_pages} available")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page = next(iter(self._idle))
            del self._idle[page]
            self._kept[page] = 0
            if self.on_reuse is not None:
                self.on_reuse(page)
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more reference to a page that is in use or idle."""
        if self._references[page] == 0:
            if page not in self._idle:
                raise PageError(f"page {page} is free: only a page in use or idle can be shared")
            del self._idle[page]
        self._references[page] += 1

    def keep(self, page: int) -> None:
        """When its last reference goes, the page becomes idle and not free."""
        if self._references[page] == 0:
            raise PageError(f"page {page} is not in use: its contents cannot be kept")
        self._kept[page] = 1

    def drop(self, page: int) -> None:
        """Take back `keep`: nothing in the page matters to requests that come."""
        self._kept[page] = 0
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page, in the order given: the first one becomes the longest idle."""
        for page in pages:
            if self._references[page] == 0:
                raise PageError(f"page {page} is released and nobody holds it")
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._kept[page]:
                    self._idle[page] = None
                else:
                    self._free.append(page)
