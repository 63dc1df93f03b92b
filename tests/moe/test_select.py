"""Choosing a backend: the order of `auto`, every reason kept, and errors that say what would work."""

import dataclasses
import itertools
import types

import pytest
import torch

from moe import MoeA2ABackend, MoeBackend, MoeRunner, MoeRunnerConfig, UnsupportedPathError, registry
from moe.backend import Backend
from moe.backends.flashinfer import common as flashinfer_common
from moe.backends.triton.backend import TritonBackend
from moe.choose import select
from moe.choose.explain import ARCHS, FORMATS
from moe.choose.ranking import preference
from moe.choose.select import choose_backend, probe_device, verdicts
from moe.config import DispatchFormat
from moe.device import Device
from moe.registry import BACKEND_MODULES, load_backend, missing_formats
from tests.moe.backends import hostile
from tests.moe.configs import rank_config
from tests.moe.moe_layers import make_config, make_experts
from tests.tables import rows

CPU = Device(arch="cpu")
AUTO, NONE = MoeBackend.AUTO, MoeA2ABackend.NONE
PREFERENCE = preference()


@pytest.fixture
def config() -> MoeRunnerConfig:
    return make_config(make_experts("bf16"), dtype=torch.bfloat16)


def test_every_backend_has_a_place_in_the_order() -> None:
    assert set(PREFERENCE) == set(MoeBackend) - {AUTO}
    assert len({load_backend(backend).auto_order for backend in PREFERENCE}) == len(PREFERENCE), "no ties"
    assert PREFERENCE[-1] is MoeBackend.TORCH


@rows("format_name", "bf16", "fp8_block", "fp8_tensor", "mxfp4", "nvfp4")
def test_auto_on_a_cpu_is_torch(format_name: str, config: MoeRunnerConfig) -> None:
    for requested, device in ((AUTO, CPU), (AUTO, torch.device("cpu")), (MoeBackend.TORCH, CPU)):
        assert choose_backend(requested, device, format_name, NONE, config) is MoeBackend.TORCH


def test_auto_takes_the_first_that_can(monkeypatch: pytest.MonkeyPatch, config: MoeRunnerConfig) -> None:
    can = {MoeBackend.TORCH}
    monkeypatch.setattr(
        select, "_verdict", lambda backend, *path: select.Verdict(backend, "", None if backend in can else "no")
    )
    for better in (MoeBackend.TRITON, MoeBackend.FLASHINFER_TRTLLM):
        can.add(better)
        assert choose_backend(AUTO, CPU, "bf16", NONE, config) is better


def refusal(requested: MoeBackend, format_name: str, config: MoeRunnerConfig) -> str:
    with pytest.raises(UnsupportedPathError) as error:
        choose_backend(requested, CPU, format_name, NONE, config)
    return str(error.value)


def test_a_refused_request_gives_its_reason_and_what_would_work(config: MoeRunnerConfig) -> None:
    text = refusal(MoeBackend.TORCH, "int3", config)
    assert "--moe-backend torch cannot run int3 experts on cpu with --moe-a2a-backend none" in text
    assert "format int3 is not supported" in text
    assert "Usable for it: none" in text


def test_a_backend_that_is_not_built_in_is_refused(monkeypatch: pytest.MonkeyPatch, config: MoeRunnerConfig) -> None:
    monkeypatch.delitem(registry.BACKEND_MODULES, MoeBackend.AITER, raising=False)
    text = refusal(MoeBackend.AITER, "bf16", config)
    assert "--moe-backend aiter cannot run bf16 experts on cpu" in text
    assert "not built in yet. Usable for it: torch." in text


def test_when_nothing_can_every_reason_is_listed(config: MoeRunnerConfig) -> None:
    text = refusal(AUTO, "int3", config)
    assert all(f"  {backend}: " in text for backend in PREFERENCE)


def test_a_missing_path_is_a_reason(monkeypatch: pytest.MonkeyPatch, config: MoeRunnerConfig) -> None:
    monkeypatch.setattr("moe.backends.torch.backend.TorchBackend.supports", lambda *path: None)
    table = {v.backend: v.reason for v in verdicts(CPU, "bf16", MoeA2ABackend.MORI, config)}
    assert table[MoeBackend.TORCH] == "no path from transport mori is built in yet"


