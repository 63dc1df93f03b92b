"""Copies of prepared layers: every tensor new, everything else shared, structure and strides kept."""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.copies import clone, copy_into, tensors_in


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    data: torch.Tensor
    layout: object
    scale: torch.Tensor | None = None


@dataclass
class Outer:
    inner: Inner
    by_warps: dict[int, torch.Tensor]
    parts: tuple[Any, ...]
    sizes: list[dict[str, int]]


def make() -> Outer:
    return Outer(
        inner=Inner(data=torch.arange(6.0).view(2, 3).T, layout=object()),
        by_warps={4: torch.ones(2), 8: torch.zeros(2)},
        parts=(torch.ones(1), "name"),
        sizes=[{"a": 1}, {}],
    )


def test_every_tensor_is_copied_with_its_strides_and_the_rest_is_shared() -> None:
    old = make()
    new = clone(old)
    pairs = list(zip(tensors_in(old), tensors_in(new), strict=True))
    assert len(pairs) == 4
    for a, b in pairs:
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
        assert a.data_ptr() != b.data_ptr()
    assert new.inner.layout is old.inner.layout
    assert new.sizes is old.sizes
    assert new.parts[1] == "name"


def test_copying_into_overwrites_the_tensors_in_place() -> None:
    source, target = make(), make()
    kept = list(tensors_in(target))
    for tensor in tensors_in(source):
        tensor.add_(10)
    want = list(tensors_in(clone(source)))
    copy_into(target, source)
    assert all(torch.equal(a, b) for a, b in zip(kept, want, strict=True))
