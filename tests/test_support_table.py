"""Every row of the README's support table starts, through the settings a user has; what the server refuses is no row.

Devices and kernel libraries are emulated. All but our Triton kernels, which need a card or the interpreter, also pass
the self-check of a layer and run a prompt.
"""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine import load
from engine.config import EngineConfig
from loaders.phases import StartPhases
from model.errors import ModelSettingsError
from moe import Activation, MoeA2ABackend, MoeBackend
from moe.choose.select import choose_backend
from moe.device import Device
from moe.errors import UnsupportedPathError
from tests.engine.emulated_devices import install
from tests.model.checkpoints import (
    make_deepseek,
    make_gpt_oss,
    pack_fp8,
    pack_fp8_tensor,
    pack_mxfp4,
    pack_nvfp4,
    state_by_file_name,
    write,
)
from tests.moe.configs import rank_config

README = (Path(__file__).parents[1] / "README.md").read_text()
NVIDIA = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120")
HARDWARE = {"any": ("cpu", *NVIDIA, "gfx942", "gfx950"), "sm80 and newer": NVIDIA}
BACKENDS = sorted(set(MoeBackend) - {MoeBackend.AUTO})
ANY_DEVICE = {"torch": "cpu", "triton": "sm90"}  # where these run every format
STATES = ("**verified**", "contract-tested")
SIZES = {"hidden_size": 256, "intermediate_size": 256}
DEEPSEEK = SIZES | {"moe_intermediate_size": 256, "num_experts_per_tok": 3}
# The self-check's tokens must not saturate between the matrices: there a rounding decides what is clipped.
PACK_FP8_TENSOR = partial(pack_fp8_tensor, middle_scale=0.2)
CHECKPOINTS: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[..., Any] | None, dict[str, Any]]] = {
    "bf16": (make_deepseek, DEEPSEEK, None, {}),
    "fp8_block": (make_deepseek, DEEPSEEK, pack_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8_tensor": (make_deepseek, DEEPSEEK, PACK_FP8_TENSOR, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "mxfp4": (make_gpt_oss, SIZES, pack_mxfp4, {"quant_method": "mxfp4"}),
    "nvfp4": (make_deepseek, DEEPSEEK, pack_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}


def table_rows() -> list[tuple[str, list[str], str, str]]:
    """(backend, formats, hardware, state) of every row; anything that is not a plain list is an error."""
    table = README.split("| `--moe-backend` |", 1)[1].split("\n\n", 1)[0]
    rows = []
    for line in table.splitlines()[2:]:
        backend, formats, hardware, state = (cell.strip() for cell in line.strip("|").split("|"))
        name = re.fullmatch(r"`(\w+)`", backend)
        assert name, line
        rows.append((name[1], formats.split(", "), hardware, state))
    return rows


def cases() -> list[tuple[str, str, str]]:
    """(backend, format, device) of everything the table lists."""
    return [
        (backend, format_name, arch)
        for backend, formats, hardware, _ in table_rows()
        for format_name in formats
        for arch in HARDWARE.get(hardware) or hardware.split(", ")
    ]


def write_format(name: str, folder: Path, *, num_parts: int = 1) -> Path:
    """A small model whose experts have this format, as published checkpoints have it; for so many ranks."""
    make, sizes, pack, quantization = CHECKPOINTS[name]
    width = "moe_intermediate_size" if "moe_intermediate_size" in sizes else "intermediate_size"
    model = make(**sizes | {width: num_parts * sizes[width]})
    tensors = state_by_file_name(model, folder)
    changes: dict[str, Any] = {"architectures": [type(model).__name__]}
    if pack is None:
        write(folder, tensors, changes)
    else:
        write(folder, pack(tensors)[0], changes | {"quantization_config": quantization})
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each format."""
    return {name: write_format(name, tmp_path_factory.mktemp(name)) for name in CHECKPOINTS}


def settings(folder: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(
        model=folder, device="cpu", dtype="bfloat16", max_num_batched_tokens=64, num_pages=16, **changes
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_table_lists_starts(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch, checkpoints: dict[str, Path], backend: str
) -> None:
    """Where the device changes nothing but the choice, one device runs every format, the others start one."""
    for name, format_name, arch in cases():
        if name != backend or (ANY_DEVICE.get(backend, arch) != arch and format_name != "mxfp4"):
            continue
        with subtests.test(format_name=format_name, arch=arch), monkeypatch.context() as patch:
            install(patch, backend, arch)
            chosen = settings(checkpoints[format_name], moe_backend=backend)
            if ANY_DEVICE.get(backend, arch) != arch or backend == "triton":
                model = load._build_model(replace(chosen, selfcheck="off"), StartPhases())
            else:
                model = load.load_engine(chosen, None).runner.model
            assert model.moe_layers
            for layer in model.moe_layers:
                assert layer.description.endswith(f": {backend} / none / {format_name}")


def test_every_row_of_the_table_is_chosen(subtests: pytest.Subtests) -> None:
    for backend, format_name, arch in cases():
        is_gpt_oss = format_name == "mxfp4"
        config = rank_config(
            num_experts=8, hidden_size=256, intermediate_size=256, top_k=3, has_biases=is_gpt_oss,
            activation=Activation(alpha=1.702, beta=1.0, limit=7.0) if is_gpt_oss else Activation(),
        )  # fmt: skip
        with subtests.test(backend=backend, format_name=format_name, arch=arch):
            chosen = choose_backend(MoeBackend(backend), Device(arch=arch), format_name, MoeA2ABackend.NONE, config)
            assert chosen == backend


def test_the_table_is_complete_and_says_how_each_row_was_tested() -> None:
    rows = table_rows()
    assert {backend for backend, *_ in rows} == set(MoeBackend) - {MoeBackend.AUTO}
    assert all(state.startswith(STATES) for *_, state in rows)
    assert len(cases()) == len(set(cases())), "listed twice"


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_table_does_not_list_is_refused(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch, checkpoints: dict[str, Path], backend: str
) -> None:
    """So that the table leaves nothing out, and no user finds another path than those."""
    listed = {(format_name, arch) for name, format_name, arch in cases() if name == backend}
    tried = itertools.product(CHECKPOINTS, ("cpu", "sm80", "sm90", "sm100", "gfx942", "gfx950"))
    for format_name, arch in tried:
        if (format_name, arch) not in listed:
            monkeypatch.setattr("moe.choose.select.probe_device", lambda device, arch=arch: Device(arch=arch))
            with subtests.test(format_name=format_name, arch=arch), pytest.raises(UnsupportedPathError):
                load._build_model(
                    settings(checkpoints[format_name], moe_backend=backend, selfcheck="off"), StartPhases()
                )


def test_the_transports_need_several_ranks_and_the_readme_says_so(checkpoints: dict[str, Path]) -> None:
    said = " ".join(README.split("## Support", 1)[1].split("## Results", 1)[0].split())
    sentence = re.search(r"`--moe-a2a-backend` other than `none` \(([\w, ]+)\) needs several ranks", said)
    assert sentence
    assert set(sentence[1].split(", ")) == set(MoeA2ABackend) - {MoeA2ABackend.NONE}
    for a2a in sentence[1].split(", "):
        with pytest.raises(ModelSettingsError, match="but there is one rank"):
            load._build_model(settings(checkpoints["fp8_block"], moe_a2a_backend=a2a), StartPhases())
