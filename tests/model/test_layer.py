"""`Layer` finds its parts as torch does, whatever was set last."""

import pytest
import torch
from torch import nn

from model.layer import Layer


class Scale(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.ones(2), requires_grad=False)
        self.kept = nn.Buffer(torch.zeros(3))
        self.size = 2

    def forward(self, x: torch.Tensor, *, times: int = 1) -> torch.Tensor:
        return x * times if self.weight is None else x * self.weight * times


def test_parts_are_registered_and_the_last_one_counts() -> None:
    layer = Scale()
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert [name for name, _ in layer.named_buffers()] == ["kept"]
    layer.weight = nn.Parameter(torch.full((2,), 3.0), requires_grad=False)
    assert layer(torch.ones(2), times=2).tolist() == [6.0, 6.0]
    layer.weight = None
    assert layer(torch.ones(2)).tolist() == [1.0, 1.0]
    assert not list(layer.parameters())


def test_weights_that_torch_replaces_or_forgets() -> None:
    layer = Scale()
    layer.to(torch.float64)
    assert (layer.weight.dtype, layer.kept.dtype) == (torch.float64, torch.float64)
    del layer.weight
    assert not hasattr(layer, "weight")


def test_a_part_inside_a_part_is_found() -> None:
    outer = Scale()
    outer.inner = Scale()
    assert len(list(outer.parameters())) == 2
    assert list(outer.modules()) == [outer, outer.inner]


def test_a_call_runs_the_forward_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Scale()
    monkeypatch.setattr(Scale, "forward", lambda self, x: x + self.size)
    assert layer(torch.zeros(1)).tolist() == [2.0]
