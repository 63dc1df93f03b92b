"""The self-check: passes on clean layers of every format, and names what a corrupted one got wrong."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
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
    Topology,
    WeightFormatError,
    registry,
)
from moe.activations import gated_activation
from moe.backend import CheckCase
from moe.backends.torch.backend import TorchBackend, TorchCoreInput, TorchRunnerCore
from moe.check.reference import reference_moe
from moe.check.selfcheck import (
    TOKENS_PER_EXPERT,
    TOKENS_PER_SIZE,
    SelfCheckReport,
    _check_tokens,
    _sets_of,
    _some_experts,
    check_layer,
)
from moe.config import DispatchDtype, DispatchFormat
from moe.formats import ExpertWeights, Fp8BlockWeight, Weight
from moe.registry import load_backend
from tests.emulators.aiter import install_aiter
from tests.emulators.cutedsl import install_cutedsl
from tests.emulators.deep_gemm import install_deep_gemm
from tests.moe.backends import hostile
from tests.moe.backends.hostile import lost_expert, shard
from tests.moe.moe_layers import DEEPSEEK_V4, FORMATS, GPT_OSS, PLAIN, make_config, make_experts
from tests.tables import rows


def check(
    experts: ExpertWeights, prepared: ExpertWeights | None = None, topology: Topology | None = None, **changes: object
) -> SelfCheckReport:
    """Check a layer whose quant info was built from `prepared`, by default the experts themselves."""
    topology = topology or Topology()
    config = make_config(experts, place=topology, **changes)
    quant_info = TorchBackend().prepare(prepared or experts, config, topology)
    runner = MoeRunner(MoeBackend.TORCH, MoeA2ABackend.NONE, config)
    return check_layer(runner, quant_info, experts, layer=5, topology=topology)


def scaled(weight: Weight, field: str, index: tuple[object, ...], factor: float) -> Weight:
    """The weight with some entries of one field changed."""
    tensor = getattr(weight, field).clone()
    tensor[index] = tensor[index] + 1 if tensor.dtype == torch.uint8 else (factor * tensor[index].float()).to(tensor)
    return dataclasses.replace(weight, **{field: tensor})


LAYERS = [(name, dtype, GPT_OSS, True) for name in FORMATS for dtype in (torch.float32, torch.bfloat16)]
LAYERS += [("mxfp4", torch.bfloat16, activation, bias) for activation in (PLAIN, DEEPSEEK_V4) for bias in (True, False)]


@rows("format_name, dtype, activation, bias", *LAYERS)
def test_clean_layers_pass(format_name: str, dtype: torch.dtype, activation: Activation, bias: bool) -> None:
    report = check(make_experts(format_name, bias=bias), dtype=dtype, activation=activation)
    assert report.layer == 5
    assert report.path == f"torch/none/{format_name}"
    assert 0 < report.worst_error <= report.tolerance
    assert report.tolerance == (1e-5 if dtype == torch.float32 else 1.5e-2)


def test_fp8_blocks_may_span_the_border_of_gate_and_up() -> None:
    g = torch.Generator().manual_seed(0)
    w13, w2 = torch.randn(2, 2 * 192, 64, generator=g), torch.randn(2, 64, 192, generator=g)
    report = check(ExpertWeights(w13=Fp8BlockWeight.quantize(w13), w2=Fp8BlockWeight.quantize(w2)), dtype=torch.float32)
    assert 0 < report.worst_error <= report.tolerance


SCALES = {"fp8_block": "scale_inv", "fp8_tensor": "scale", "mxfp4": "scales", "nvfp4": "scales", "bf16": "data"}


@rows("format_name", *FORMATS)
@rows("matrix, dtype", ("w13", torch.float32), ("w2", torch.bfloat16))
def test_one_wrong_row_of_scales_names_layer_path_and_expert(format_name: str, matrix: str, dtype: torch.dtype) -> None:
    experts = make_experts(format_name, hidden=256)
    row = () if format_name == "fp8_tensor" else (0 if format_name == "fp8_block" else 77,)
    broken = scaled(getattr(experts, matrix), SCALES[format_name], (2, *row), 2.0)
    with pytest.raises(SelfCheckError) as error:
        check(experts, dataclasses.replace(experts, **{matrix: broken}), dtype=dtype)
    text = str(error.value)
    assert f"layer 5, torch/none/{format_name}: expert 2 differs" in text
    assert "the tolerance is" in text
    assert float(re.search(r"by ([\d.e+-]+) in", text)[1]) > 1e-2
    if matrix == "w2" and row:
        assert "outputs 0..127" in text


def swap_halves(experts: ExpertWeights) -> ExpertWeights:
    dense = experts.w13.dequantize().roll(experts.intermediate_size, 1)
    return dataclasses.replace(experts, w13=FORMATS["bf16"](dense), w2=FORMATS["bf16"](experts.w2.dequantize()))


@rows(
    "mutate",
    swap_halves,
    lambda experts: dataclasses.replace(experts, b2=2 * experts.b2),
    lambda experts: dataclasses.replace(experts, b13=experts.b13.roll(1, 0)),
    lambda experts: dataclasses.replace(experts, b13=experts.b13 + 50 * (torch.arange(256) == 130)),  # clamped
)
def test_wrong_layouts_are_caught(mutate: Callable[[ExpertWeights], ExpertWeights]) -> None:
    experts = make_experts("mxfp4")
    with pytest.raises(SelfCheckError, match="expert"):
        check(experts, mutate(experts), dtype=torch.bfloat16)


@rows("wrong", {"limit": None}, {"limit": 7.5}, {"beta": 0.0}, {"alpha": 1.0})
def test_a_wrong_activation_is_caught(wrong: dict[str, float | None], monkeypatch: pytest.MonkeyPatch) -> None:
    activate = functools.partial(gated_activation, activation=dataclasses.replace(GPT_OSS, **wrong))
    monkeypatch.setattr("moe.backends.torch.backend.gated_activation", lambda gate, up, right: activate(gate, up))
    with pytest.raises(SelfCheckError):
        check(make_experts("mxfp4"), dtype=torch.bfloat16)


def test_a_nan_is_an_infinite_error() -> None:
    experts = make_experts("bf16")
    with pytest.raises(SelfCheckError, match="expert 1 differs from the reference by inf"):
        check(experts, dataclasses.replace(experts, w2=scaled(experts.w2, "data", (1, 3, 4), float("nan"))))


@rows("value", float("nan"), float("inf"))
@rows("matrix", "w13", "w2")
def test_weights_that_give_nan_are_no_fault_of_the_path(matrix: str, value: float) -> None:
    """It was told as a wrong kernel, which is to be replaced by the torch backend."""
    experts = make_experts("bf16", hidden=256)
    broken = scaled(getattr(experts, matrix), "data", (2, 190, 4), value)
    words = "layer 5: the bf16 weights of expert 2 give NaN or infinity.* download it again"
    with pytest.raises(WeightFormatError, match=words):
        check(dataclasses.replace(experts, **{matrix: broken}), activation=PLAIN)


@rows("size", 1e19, 1e25)
def test_huge_weights_are_not_tested_with_zeros(size: float) -> None:
    """The sum of squares overflowed, and so the tokens of the expert, and the mixed ones, were zeros."""
    experts = make_experts("bf16")
    huge = dataclasses.replace(experts, w13=scaled(experts.w13, "data", (1,), size))
    config = make_config(huge, place=Topology())
    x_TH, _ = _check_tokens(huge, config, Topology())
    assert bool((x_TH != 0).any(1).all())
    wrong = dataclasses.replace(huge, w13=scaled(huge.w13, "data", (1,), 1.1))
    with pytest.raises(SelfCheckError, match="expert 1 differs"):
        check(huge, wrong)


def test_a_wrong_sum_over_experts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that returns each token's first expert only: right for one expert, wrong for several."""
    original = TorchRunnerCore.run

    def first_expert_only(self: TorchRunnerCore, core_input: TorchCoreInput, *rest: Any) -> torch.Tensor:
        ids_TK = core_input.ids_TK.clone()
        ids_TK[:, 1:].masked_fill_(ids_TK[:, :1] >= 0, -1)
        return original(self, dataclasses.replace(core_input, ids_TK=ids_TK), *rest)

    monkeypatch.setattr(TorchRunnerCore, "run", first_expert_only)
    with pytest.raises(SelfCheckError, match="the sum over several experts differs"):
        check(make_experts("mxfp4"))


