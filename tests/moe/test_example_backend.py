"""A backend that is added as docs/adding.md says: built, self-checked, explained and refused like the others."""

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe import (
    Activation,
    MoeA2ABackend,
    MoeBackend,
    MoeRunner,
    RankPlace,
    SelfCheckError,
    StandardDispatchOutput,
    Topology,
    registry,
)
from moe.check.selfcheck import check_layer
from moe.choose.explain import explain
from moe.choose.select import choose_backend
from moe.device import Device
from moe.errors import UnsupportedPathError, WeightFormatError
from tests.moe.moe_layers import make_config, make_experts, random_topk
from tests.tables import rows

MODULE = "example_backend"
CHAPTER = (Path(__file__).parents[2] / "docs" / "adding.md").read_text().split("\n## A new backend\n")[1]
NONE = MoeA2ABackend.NONE


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MoeBackend]:
    """The file of the chapter, the enum member and the line in the table, until the test ends."""
    [code] = re.findall(r"```python\n(.*?)```", CHAPTER, re.DOTALL)
    (tmp_path / f"{MODULE}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    member = str.__new__(MoeBackend, "example")
    member._name_, member._value_ = "EXAMPLE", "example"
    type.__setattr__(MoeBackend, "EXAMPLE", member)  # an enum refuses members after its definition
    monkeypatch.setitem(MoeBackend._member_map_, "EXAMPLE", member)
    monkeypatch.setitem(MoeBackend._value2member_map_, "example", member)
    monkeypatch.setitem(registry.BACKEND_MODULES, member, MODULE)
    yield member
    for table in (registry._backends, registry._runner_cores, registry._pre_permutes):
        for key in [key for key in table if member in (key if isinstance(key, tuple) else (key,))]:
            del table[key]
    sys.modules.pop(MODULE, None)
    type.__delattr__(MoeBackend, "EXAMPLE")


def layer(example: MoeBackend, **changes: Any) -> tuple[Any, Any, MoeRunner]:
    experts = make_experts("bf16", bias=False)
    config = make_config(experts, dtype=torch.bfloat16, **({"activation": Activation()} | changes))
    return experts, config, MoeRunner(example, NONE, config)


def test_it_passes_the_self_check_which_finds_its_faults(example: MoeBackend) -> None:
    experts, config, runner = layer(example)
    quant_info = registry.load_backend(example).prepare(experts, config, Topology())
    report = check_layer(runner, quant_info, experts, layer=3, topology=Topology())
    assert report.path == "example/none/bf16"
    assert 0 < report.worst_error <= report.tolerance == 1.5e-2
    wrong = dataclasses.replace(quant_info, w2=quant_info.w2.roll(1, 0))
    with pytest.raises(SelfCheckError, match="layer 3, example/none/bf16: expert"):
        check_layer(runner, wrong, experts, layer=3, topology=Topology())


@rows("tp_size", 1, 2)
def test_without_a_post_permute_the_result_says_whether_it_is_partial(example: MoeBackend, tp_size: int) -> None:
    place = RankPlace(tp_size=tp_size)
    experts, config, runner = layer(example, place=place)
    x = torch.randn(3, config.hidden_size, dtype=torch.bfloat16)
    quant_info = registry.load_backend(example).prepare(experts, config, Topology.at(place))
    result = runner.run(StandardDispatchOutput(x, random_topk(3, config.num_experts)), quant_info)
    assert result.is_partial == (tp_size == 2)


def test_selection_knows_it(example: MoeBackend) -> None:
    _, config, _ = layer(example)
    cpu = Device(arch="cpu")
    assert choose_backend(example, cpu, "bf16", NONE, config) is example
    rows = explain("cpu", "bf16", NONE, config)
    assert rows[-1].backend is example, "auto_order puts it last"
    assert rows[-1].reason is None
    with pytest.raises(UnsupportedPathError, match="example"):
        choose_backend(example, cpu, "mxfp4", NONE, config)
    assert "transport deepep is not supported" in str(
        registry.load_backend(example).supports(cpu, "bf16", MoeA2ABackend.DEEPEP, config)
    )


@rows(
    "biases, changes, error, words",
    (True, {}, WeightFormatError, "bf16 experts with biases are not supported"),
    (False, {"activation": Activation(limit=7.0)}, UnsupportedPathError, "is not supported for bf16, only plain"),
    (False, {"dtype": torch.float32}, UnsupportedPathError, "the kernels take and give bfloat16"),
)
def test_what_prepare_refuses_explain_knows(
    example: MoeBackend, biases: bool, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    config = dataclasses.replace(layer(example)[1], has_biases=biases, **changes)
    experts = make_experts("bf16", bias=biases)
    with pytest.raises(error, match=words):
        registry.load_backend(example).prepare(experts, config, Topology())
    row = next(row for row in explain("cpu", "bf16", NONE, config) if row.backend is example)
    assert words in str(row.reason)
