"""The load-time self-check on the FlashInfer paths: clean layers pass, a corrupted one is named. And import rules."""

import ast
import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe import (
    Activation,
    BypassedTopK,
    MoeA2ABackend,
    MoeBackend,
    MoeRunner,
    RoutingConfig,
    RoutingMethod,
    SelfCheckError,
    StandardDispatchOutput,
    StandardTopK,
    Topology,
)
from moe.check.selfcheck import check_layer
from moe.formats import ExpertWeights, Mxfp4Weight
from moe.registry import load_backend
from tests.emulators.cutedsl import install_cutedsl
from tests.emulators.cutlass import install_cutlass
from tests.emulators.trtllm import install_trtllm
from tests.moe.backends import hostile

ROOT = Path(__file__).parents[3]
E, H, I, K = 4, 256, 256, 2
X = hostile.tokens(16, H, size=3.0)
Install = Callable[[pytest.MonkeyPatch], Any]
PATHS: list[tuple[MoeBackend, str, Install]] = [
    (MoeBackend.FLASHINFER_MXFP4, "mxfp4", install_cutlass),
    (MoeBackend.FLASHINFER_MXFP4, "mxfp4", install_trtllm),
    (MoeBackend.FLASHINFER_CUTLASS, "bf16", install_cutlass),
    (MoeBackend.FLASHINFER_CUTLASS, "fp8_block", install_cutlass),
    (MoeBackend.FLASHINFER_CUTLASS, "fp8_tensor", install_cutlass),
    (MoeBackend.FLASHINFER_CUTLASS, "nvfp4", lambda patch: install_cutlass(patch, 10, 0)),
    (MoeBackend.FLASHINFER_TRTLLM, "fp8_block", install_trtllm),
    (MoeBackend.FLASHINFER_TRTLLM, "fp8_tensor", install_trtllm),
    (MoeBackend.FLASHINFER_TRTLLM, "nvfp4", install_trtllm),
    (MoeBackend.FLASHINFER_CUTEDSL, "nvfp4", install_cutedsl),
]
IDS = [f"{backend}-{name}-{number}" for number, (backend, name, _) in enumerate(PATHS)]


def make(name: str) -> ExpertWeights:
    if name != "mxfp4":
        return hostile.quantized_experts(name, E, H, I, x=X)
    w13, w2 = hostile.dense_experts(E, H, I)
    b13, b2 = hostile.biases(E, H, I)
    return ExpertWeights(w13=Mxfp4Weight.quantize(w13), w2=Mxfp4Weight.quantize(w2), b13=b13, b2=b2)


