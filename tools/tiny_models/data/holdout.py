"""Says which items belong to the evals and never to training, by a hash of what identifies the item.

The rule is a pure function of the key, so the training stream and the evals agree without sharing any list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

# Per cent of the keys of each kind that training never sees.
SHARE = {"add": 10, "sub": 10, "mul": 10, "sort": 10, "reverse": 12, "identifier": 20, "memory": 10}


def is_held_out(kind: str, key: str) -> bool:
    """True where `key` is reserved for the evals. Raises KeyError for an unknown kind."""
    digest = hashlib.blake2b(f"{kind}:{key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 100 < SHARE[kind]


def pair_key(a: int, b: int) -> str:
    """Identifies an unordered pair of operands."""
    return f"{min(a, b)},{max(a, b)}"


def is_round(number: int) -> bool:
    """One digit followed by zeros only."""
    return len(str(abs(number)).rstrip("0")) <= 1


def pair_held_out(kind: str, a: int, b: int) -> bool:
    """The rule for arithmetic.

    What the steps of larger items are made of is always trained: sums with a one-digit number, products of two round
    numbers.
    """
    table = (is_round(a) and is_round(b)) if kind == "mul" else min(abs(a), abs(b)) < 10
    return not table and is_held_out(kind, pair_key(a, b))


def list_key(items: Iterable[object]) -> str:
    """Identifies a multiset of items, whatever their order."""
    return ",".join(sorted(str(item) for item in items))


SPLITS = ("open", "blind")


def split_of(key: str) -> str:
    """The half of the held-out items that one with this key belongs to."""
    return SPLITS[hashlib.blake2b(f"split:{key}".encode(), digest_size=1).digest()[0] % 2]