@rows("format_name, tp_size, ep_size", ("mxfp4", 2, 1), ("bf16", 1, 4), ("mxfp4", 8, 2))
def test_every_rank_checks_its_own_part(format_name: str, tp_size: int, ep_size: int) -> None:
    experts = make_experts(format_name, hidden=96, inter=288)
    for tp_rank, ep_rank in itertools.product(range(tp_size), range(ep_size)):
        own = shard(experts, tp=(tp_size, tp_rank), ep=(ep_size, ep_rank))
        topology = Topology(tp_size=tp_size, tp_rank=tp_rank, ep_size=ep_size, ep_rank=ep_rank)
        assert check(own, topology=topology, num_experts=4).worst_error < 1e-5


def test_the_error_names_the_global_id_of_an_expert() -> None:
    own = shard(make_experts("mxfp4"), ep=(2, 1))
    broken = dataclasses.replace(own, w2=scaled(own.w2, "scales", (1, 5), 2))
    with pytest.raises(SelfCheckError, match="expert 3 differs"):
        check(own, broken, Topology(ep_size=2, ep_rank=1), num_experts=4)


def test_a_bias_added_on_every_rank_is_caught() -> None:
    own = shard(make_experts("mxfp4"), tp=(2, 1))
    config = make_config(own, place=RankPlace(tp_size=2))
    runner = MoeRunner(MoeBackend.TORCH, MoeA2ABackend.NONE, config)
    quant_info = TorchBackend().prepare(own, config, Topology(tp_size=2))
    with pytest.raises(SelfCheckError):
        check_layer(runner, quant_info, own, layer=0, topology=Topology(tp_size=2, tp_rank=1))