def test_clean_passes_and_swapped_halves_are_named(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, name, install in PATHS:
        with subtests.test(backend=backend, name=name, install=install):
            install(monkeypatch)
            experts, entry = make(name), load_backend(backend)
            activation = Activation(alpha=1.702, beta=1.0, limit=7.0) if name == "mxfp4" else Activation()
            config = hostile.make_config(E, H, I, K, activation=activation)
            runner = MoeRunner(backend, MoeA2ABackend.NONE, config)
            info = entry.prepare(experts, config, Topology())
            report = check_layer(runner, info, experts, layer=7, topology=Topology())
            assert report.worst_error <= report.tolerance
            # the same rows, but the prepared layer lost one expert's: it holds its neighbour's weights
            broken = dataclasses.replace(info, w2=info.w2[torch.tensor([0, 1, 1, 3])])
            with pytest.raises(SelfCheckError, match=f"layer 7, {backend}/none/{name}: expert 2 differs"):
                check_layer(runner, broken, experts, layer=7, topology=Topology())


@pytest.mark.parametrize(
    ("name", "ep_size", "method"),
    [
        ("fp8_block", 1, RoutingMethod.SIGMOID_GROUPED),
        ("fp8_tensor", 1, RoutingMethod.SIGMOID_GROUPED),
        ("nvfp4", 1, RoutingMethod.SOFTMAX_AFTER_TOPK),
        ("nvfp4", 2, RoutingMethod.SIGMOID_GROUPED),
    ],
)
def test_routing_inside_the_kernel_is_checked_too(
    monkeypatch: pytest.MonkeyPatch, name: str, ep_size: int, method: RoutingMethod
) -> None:
    """A kernel that reads the logits upside down is right for given ids, and caught by the pass with logits."""
    install_trtllm(monkeypatch)
    groups = (
        {"num_groups": 2, "num_kept_groups": 2, "routed_scaling_factor": 2.5}
        if method is RoutingMethod.SIGMOID_GROUPED
        else {}
    )
    routing = RoutingConfig(method=method, num_experts=E, top_k=K, **groups)  # type: ignore[arg-type]
    topology, whole = Topology(ep_size=ep_size, ep_rank=ep_size - 1), make(name)
    config = hostile.make_config(E, H, I, K, routing=routing, place=topology)
    experts = hostile.with_layer_scales(hostile.shard(whole, ep=(ep_size, ep_size - 1)), whole)
    backend = MoeBackend.FLASHINFER_TRTLLM
    info = load_backend(backend).prepare(experts, config, topology)
    runner = MoeRunner(backend, MoeA2ABackend.NONE, config)
    report = check_layer(runner, info, experts, layer=7, topology=topology)
    assert report.worst_error <= report.tolerance
    original = MoeRunner.run

    def upside_down(self: MoeRunner, dispatched: Any, quant_info: Any) -> Any:
        topk = dispatched.topk_output
        if isinstance(topk, BypassedTopK):
            worst_first = BypassedTopK(-topk.logits, topk.config, topk.correction_bias)
            dispatched = dataclasses.replace(dispatched, topk_output=worst_first)
        return original(self, dispatched, quant_info)

    monkeypatch.setattr(MoeRunner, "run", upside_down)
    with pytest.raises(SelfCheckError, match="what the kernel's own routing chose differs"):
        check_layer(runner, info, experts, layer=7, topology=topology)


def test_ids_of_minus_one_add_exactly_zero(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, name, install in PATHS:
        with subtests.test(backend=backend, name=name, install=install):
            install(monkeypatch)
            experts, config = make(name), hostile.make_config(E, H, I, K)
            info = load_backend(backend).prepare(experts, config, Topology(allocator=_full_of_nan))
            runner = MoeRunner(backend, MoeA2ABackend.NONE, config)
            topk = hostile.routing(16, E, K)
            holes = (torch.rand(16, K, generator=torch.Generator().manual_seed(9)) < 0.3) | (topk.ids < 0)
            ids = topk.ids.masked_fill(holes, -1)
            zero, nan = (topk.weights.masked_fill(holes, weight) for weight in (0.0, float("nan")))
            without, none = StandardTopK(zero, topk.ids.masked_fill(holes, 0)), torch.full_like(ids, -1)
            got, poisoned, want, empty = (
                runner.run(StandardDispatchOutput(X, routed), info).hidden_states
                for routed in (StandardTopK(zero, ids), StandardTopK(nan, ids), without, StandardTopK(nan, none))
            )
            # Bits may be compared where every expert gets equally many rows: a GEMM's last bits depend on their number.
            assert torch.equal(poisoned, got)
            assert hostile.relative_error(got, want) < 2**-8, "a step of bf16 in a few values"
            assert torch.equal(empty, torch.zeros(16, H, dtype=torch.bfloat16))


def _full_of_nan(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def test_backends_answer_without_importing_flashinfer() -> None:
    code = (
        "import sys\n"
        "from moe import ExpertShape, MoeA2ABackend, MoeBackend, MoeRunnerConfig\n"
        "from moe.device import Device\n"
        "from moe.registry import load_backend\n"
        "shape = ExpertShape(num_experts=4, hidden_size=256, intermediate_size=256, top_k=2)\n"
        "config = MoeRunnerConfig(shape=shape)\n"
        "for name in [backend for backend in MoeBackend if backend.startswith('flashinfer')]:\n"
        "    load_backend(name).supports(Device(arch='sm90'), 'mxfp4', MoeA2ABackend.NONE, config)\n"
        "assert 'flashinfer' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_emulators_import_neither_backends_nor_loaders() -> None:
    allowed = {"pytest", "torch", "flashinfer", "tests"}
    for path in (ROOT / "tests" / "emulators").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.split(".")[0]
                assert top in allowed or top in sys.stdlib_module_names, f"{path.name} imports {name}"
                assert top != "tests" or name.startswith("tests.emulators"), f"{path.name} imports {name}"
