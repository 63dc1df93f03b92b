"""Finds full KV pages by the tokens that lead to them. Holds no KV; which pages exist is `pages`' business.

The key of a page is a digest of the key before it and its own ids, so equal keys mean equal prefixes. A page that no
sequence uses stays findable until the allocator needs it.
"""

import hashlib
from array import array
from collections.abc import Sequence as IdSequence

from engine.pages import PageAllocator


def root_key(salt: str) -> bytes:
    """The key before the first page: requests with different salts share no page."""
    return salt.encode()


def page_key(parent: bytes, ids: IdSequence[int]) -> bytes:
    """Key of the page that holds `ids` after the page with key `parent`."""
    return hashlib.blake2b(parent + array("q", ids).tobytes(), digest_size=16).digest()


def extend_keys(keys: list[bytes], token_ids: list[int], page_size: int, num_pages: int, root: bytes = b"") -> None:
    """Append to `keys` until it has one key for each of the first `num_pages` full pages of `token_ids`."""
    for index in range(len(keys), num_pages):
        parent = keys[-1] if keys else root
        keys.append(page_key(parent, token_ids[index * page_size : (index + 1) * page_size]))


class PrefixCache:
    """Map from page key to the page that holds it. `epoch` goes up whenever all keys are forgotten."""

    def __init__(self, pages: PageAllocator) -> None:
        self.epoch = 0
        self._pages = pages
        self._page_of_key: dict[bytes, int] = {}
        self._key_of_page: dict[int, bytes] = {}
        pages.on_reuse = self._forget

    def __len__(self) -> int:
        return len(self._page_of_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._page_of_key

    def match(self, keys: list[bytes]) -> list[int]:
        """Pages of the longest known run of `keys`, from the first on; the caller gets one reference to each."""
        matched: list[int] = []
        for key in keys:
            page = self._page_of_key.get(key)
            if page is None:
                break
            self._pages.share(page)
            matched.append(page)
        return matched

    def remember(self, key: bytes, page: int) -> None:
        """From now on `page`, in use and fully written, is found under `key`; a second page of one key is ignored."""
        if key not in self._page_of_key and page not in self._key_of_page:
            self._page_of_key[key] = page
            self._key_of_page[page] = key
            self._pages.keep(page)

    def clear(self) -> None:
        """Forget all keys. Pages that nobody refers to become free."""
        self.epoch += 1
        for page in self._key_of_page:
            self._pages.drop(page)
        self._page_of_key.clear()
        self._key_of_page.clear()

    def _forget(self, page: int) -> None:
        del self._page_of_key[self._key_of_page.pop(page)]