@rows("activation", GPT_OSS, DEEPSEEK_V4)
@rows("num_experts", 1, 4, 8)
def test_probe_visits_every_local_expert_and_clamps_a_tenth(activation: Activation, num_experts: int) -> None:
    experts = make_experts("nvfp4", num_experts=num_experts, bias=False)
    config = make_config(experts, activation=activation, top_k=min(2, num_experts))
    x, topk = _check_tokens(experts, config, Topology())
    assert set(topk.ids.flatten().tolist()) - {-1} == set(range(num_experts))
    for expert in range(num_experts):
        rows = (topk.ids == expert).any(1) & (topk.ids >= 0).sum(1).eq(1)
        gate, up = (x[rows] @ experts.w13.select(expert).dequantize().T).chunk(2, -1)
        clamped = ((gate > activation.limit) | (up.abs() > activation.limit)).float()
        assert 0.1 < clamped.mean() < 0.9
        large, small = clamped[:TOKENS_PER_EXPERT].split(TOKENS_PER_SIZE)
        assert large.mean() > 0.2
        assert small.mean() < 0.02, "weights behind a clamp must show, too"
    assert reference_moe(x, topk, experts, activation).isfinite().all()


@rows(
    "max_tokens, num_experts, visited",
    (1, 32, [0, 31]), (8, 32, [0, 31]), (16, 32, [0, 10, 21, 31]), (16, 3, [0, 1, 2]), (64, 1, [0]),
     (None, 3, [0, 1, 2]),
)  # fmt: skip
def test_few_tokens_visit_first_to_last_expert(max_tokens: int | None, num_experts: int, visited: list[int]) -> None:
    probe = CheckCase(quant_info=None, quantize_input=None, tolerance=1.0, max_tokens=max_tokens)
    assert _some_experts(probe, num_experts) == visited


def test_many_rows_at_one_expert_come_first_and_are_no_larger_than_what_is_run_at_once() -> None:
    probe = CheckCase(quant_info=None, quantize_input=None, tolerance=1.0, rows_at_one_expert=(9, 13, 99))
    assert _sets_of(probe, [0, 2], 4) == [0, 1, 0, 4, 5, 4, 5, 8, 9], "three sets of four, then four"
    small = dataclasses.replace(probe, max_tokens=8)
    assert _sets_of(small, [0, 2], 4) == [0, 1, 4, 5, 8, 9]


# ---- behind every transport ----


E, K, H, I = 8, 3, 2048, 128


@dataclass(frozen=True, kw_only=True)
class Path:
    backend: MoeBackend
    a2a: MoeA2ABackend
    formats: tuple[DispatchFormat, ...]
    name: str
    install: Callable[[pytest.MonkeyPatch], Any] = lambda patch: None
    dispatch_dtype: DispatchDtype = DispatchDtype.BF16
    hidden: int = H

    def __str__(self) -> str:
        return f"{self.backend}-{self.a2a}-{'+'.join(self.formats)}-{self.name}-{self.dispatch_dtype}"


NORMAL, LL = DispatchFormat.DEEPEP_NORMAL, DispatchFormat.DEEPEP_LL
TORCH, GEMM, AITER, CUTE = (
    MoeBackend.TORCH, MoeBackend.DEEP_GEMM, MoeBackend.AITER, MoeBackend.FLASHINFER_CUTEDSL,
)  # fmt: skip


