"""Latent attention from projections on: numbers in the interpreter, machine code for every GPU."""

import pytest

from model.attention.latent_kernels import store_latents
from tests.interpreter import RunInterpreted, waits_for_interpreter
from tests.moe.kernels.compiling import compile_kernel
from tests.tables import rows


@waits_for_interpreter
def test_numbers_in_the_interpreter(run_interpreted: RunInterpreted) -> None:
    differences = run_interpreted("tests.model.interpreted_latents")
    assert len(differences) == 4
    assert {case: difference for case, difference in differences.items() if not difference < 2e-6} == {}


@pytest.mark.kernels
@waits_for_interpreter
def test_a_whole_model_in_the_interpreter(run_interpreted: RunInterpreted) -> None:
    found = run_interpreted("tests.model.interpreted_deepseek")
    assert max(found["errors"]) < 5e-5
    assert (found["num_fp8"], found["num_gated"]) == (15, 3), "three of attention and two of an MLP in each layer"


@rows("arch, is_fp8", (80, False), (80, True), (90, False), (90, True), (100, False), (120, True))
def test_storing_latents_compiles_for_every_gpu(arch: int, is_fp8: bool) -> None:
    pointers = {
        "q_pe_ptr": "*bf16", "q_ptr": "*bf16", "latents_ptr": "*bf16", "norm_ptr": "*fp32", "rotation_ptr": "*fp32",
        "slots_ptr": "*i64", "keys_ptr": "*u8" if is_fp8 else "*bf16",
    }  # fmt: skip
    constants = {
        "NUM_HEADS": 128, "C": 512, "P": 64, "C_PAD": 512, "P_PAD": 64, "BLOCK_H": 32, "IS_FP8": is_fp8,
        "USE_CAST": is_fp8 and arch >= 89, "USE_PDL": arch >= 90,
    }  # fmt: skip
    kernel = compile_kernel(store_latents, arch, pointers, constants, num_warps=4)
    assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (arch >= 90)
    assert "cubin" in kernel.asm
