"""FP8 linear layers on GPUs: numbers in the interpreter, machine code for every GPU, which weights stay FP8."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loaders.checkpoint import Checkpoint
from model.fp8_linear import PLANS, LinearPlan, choose_plan, fp8_block_gemm
from model.linear import GatedMlp, Linear, LinearWeight, join_rows
from model.weights import RAGGED_COLUMNS, RAGGED_ROWS, Split, WeightReader
from moe import RankPlace
from moe.formats import Fp8BlockWeight
from tests.interpreter import RunInterpreted, waits_for_interpreter
from tests.loaders.expert_files import linear_tensors, random_bf16, save
from tests.moe.kernels.compiling import compile_kernel, of_hopper_and_others
from tests.tables import rows

CPU = torch.device("cpu")
SHARED_KB = {80: 163, 90: 227, 100: 227}  # the others have 99


@waits_for_interpreter
def test_numbers_in_the_interpreter(run_interpreted: RunInterpreted) -> None:
    errors = run_interpreted("tests.model.interpreted_fp8_linear")
    assert len(errors) == 14
    assert {case: error for case, error in errors.items() if not error < 1e-6} == {}


def compiled(plan: LinearPlan, arch: int, *, is_gated: bool = False) -> Any:
    pointers = {
        "x_ptr": "*bf16", "w_ptr": "*i16", "scale_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16",
        "parts_ptr": "*fp32", "arrived_ptr": "*i32",
    }  # fmt: skip
    constants = {
        "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "HEIGHT": plan.height,
        "IS_SPLIT": plan.shares > 1, "GROUP": 8, "NUM_STAGES": plan.num_stages,
        "AT_ONCE": plan.parts_at_once, "IS_GATED": is_gated, "HAS_BIAS": False,
        "SHORT_K": False, "USE_ASM": True, "USE_PDL": arch >= 90, "INTERPRET": False,
    }  # fmt: skip
    return compile_kernel(fp8_block_gemm, arch, pointers, constants, num_warps=plan.num_warps)


@of_hopper_and_others
def test_kernels_compile(arch: int) -> None:
    for plan in (replace(PLANS[0], shares=4), PLANS[1], replace(PLANS[3], shares=2), PLANS[4]):
        kernel = compiled(plan, arch, is_gated=plan == PLANS[3])
        ptx = kernel.asm["ptx"]
        assert "fma.rn.bf16x2" in ptx, "codes become bf16 in registers"
        assert "cp.async" in ptx, "the loop loads ahead"
        assert ("atom." in ptx) == (plan.shares > 1), "only shares have to arrive"
        assert kernel.metadata.shared <= SHARED_KB.get(arch, 99) * 1024
        if arch == 90:
            assert "prefetch.L2" in ptx, "the first weights come while the kernel before still runs"
            assert ("wgmma" in ptx) == (plan.block_m > 8)


@rows(
    "num_tokens, num_outputs, num_inputs, block_m, num_programs",
    (1, 7168, 16384, 8, 112 * 2),
    (1, 2112, 7168, 8, 33 * 8),
    (8, 24576, 1536, 8, 384),
    (16, 36864, 7168, 16, 576),
    (17, 7168, 2048, 32, 112 * 2),
    (64, 2112, 7168, 64, 33 * 8),
    (300, 128, 128, 128, 3),
    (4096, 7168, 16384, 128, 56 * 32),
)
def test_shares_of_the_inputs_fill_132_processors(
    num_tokens: int, num_outputs: int, num_inputs: int, block_m: int, num_programs: int
) -> None:
    plan = choose_plan(num_tokens, num_outputs, num_inputs, 132)
    assert plan.block_m == block_m
    assert -(-num_outputs // plan.block_n) * -(-num_tokens // block_m) * plan.shares == num_programs


def test_many_tiles_are_never_cut_into_shares() -> None:
    """There is a counter for each tile that is."""
    assert choose_plan(128 * 40_000, 256, 7168, 132 * 40_000).shares == 1


def fp8_readers(folder: Path, shape: tuple[int, int], tp_size: int) -> tuple[list[WeightReader], torch.Tensor]:
    """Of every rank, and the dense weight."""
    tensors, meant = linear_tensors("l", random_bf16(*shape), "fp8_block")
    source = Checkpoint.open(folder) if (folder / "model.safetensors").exists() else save(folder, tensors)
    places = [RankPlace(tp_size=tp_size, tp_rank=rank) for rank in range(tp_size)]
    return [WeightReader(source, CPU, torch.bfloat16, place, keeps_fp8=True) for place in places], meant


def dense(weight: LinearWeight) -> torch.Tensor:
    return weight.dequantize() if isinstance(weight, Fp8BlockWeight) else weight


@pytest.mark.parametrize(
    ("split", "tp_size", "stay"),
    [
        (None, 1, True),
        (Split("rows", 64), 2, True),
        (Split("columns", 64), 2, True),
        (Split("rows", 64), 4, False),  # 64 rows are half a block
        (RAGGED_ROWS, 3, True),  # 128, 128 and none
        (RAGGED_COLUMNS, 2, True),
    ],
)
def test_parts_between_blocks_stay_fp8(tmp_path: Path, split: Split | None, tp_size: int, stay: bool) -> None:
    readers, meant = fp8_readers(tmp_path, (256, 256), tp_size)
    parts = [reader.linear("l", split) for reader in readers]
    assert all(isinstance(part, Fp8BlockWeight) == stay for part in parts)
    whole = torch.cat([dense(part) for part in parts], dim=0 if split is None or split.axis == "rows" else 1)
    assert torch.equal(whole, meant if stay else meant.bfloat16())


@pytest.mark.parametrize("tp_size", [2, 3])
@pytest.mark.parametrize("split", [RAGGED_ROWS, RAGGED_COLUMNS])
def test_a_part_that_ends_with_a_short_block_stays_fp8(tmp_path: Path, split: Split, tp_size: int) -> None:
    """Of 320 rows or columns the last block has 64."""
    readers, meant = fp8_readers(tmp_path, (320, 320), tp_size)
    parts = [reader.linear("l", split) for reader in readers]
    assert all(isinstance(part, Fp8BlockWeight) for part in parts)
    assert torch.equal(torch.cat([dense(part) for part in parts], dim=0 if split.axis == "rows" else 1), meant)


def test_other_formats_and_readers_give_dense_weights(tmp_path: Path) -> None:
    source = save(tmp_path, linear_tensors("l", random_bf16(256, 256), "nvfp4")[0])
    assert isinstance(WeightReader(source, CPU, torch.bfloat16, keeps_fp8=True).linear("l"), torch.Tensor)
    readers, _ = fp8_readers(tmp_path / "fp8", (256, 256), 1)
    assert isinstance(WeightReader(readers[0].source, CPU, torch.bfloat16).linear("l"), torch.Tensor)


def test_rows_join_as_fp8_where_each_part_ends_with_a_block() -> None:
    whole, ragged = (Fp8BlockWeight.quantize(torch.randn(rows, 200)) for rows in (128, 70))
    joined = join_rows((whole, ragged))
    assert isinstance(joined, Fp8BlockWeight)
    assert torch.equal(joined.dequantize(), torch.cat((whole.dequantize(), ragged.dequantize())))
    split = join_rows((ragged, whole))
    assert isinstance(split, torch.Tensor)
    assert torch.equal(split, torch.cat((ragged.dequantize(torch.bfloat16), whole.dequantize(torch.bfloat16))))
    mixed = join_rows((whole, torch.ones(2, 200, dtype=torch.float16)))
    assert isinstance(mixed, torch.Tensor)
    assert mixed.dtype == torch.float16


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 8, 16, 17, 64, 65, 300])
@pytest.mark.parametrize("shape", [(200, 384), (2112, 1024), (512, 7168), (256, 328)])
def test_numbers_on_a_gpu(shape: tuple[int, int], num_tokens: int) -> None:
    """Compiled, every kind of plan: bf16 results of exact weights, and the same bits again and again.

    Programs arrive in any order, and each launch finds the counters at zero.
    """
    generator = torch.Generator("cuda").manual_seed(1)
    weight = Fp8BlockWeight.quantize(torch.randn(shape, device="cuda", generator=generator))
    bias = torch.randn(shape[0], device="cuda", generator=generator).bfloat16()
    x_TK = torch.randn(num_tokens, shape[1], device="cuda", generator=generator).bfloat16()
    layer = Linear(weight, bias)
    got = layer(x_TK)
    want = torch.nn.functional.linear(x_TK.float(), weight.dequantize(), bias.float())
    assert float((got.float() - want).norm() / want.norm()) < 4e-3
    assert all(torch.equal(got, layer(x_TK)) for _ in range(100))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 16, 64, 300])
def test_gate_and_up_on_a_gpu(num_tokens: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    gate, up, down = (
        Fp8BlockWeight.quantize(torch.randn(shape, device="cuda", generator=generator) * 0.02)
        for shape in ((512, 7168), (512, 7168), (7168, 512))
    )
    x_TH = torch.randn(num_tokens, 7168, device="cuda", generator=generator).bfloat16()
    gates = torch.nn.functional.silu(x_TH.float() @ gate.dequantize().mT)
    want = (gates * (x_TH.float() @ up.dequantize().mT)) @ down.dequantize().mT
    got = GatedMlp(gate, up, down)(x_TH)
    assert float((got.float() - want).norm() / want.norm()) < 6e-3  # two roundings to bf16
