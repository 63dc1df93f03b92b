"""Compile the kernels for a GPU that need not be there, with the argument types and alignments of a real launch."""

import inspect
import re
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe.kernels.arrivals import parts_at_once
from moe.kernels.gemm import direct_gemm, grouped_gemm
from moe.kernels.group import group_slots, unpermute_sum
from moe.kernels.plan import Plan
from moe.kernels.products import BF16, FP8_BLOCK, FP8_BOTH, MXFP4, NVFP4
from moe.kernels.quantize import quantize_rows

ARCHS = (80, 86, 89, 90, 100, 120)


def rest(*values: object) -> Any:
    """A case that `make kernels` alone runs."""
    return pytest.param(*values, marks=pytest.mark.kernels)


# `make test` compiles for one GPU of each family of matrix instructions (mma, wgmma, tcgen05), or for Hopper alone.
of_all_archs = pytest.mark.parametrize("arch", [80, 90, 100, *map(rest, (86, 89, 120))])
of_hopper_and_others = pytest.mark.parametrize("arch", [90, *map(rest, (80, 86, 89, 100, 120))])

FORMATS = {"bf16": BF16, "fp8_block": FP8_BLOCK, "mxfp4": MXFP4, "nvfp4": NVFP4}
_DATA = {"bf16": "*bf16", "fp8_block": "*i16", "mxfp4": "*i16", "nvfp4": "*i16"}
_SCALES = {"bf16": "*bf16", "fp8_block": "*fp32", "mxfp4": "*i32", "nvfp4": "*i32"}
_STEP_WORDS = {"bf16": (64, 64), "fp8_block": (128, 64), "mxfp4": (128, 32), "nvfp4": (64, 16)}
_FLOATS = ("alpha", "beta", "limit", "scale", "eps", "factor")
# Strides and sizes along which kernels step by whole vectors: multiples of 16 in every real model.
_ALIGNED = (
    "x_stride", "q_stride", "num_cols", "num_out", "out_stride", "hidden_size", "vocab_size", "logits_stride",
)  # fmt: skip


def compile_kernel(
    kernel: Any, arch: int, pointers: dict[str, str], constants: dict[str, Any], *, num_warps: int, num_stages: int = 3
) -> Any:
    """The compiled kernel with its `asm` texts; every other argument is an i32, or an fp32 if it is named so."""
    names = list(inspect.signature(kernel.fn).parameters)
    signature, attrs = {}, {}
    for index, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = pointers.get(name, "fp32" if name in _FLOATS else "i32")
        if name in pointers or name in _ALIGNED:
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attrs,
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def compile_gemm(
    format_name: str, plan: Plan, arch: int,
    *, is_first: bool, top_k: int = 4, one_tile: bool = True, has_tail: bool = True, **others: Any,
) -> Any:  # fmt: skip
    """`direct_gemm` or `grouped_gemm` as `launch.run_layer` would start it; `others`: constants that differ."""
    step, words = _STEP_WORDS[format_name]
    is_fp8 = plan.fp8_activations
    num_warps = plan.num_warps_1 if is_first else plan.num_warps_2
    pointers = {
        "x_ptr": "*fp8e4nv" if is_fp8 else "*bf16", "xs_ptr": "*fp32",
        "w_ptr": "*fp8e4nv" if is_fp8 else _DATA[format_name], "s_ptr": _SCALES[format_name],
        "tail_ptr": _DATA[format_name], "post_ptr": "*fp32", "bias_ptr": "*fp32",
        "out_ptr": "*bf16" if is_first or not plan.is_direct else "*fp32", "ids_ptr": "*i32",
        "weights_ptr": "*fp32", "parts_ptr": "*fp32", "arrived_ptr": "*i32", "slots_ptr": "*i32", "tiles_ptr": "*i32",
    }  # fmt: skip
    constants = {
        "FORMAT": FP8_BOTH if is_fp8 else FORMATS[format_name], "IS_FIRST": is_first, "TOPK": top_k,
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n_1 if is_first else plan.block_n_2, "STEP_K": step, "WORDS": 128 if is_fp8 else words,
        "NUM_STAGES": plan.num_stages_1 if is_first else plan.num_stages_2, "HAS_BIAS": True, "HAS_LIMIT": True,
        "SHORT_K": False, "HAS_TAIL": has_tail and format_name == "mxfp4", "WIDE": False, "IS_PITCHED": False,
        "USE_ASM": True, "USE_WGMMA": arch == 90 and num_warps >= 4, "USE_PDL": plan.pdl, "INTERPRET": False,
    }  # fmt: skip
    if plan.is_direct:
        split_k = plan.split_k_1 if is_first else plan.split_k
        shares_tiles = is_first and split_k > 1
        constants |= {
            "BY_EXPERT": plan.by_expert, "SLOTS_PAD": 0 if one_tile else 64,
            "CHOICES_PAD": triton.next_power_of_2(top_k), "SPLIT_K": split_k,
            "AT_ONCE": parts_at_once(split_k - 1, plan.block_n_1 * plan.block_m, num_warps) if shares_tiles else 1,
        }  # fmt: skip
        constants |= {} if shares_tiles else {"parts_ptr": None, "arrived_ptr": None}
    else:
        constants |= {"NUM_HEIGHTS": plan.num_tile_heights}
    kernel = direct_gemm if plan.is_direct else grouped_gemm
    return compile_kernel(kernel, arch, pointers, constants | others, num_warps=num_warps)


