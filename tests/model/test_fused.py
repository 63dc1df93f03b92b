"""The fused kernels of the forward pass: numbers in the interpreter, machine code for every GPU, and who uses them."""

import inspect
import sys
from dataclasses import replace

import pytest
import torch

from model import few_rows, fused, gpu_kernels
from model.attention import triton_kernels
from model.moe_layer import Gate, fused_router
from moe.config import RoutingConfig, RoutingMethod
from moe.kernels import router
from tests.interpreter import RunInterpreted
from tests.moe.kernels.compiling import compile_kernel, of_hopper_and_others

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROUTING = RoutingConfig(method=RoutingMethod.SOFTMAX_AFTER_TOPK, num_experts=32, top_k=4)


def test_numbers_in_the_interpreter(run_interpreted: RunInterpreted) -> None:
    errors = run_interpreted("tests.model.interpreted_fused")
    assert len(errors) == 23
    assert {case: error for case, error in errors.items() if not error < 2e-6} == {}


KERNELS = {
    "norm": (gpu_kernels._add_rms_norm, {"H": 2880, "H_PAD": 4096, "HAS_DELTA": True, "USE_PDL": False}),
    **{
        f"route by {name} logits in {parts}": (
            router._route,
            {
                "H": 2880, "E": 32, "E_PAD": 32, "K": 4, "K_PAD": 4, "G": 1, "KEPT": 1,
                "BLOCK_T": 16 if parts == "parts" else 64, "BLOCK_H": 64, "IS_SIGMOID": False, "NORMALIZE": True,
                "HAS_BIAS": True, "HAS_CORRECTION": False, "ROUND_TO_BF16": name == "bf16",
                "MAX_PARTS": 32 if parts == "parts" else 1, "CHOSEN_T": 4 if parts == "parts" else 64,
                "STARTS_NEXT": parts == "one",
                **dict.fromkeys(("DROPS", "COUNTS", "HAS_LIVE", "PLACES"), name == "bf16"), "USE_PDL": False,
                "INTERPRET": False,
            },
        )
        for name, parts in (("fp32", "parts"), ("bf16", "one"))
    },
    "rope": (
        triton_kernels.rotate_and_store,
        {
            "NUM_KV_HEADS": 8, "R": 8, "R_PAD": 8, "D": 64, "V": 64, "D_PAD": 64, "V_PAD": 64, "BLOCK_T": 8,
            "HAS_ROTATION": True, "IS_FP8": False, "USE_CAST": False, "USE_PDL": False,
        },
    ),
    **{
        f"few rows of {what}": (
            few_rows.few_rows_linear,
            {
                "K": 2880, "SHARES": shares, "MAX_R": 16, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
                "NUM_STAGES": tile.num_stages, "HAS_BIAS": shares > 1, "USE_PDL": False, "INTERPRET": False,
            },
        )
        for what, tile, shares in (("a projection", few_rows._TILE, 3), ("a head", few_rows._WIDE_TILE, 1))
    },
    "embedding": (gpu_kernels._embed, {"H": 7168, "BLOCK": 1024, "USE_PDL": False}),
}  # fmt: skip
INTEGERS = {
    "ids_ptr": "*i32", "arrived_ptr": "*i32", "slots_ptr": "*i64", "counts_ptr": "*i64", "table_ptr": "*i32",
    "live_ptr": "*i32",
}  # fmt: skip
FP32 = {"parts_ptr", "bias_ptr", "weights_ptr", "rotation_ptr"}


@of_hopper_and_others
def test_kernels_compile(arch: int) -> None:
    for name, (kernel, constants) in KERNELS.items():
        names = [each for each in inspect.signature(kernel.fn).parameters if each.endswith("_ptr")]
        pointers = (
            {"ids_ptr": "*i32", "arrived_ptr": "*i32", "slots_ptr": "*i64"} | INTEGERS | dict.fromkeys(FP32, "*fp32")
        )
        if name == "norm":
            pointers["weight_ptr"] = "*fp32"
        if name == "few rows of a head":
            pointers["out_ptr"] = "*fp32"
        if name == "embedding":
            pointers["ids_ptr"] = "*i64"
        options = constants
        if arch >= 90:
            options = {each: value or each == "USE_PDL" for each, value in constants.items()}
        kinds = {pointer: pointers.get(pointer, "*bf16") for pointer in names}
        assert "cubin" in compile_kernel(kernel, arch, kinds, options, num_warps=4).asm


def test_a_cpu_and_a_machine_without_triton_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused.fused_kernels(CPU) is None
    assert fused.fused_kernels(CUDA) is gpu_kernels
    monkeypatch.setitem(sys.modules, "model.gpu_kernels", None)
    fused._module.cache_clear()
    assert fused.fused_kernels(CUDA) is None
    fused._module.cache_clear()


def gate_on_gpu(weight: torch.Tensor, out_dtype: torch.dtype = torch.float32) -> Gate:
    """A gate that says it is on a GPU."""
    gate = Gate(weight, None, out_dtype)
    gate.weight = torch.nn.Parameter(torch.empty(weight.shape, device="meta"), requires_grad=False)

    class OnGpu:
        device = CUDA

    del gate.weight
    gate.__dict__["weight"] = OnGpu()
    return gate


def test_the_fused_router_takes_exact_weights_and_rules_it_knows() -> None:
    exact = torch.randn(32, 64).bfloat16().float()
    assert fused_router(gate_on_gpu(exact), ROUTING) is router
    assert fused_router(gate_on_gpu(exact + 1e-4), ROUTING) is None, "bf16 would round these weights"
    assert fused_router(gate_on_gpu(exact + 1e-4, torch.bfloat16), ROUTING) is router, "rounded anyway"
    assert fused_router(Gate(exact, None, torch.float32), ROUTING) is None
    sigmoid = RoutingConfig(method=RoutingMethod.SIGMOID_GROUPED, num_experts=32, top_k=4)
    assert fused_router(gate_on_gpu(exact), sigmoid) is router
    assert fused_router(gate_on_gpu(exact), replace(sigmoid, method=RoutingMethod.SQRT_SOFTPLUS)) is None
    assert fused_router(gate_on_gpu(exact), replace(ROUTING, normalize=False)) is None
    many = torch.randn(257, 64).bfloat16()
    assert fused_router(gate_on_gpu(many[:256]), replace(ROUTING, num_experts=256)) is router
    assert fused_router(gate_on_gpu(many), replace(ROUTING, num_experts=257)) is None, "too wide for one program"
