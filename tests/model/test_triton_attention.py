"""Triton attention kernels: numbers in the interpreter, machine code for every GPU generation; when they are used."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from model.attention import base, latent_kernels, tiles, triton_kernels
from model.attention.base import AttentionSpec, make_attention
from model.attention.tiles import Tile, latent_tile
from model.attention.triton import (
    _DECODE,
    _PREFILL,
    _PREFILL_IN_WINDOW,
    MAX_PARTS,
    TritonAttention,
    _latent_shape_of,
    _number_formats,
)
from model.config import ModelSettingsError, UnsupportedModelError
from tests.interpreter import PARTS, RunInterpreted, waits_for_interpreter
from tests.model.attention_cases import GQA, MLA
from tests.moe.kernels.compiling import compile_kernel, of_all_archs, rest
from tests.tables import rows

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALLEST_SHARED_BYTES = 99 * 1024  # sm86, sm89 and sm120; the others have more
HOPPER_SHARED_BYTES = 227 * 1024
POINTERS = {
    "q_ptr": "*bf16", "keys_ptr": "*bf16", "values_ptr": "*bf16", "out_ptr": "*bf16", "table_ptr": "*i32",
    "query_start_ptr": "*i32", "lens_ptr": "*i32", "sinks_ptr": "*fp32", "parts_ptr": "*fp32", "stats_ptr": "*fp32",
}  # fmt: skip
GPT_OSS = {
    "NUM_HEADS": 64, "NUM_KV_HEADS": 8, "D": 64, "V": 64, "D_PAD": 64, "V_PAD": 64, "PAGE_SIZE": 16,
    "HAS_SINKS": True, "PRECISION": "tf32", "IS_FP8": False, "USE_CAST": False, "USE_PDL": False,
}  # fmt: skip
DEEPSEEK = AttentionSpec(num_heads=128, num_kv_heads=1, key_dim=576, value_dim=512, scale=0.1, values_in_keys=True)


@waits_for_interpreter
@pytest.mark.parametrize("part", PARTS)
def test_numbers_in_the_interpreter(part: str, run_interpreted: RunInterpreted) -> None:
    errors = run_interpreted("tests.model.interpreted_attention", part)
    assert len(errors) == {"pick": 6, "rest": 8}[part]
    assert {case: error for case, error in errors.items() if not error < 2e-6} == {}


def compiled(
    kernel: object, arch: int, tile: Tile, constants: dict[str, object], dtype: str = "bf16", kv_dtype: str = "bf16"
) -> Any:
    pointers = POINTERS | {"q_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"}
    pointers |= {"keys_ptr": f"*{kv_dtype}", "values_ptr": f"*{kv_dtype}"}
    return compile_kernel(kernel, arch, pointers, constants, num_warps=tile.warps, num_stages=tile.stages)


def compiled_latent(arch: int, kind: str, *, is_decode: bool = True) -> Any:
    """The kernel with DeepSeek-V3's heads and the tile that a GPU of `arch` gets."""
    dtype, kv_dtype = {
        "bf16": (torch.bfloat16, torch.bfloat16),
        "fp8": (torch.bfloat16, torch.uint8),
        "fp32": (torch.float32, torch.float32),
        "fp32 cache": (torch.bfloat16, torch.float32),
    }[kind]
    capability = (arch // 10, arch % 10)
    tile = latent_tile(dtype, kv_dtype, capability)
    formats = _number_formats(dtype, kv_dtype, capability)
    constants = _latent_shape_of(DEEPSEEK, 16, has_sinks=False) | formats
    constants |= {"BLOCK_Q": 1, "BLOCK_H": tile.rows, "BLOCK_N": tile.keys}
    constants |= {"IS_DECODE": is_decode, "IS_SPLIT": is_decode, "USE_PDL": arch >= 90}
    names = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.uint8: "u8"}
    return compiled(latent_kernels.latent_attention, arch, tile, constants, names[dtype], names[kv_dtype])


