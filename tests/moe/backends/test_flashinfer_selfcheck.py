"""The load-time self-check on the FlashInfer paths: clean layers pass, a corrupted one is named. And import rules."""

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe import (
    BypassedTopK,
    MoeA2ABackend,
    MoeBackend,
    MoeRunner,
    RoutingConfig,
    RoutingMethod,
    SelfCheckError,
    Topology,
)
from moe.check.selfcheck import check_layer
from moe.registry import load_backend
from tests.emulators.trtllm import install_trtllm
from tests.moe.backends import hostile
from tests.tables import rows

ROOT = Path(__file__).parents[3]
E, H, I, K = 4, 256, 256, 2
X = hostile.tokens(16, H, size=3.0)


@rows(
    "name, ep_size, method",
    ("fp8_block", 1, RoutingMethod.SIGMOID_GROUPED),
    ("fp8_tensor", 1, RoutingMethod.SIGMOID_GROUPED),
    ("nvfp4", 1, RoutingMethod.SOFTMAX_AFTER_TOPK),
    ("nvfp4", 2, RoutingMethod.SIGMOID_GROUPED),
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
    topology, whole = Topology(ep_size=ep_size, ep_rank=ep_size - 1), hostile.quantized_experts(name, E, H, I, x=X)
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