install_sm100 = functools.partial(install_deep_gemm, arch="sm100")
BOTH = {"a2a": MoeA2ABackend.DEEPEP, "formats": (NORMAL, LL)}
LL_ONLY = {"a2a": MoeA2ABackend.DEEPEP, "formats": (LL,)}
ON_GEMM = {"backend": GEMM, "name": "fp8_block"}
ON_AITER = {"backend": AITER, "install": install_aiter}
ON_CUTE = {"backend": CUTE, "install": install_cutedsl, "name": "nvfp4"}
MORI = {"a2a": MoeA2ABackend.MORI, "hidden": 256}
FLASHINFER = {"a2a": MoeA2ABackend.FLASHINFER, "formats": (DispatchFormat.FLASHINFER,)}
PATHS = [
    Path(backend=TORCH, name="mxfp4", **BOTH),
    Path(backend=TORCH, name="bf16", hidden=2880, a2a=MoeA2ABackend.NIXL, formats=(LL,)),
    Path(install=install_deep_gemm, dispatch_dtype=DispatchDtype.FP8, **ON_GEMM, **BOTH),
    Path(install=install_sm100, dispatch_dtype=DispatchDtype.FP8_UE8M0, **ON_GEMM, **BOTH),
    Path(name="bf16", **ON_AITER, **BOTH),
    Path(name="mxfp4", **ON_AITER, **LL_ONLY),
    Path(name="bf16", formats=(DispatchFormat.MORI_NORMAL,), **ON_AITER, **MORI),
    Path(name="fp8_block", formats=(DispatchFormat.MORI_NORMAL,), dispatch_dtype=DispatchDtype.FP8, **ON_AITER, **MORI),
    Path(name="fp8_block", formats=(DispatchFormat.MORI_LL,), dispatch_dtype=DispatchDtype.FP8, **ON_AITER, **MORI),
    Path(**ON_CUTE, **LL_ONLY),
    Path(dispatch_dtype=DispatchDtype.NVFP4, **ON_CUTE, **LL_ONLY),
    Path(**ON_CUTE, **FLASHINFER),
    Path(dispatch_dtype=DispatchDtype.NVFP4, **ON_CUTE, **FLASHINFER),
]


@functools.cache
def experts_of(path: Path) -> ExpertWeights:
    inter = 256 if path.backend is AITER else I
    if path.name == "nvfp4":
        x = hostile.tokens(16, path.hidden, size=3.0)
        whole = hostile.quantized_experts("nvfp4", E, path.hidden, inter, x=x)
        return hostile.with_layer_scales(whole, whole)
    return hostile.plain_experts(path.name, E, path.hidden, inter)


def check_path(path: Path, rank: int, prepared: Callable[[ExpertWeights], ExpertWeights]) -> SelfCheckReport:
    whole = experts_of(path)
    own = hostile.with_layer_scales(hostile.shard(whole, ep=(2, rank)), whole)
    topology = Topology(ep_size=2, ep_rank=rank, a2a=path.a2a, dispatch_dtype=path.dispatch_dtype)
    dtype = torch.float32 if path.backend is TORCH else torch.bfloat16
    config = hostile.make_config(E, path.hidden, own.intermediate_size, K, place=topology, dtype=dtype)
    runner = MoeRunner(path.backend, path.a2a, config, dispatch_formats=path.formats)
    info = load_backend(path.backend).prepare(prepared(own), config, topology)
    return check_layer(runner, info, own, layer=4, topology=topology)


@rows("path", *PATHS)
def test_clean_passes_and_a_neighbours_weights_are_named(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    path.install(monkeypatch)
    report = check_path(path, 1, lambda experts: experts)
    assert 0 < report.worst_error <= report.tolerance
    assert report.path == f"{path.backend}/{path.a2a}/{path.name}"
    with pytest.raises(SelfCheckError, match=f"layer 4, {report.path}.*: expert 6 differs"):
        check_path(path, 1, lost_expert)


def test_both_formats_of_a_transport_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that only one of DeepEP's two layouts has is found, and the layout named."""
    swapped = lambda out_RH, dispatched, *rest: dispatched.result(out_RH.roll(1, 0), False)  # noqa: E731
    monkeypatch.setitem(registry._post_permutes, (TORCH, LL), swapped)
    with pytest.raises(SelfCheckError, match=r"layer 4, torch/deepep/mxfp4 \(deepep_ll\): "):
        check_path(PATHS[0], 0, lambda experts: experts)