def reached_before(ptx: str, instruction: str) -> str:
    """All that a program may run before it first runs `instruction`, along any path from its start."""
    lines = [line.strip() for line in ptx.split(".entry", 1)[1].splitlines()]
    places = {line.partition(":")[0]: place for place, line in enumerate(lines) if line.startswith("$")}
    seen: set[int] = set()
    ahead = [0]
    while ahead:
        place = ahead.pop()
        while place < len(lines) and place not in seen and not lines[place].startswith(instruction):
            seen.add(place)
            jump = re.match(r"(@!?%p\d+\s+)?bra(?:\.uni)?\s+(\$\w+);", lines[place])
            if jump:
                ahead.append(places[jump[2]])
            if (jump and not jump[1]) or lines[place].startswith(("ret", "exit")):
                break
            place += 1
    return "\n".join(lines[place] for place in sorted(seen))


def compile_group(plan: Plan, arch: int) -> Any:
    """`group_slots`."""
    pointers = {"ids_ptr": "*i32", "slots_ptr": "*i32", "tiles_ptr": "*i32"}
    constants = {"BLOCK_M": plan.block_m, "EXPERTS_PAD": 64, "CHUNK": 1024, "USE_PDL": plan.pdl}
    return compile_kernel(group_slots, arch, pointers, constants, num_warps=8)


def compile_sum(plan: Plan, arch: int) -> Any:
    """`unpermute_sum`."""
    pointers = {"parts_ptr": "*fp32" if plan.is_direct else "*bf16", "ids_ptr": "*i32", "out_ptr": "*bf16"}
    constants = {"TOPK": 4, "SPLIT_K": plan.split_k, "BLOCK_H": 1024, "USE_PDL": plan.pdl}
    return compile_kernel(unpermute_sum, arch, pointers, constants, num_warps=4)


def compile_quantize(arch: int, *, by_slot: bool = True, use_pdl: bool = False) -> Any:
    """`quantize_rows`; below sm89, which has no FP8 type, with the encoding written out."""
    pointers = {"x_ptr": "*bf16", "ids_ptr": "*i32", "q_ptr": "*u8", "scale_ptr": "*fp32"}
    constants = {
        "BY_SLOT": by_slot, "STEP_K": 128, "BLOCK_R": 32, "SHORT_K": False, "USE_CAST": arch >= 89, "USE_PDL": use_pdl,
    }  # fmt: skip
    return compile_kernel(quantize_rows, arch, pointers, constants, num_warps=4)