def test_probing_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe_device(torch.device("cpu")) == CPU
    with pytest.raises(UnsupportedPathError, match="--device meta is not supported"):
        probe_device(torch.device("meta"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedPathError, match="--device cuda: torch sees no GPU here; use --device cpu"):
        probe_device(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    hopper = types.SimpleNamespace(major=9, minor=0, gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    monkeypatch.setattr(torch.version, "hip", None)
    assert probe_device(torch.device("cuda:1")) == Device(arch="sm90")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert probe_device(torch.device("cuda")) == Device(arch="gfx942")
    assert not Device(arch="gfx942").is_cuda


@rows("backend, format_name, sizes, words",
        (MoeBackend.FLASHINFER_CUTLASS, "nvfp4", {"intermediate_size": 96}, "of this rank is 96, nvfp4 needs"),
        (MoeBackend.FLASHINFER_CUTLASS, "bf16", {"intermediate_size": 36}, "36, bf16 needs a positive multiple of 8"),
        (MoeBackend.FLASHINFER_CUTEDSL, "nvfp4", {"hidden_size": 2880}, "2880, nvfp4 needs a positive multiple of 128"),
        (MoeBackend.FLASHINFER_TRTLLM, "fp8_tensor", {"intermediate_size": 192}, "192, fp8_tensor needs")
    )  # fmt: skip
def test_untiled_sizes_are_refused(backend: MoeBackend, format_name: str, sizes: dict[str, int], words: str) -> None:
    """Before any weight is read, and `auto` takes another backend instead of failing later."""
    fine = {"num_experts": 8, "top_k": 2, "hidden_size": 256, "intermediate_size": 256}
    config = rank_config(**(fine | sizes))  # type: ignore[arg-type]
    device = Device(arch="sm90" if format_name == "bf16" else "sm100")
    with pytest.raises(UnsupportedPathError, match=words):
        choose_backend(backend, device, format_name, NONE, config)
    assert choose_backend(AUTO, device, format_name, NONE, config) is not backend


def test_auto_on_this_machine_passes_over_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, config: MoeRunnerConfig
) -> None:
    sm90 = Device(arch="sm90")
    monkeypatch.setattr("moe.choose.select.probe_device", lambda device: sm90)
    monkeypatch.setattr(Backend, "is_installed", lambda self: self.package in (None, "flashinfer"))
    monkeypatch.setattr(flashinfer_common, "missing_compiler", lambda: None)
    config = dataclasses.replace(config, has_biases=True)  # flashinfer_mxfp4 pads them to its tiles
    here = torch.device("cuda")
    assert choose_backend(AUTO, sm90, "mxfp4", NONE, config) is MoeBackend.TRITON
    assert choose_backend(AUTO, here, "mxfp4", NONE, config) is MoeBackend.FLASHINFER_MXFP4
    assert "auto passes over triton, because it needs the package triton, which is not installed" in caplog.text
    assert "it comes first by moe/tables/backends.json: NVIDIA H100" in caplog.text
    monkeypatch.setattr(Backend, "is_installed", lambda self: self.package is None)
    assert choose_backend(AUTO, here, "mxfp4", NONE, config) is MoeBackend.TORCH


def test_packages_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = load_backend(MoeBackend.TRITON)
    monkeypatch.setattr(TritonBackend, "package", "torch")
    assert backend.is_installed()
    monkeypatch.setattr(TritonBackend, "package", "surely_not_installed")
    assert not backend.is_installed()


# ---- every backend with every transport, before any weight is read ----


CONFIG = hostile.make_config(8, 2048, 2048, 2)
PAIRS = list(itertools.product([backend for backend in MoeBackend if backend is not AUTO], MoeA2ABackend))
# The support table of the design. DeepEP's low-latency layout is mooncake's and nixl's too.
BUILDS = {
    "torch": {"none", "deepep", "mooncake", "nixl"},
    "triton": {"none", "deepep"},
    "flashinfer_mxfp4": {"none"},
    "flashinfer_cutlass": {"none"},
    "flashinfer_trtllm": {"none"},
    "flashinfer_cutedsl": {"none", "flashinfer"},
    "deep_gemm": {"none", "deepep", "mooncake", "nixl"},
    "aiter": {"none", "deepep", "mori", "mooncake", "nixl"},
}


@rows("backend, a2a", *PAIRS)
def test_pair_builds_or_is_refused_by_name(backend: MoeBackend, a2a: MoeA2ABackend) -> None:
    assert backend in BACKEND_MODULES, "every backend is built in"
    if a2a in BUILDS[backend]:
        assert MoeRunner(backend, a2a, CONFIG).backend is backend
        return
    with pytest.raises(UnsupportedPathError) as error:
        MoeRunner(backend, a2a, CONFIG)
    text = str(error.value)
    for words in (f"--moe-backend {backend}", f"--moe-a2a-backend {a2a}", "works with --moe-a2a-backend none"):
        assert words in text
    assert "\n" not in text


def test_cutedsl_with_deepep_builds_for_low_latency_alone() -> None:
    backend = MoeBackend.FLASHINFER_CUTEDSL
    assert MoeRunner(backend, MoeA2ABackend.DEEPEP, CONFIG, dispatch_formats=(DispatchFormat.DEEPEP_LL,))
    with pytest.raises(UnsupportedPathError, match="deepep_normal"):
        MoeRunner(backend, MoeA2ABackend.DEEPEP, CONFIG)


@rows("backend, a2a", *PAIRS)
def test_what_a_backend_supports_can_be_built(backend: MoeBackend, a2a: MoeA2ABackend) -> None:
    entry, paths = load_backend(backend), itertools.product(ARCHS, FORMATS)
    supported = any(entry.supports(Device(arch=arch), name, a2a, CONFIG) is None for arch, name in paths)
    assert supported == (len(missing_formats(backend, a2a, a2a.dispatch_formats)) < len(a2a.dispatch_formats))