@of_all_archs
def test_kernels_compile_for_every_gpu_within_shared_memory(arch: int) -> None:
    is_hopper = arch == 90
    for tile, window in ((_PREFILL, 0), (_PREFILL_IN_WINDOW, 128))[: 2 if is_hopper else 1]:
        block = {"R_PAD": 8, "BLOCK_Q": tile.rows // 8, "BLOCK_N": tile.keys, "WINDOW": window}
        kernel = compiled(triton_kernels.prefill, arch, tile, GPT_OSS | block)
        assert kernel.metadata.shared <= SMALLEST_SHARED_BYTES
        assert ("wgmma.mma_async" in kernel.asm["ptx"]) == is_hopper
        assert "cp.async.cg" in kernel.asm["ptx"]
    for window, is_split in ((0, True), (128, False))[: 2 if is_hopper else 1]:
        block = {"R_PAD": 16, "BLOCK_N": _DECODE.keys, "WINDOW": window, "IS_SPLIT": is_split}
        kernel = compiled(triton_kernels.decode, arch, _DECODE, GPT_OSS | block)
        assert kernel.metadata.shared <= SMALLEST_SHARED_BYTES


@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        *((arch, "bf16") for arch in (90, 100)), (90, "fp8"),
        *(rest(arch, "bf16") for arch in (80, 86, 89, 120)), rest(80, "fp8"), rest(86, "fp32"), rest(89, "fp32 cache"),
    ],
)  # fmt: skip
def test_latent_attention_compiles_for_every_gpu_within_shared_memory(arch: int, kind: str) -> None:
    is_wide = (arch, kind) == (90, "bf16")
    kernel = compiled_latent(arch, kind, is_decode=arch != 86)
    assert kernel.metadata.shared <= (HOPPER_SHARED_BYTES if is_wide else SMALLEST_SHARED_BYTES)
    assert ("wgmma.mma_async" in kernel.asm["ptx"]) == is_wide
    assert ("e4m3x2" in kernel.asm["ptx"]) == (kind == "fp8" and arch >= 89)


@pytest.mark.parametrize("arch", [90, rest(80)])
def test_fp8_cache_compiles_with_and_without_the_type(arch: int) -> None:
    fp8 = GPT_OSS | {"IS_FP8": True, "USE_CAST": arch >= 89}
    if arch == 80:
        block = {"R_PAD": 16, "BLOCK_N": _DECODE.keys, "WINDOW": 0, "IS_SPLIT": True}
        kernel = compiled(triton_kernels.decode, arch, _DECODE, fp8 | block, kv_dtype="u8")
    else:
        block = {"R_PAD": 8, "BLOCK_Q": _PREFILL.rows // 8, "BLOCK_N": _PREFILL.keys, "WINDOW": 0}
        kernel = compiled(triton_kernels.prefill, arch, _PREFILL, fp8 | block, kv_dtype="u8")
    assert kernel.metadata.shared <= SMALLEST_SHARED_BYTES
    assert ("e4m3x2" in kernel.asm["ptx"]) == (arch >= 89)


def test_auto_takes_triton_on_gpus_and_torch_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert base.choose_attention([GQA, replace(GQA, window=8)], CUDA) == "triton"
    assert base.choose_attention([GQA], CPU) == "torch"
    assert base.choose_attention([GQA, MLA, DEEPSEEK], CUDA) == "triton"
    assert base.choose_attention([replace(GQA, key_dim=192)], CUDA) == "torch"
    monkeypatch.setitem(sys.modules, "model.attention.triton", None)  # as without the package triton
    assert base.choose_attention([GQA], CUDA) == "torch"
    with pytest.raises(ModelSettingsError, match="triton cannot be imported"):
        make_attention("triton", [GQA], CPU)


def test_latents_on_amd_gpus_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert base.choose_attention([MLA], CUDA) == "torch"
    assert base.choose_attention([GQA], CUDA) == "triton"


def test_what_triton_cannot_serve_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="triton: it needs a CUDA device, not cpu; choose auto or torch"):
        make_attention("triton", [GQA], CPU)
    for spec, reason in (
        (replace(MLA, num_heads=8, num_kv_heads=2), "latent attention with one KV head, not 2"),
        (replace(MLA, key_dim=578, value_dim=514), "latents up to 512 with a rope part up to 64, not 514 with 64"),
        (replace(MLA, key_dim=74, value_dim=8), "latents up to 512 with a rope part up to 64, not 8 with 66"),
        (replace(GQA, key_dim=7), "a key dim of 7 is odd"),
        (replace(GQA, key_dim=130), "head dims up to 128, not 130"),
        (replace(GQA, value_dim=129), "head dims up to 128, not 129"),
    ):
        with pytest.raises(UnsupportedModelError, match=f"triton: .*{reason}"):
            make_attention("triton", [GQA, spec], CUDA)


