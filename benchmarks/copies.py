"""Copies of whatever holds tensors: prepared layers and routings, of any library. Chooses nothing, times nothing."""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def clone(value: T) -> T:
    """The same value with every tensor in it copied, through dataclasses, tuples, lists and dicts.

    Parts without tensors stay shared, so records that cannot be built again (a library's layouts) do no harm.
    """
    if isinstance(value, torch.Tensor):
        return value.clone()  # type: ignore[return-value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        new = {name: clone(part) for name, part in old.items()}
        changed = {name: part for name, part in new.items() if part is not old[name]}
        return dataclasses.replace(value, **changed) if changed else value
    if isinstance(value, dict):
        copied = {key: clone(part) for key, part in value.items()}
        return copied if any(copied[key] is not value[key] for key in value) else value  # type: ignore[return-value]
    if type(value) in (tuple, list):
        parts = [clone(part) for part in value]  # type: ignore[attr-defined]
        is_changed = any(a is not b for a, b in zip(parts, value, strict=True))  # type: ignore[call-overload]
        return type(value)(parts) if is_changed else value  # type: ignore[call-arg]
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `value`, in an order that depends on its structure only."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)


def copy_into(target: Any, source: Any) -> None:
    """Overwrite the tensors of `target` with those of `source`, which has the same structure and shapes."""
    for to, of in zip(tensors_in(target), tensors_in(source), strict=True):
        to.copy_(of)