@rows("dtype, precision", (torch.float32, "ieee"), (torch.bfloat16, "tf32"))
def test_float32_is_not_multiplied_as_tf32(dtype: torch.dtype, precision: str) -> None:
    """The interpreter multiplies alike whatever it is told."""
    assert _number_formats(dtype, dtype, (9, 0))["PRECISION"] == precision


@rows(
    "num_requests, max_keys, window, num_parts",
    (1, 32000, None, 32),
    (1, 1000, None, 15),
    (8, 1000, None, 4),
    (64, 8000, None, 1),
    (1, 32000, 128, 2),
    (1, 16, None, 1),
)
def test_few_long_requests_are_cut_into_parts(
    num_requests: int, max_keys: int, window: int | None, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """132 processors, two programs each, 8 KV heads; a part has at least 64 keys."""
    monkeypatch.setattr(TritonAttention, "unsupported_reason", classmethod(lambda cls, spec, device: None))
    spec = AttentionSpec(num_heads=64, num_kv_heads=8, key_dim=64, value_dim=64, scale=1.0, window=window)
    attention = TritonAttention([spec], CPU)
    attention._num_processors = 132
    assert attention.num_parts(spec, num_requests, max_keys, _DECODE) == num_parts


@rows("num_requests, num_parts", (1, 32), (8, 8), (64, 1))
def test_latents_are_cut_by_tiles_of_heads(num_requests: int, num_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """132 processors, one program each, two tiles of 64 heads."""
    monkeypatch.setattr(TritonAttention, "unsupported_reason", classmethod(lambda cls, spec, device: None))
    attention = TritonAttention([DEEPSEEK], CPU)
    attention._num_processors = 132
    tile = latent_tile(torch.bfloat16, torch.bfloat16, (9, 0))
    assert attention.num_parts(DEEPSEEK, num_requests, 8000, tile) == num_parts


def test_decodes_of_few_rows_get_tiles_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One or two requests of 128 heads fill more processors so."""
    (most_rows, few), (_, many) = tiles.LATENT_ON_HOPPER
    bf16, hopper = (torch.bfloat16, torch.bfloat16), (9, 0)
    assert most_rows == 256
    assert [latent_tile(*bf16, hopper, num_rows) for num_rows in (64, 256, 257)] == [few, few, many]
    assert latent_tile(*bf16, hopper) == many, "prompts"
    assert few not in (latent_tile(torch.bfloat16, torch.uint8, hopper, 64), latent_tile(*bf16, (8, 0), 64))
    monkeypatch.setattr(TritonAttention, "unsupported_reason", classmethod(lambda cls, spec, device: None))
    attention = TritonAttention([DEEPSEEK], CPU)
    attention._num_processors = 132
    numbers = [attention.num_parts(replace(DEEPSEEK, num_heads=64), count, 8000, few) for count in (1, 2, 4)]
    assert numbers == [32, 16, 8]
    assert attention.num_parts(DEEPSEEK, 1, 8000, replace(few, per_processor=8)) == MAX_PARTS == 32
