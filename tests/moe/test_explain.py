"""`explain` without a GPU: every architecture, format and transport gets a verdict for every backend."""

import dataclasses

import pytest
import torch

from moe import Activation, MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.choose.explain import ARCHS, FORMATS, Row, explain, render
from moe.choose.ranking import RULE, rank_backends
from moe.choose.select import choose_backend
from moe.device import Device
from moe.dispatch.deepep_settings import DeepepMode
from moe.errors import MoeConfigError, UnsupportedPathError
from tests.moe.backends import hostile
from tests.moe.moe_layers import GPT_OSS
from tests.tables import rows

WORDS = f"{RULE}; nobody measured this format on this GPU"
CONFIG = hostile.make_config(8, 2048, 2048, 2)


@rows("arch", *ARCHS)
@rows("format_name", *FORMATS)
@rows("a2a", *MoeA2ABackend)
def test_every_question_has_an_answer(arch: str, format_name: str, a2a: MoeA2ABackend) -> None:
    table = explain(arch, format_name, a2a, CONFIG)
    ranking = rank_backends(Device(arch=arch), format_name, a2a, CONFIG)
    assert tuple(row.backend for row in table) == ranking.order
    assert all(row.source in (None, ranking.source_of(row.backend)) for row in table)
    assert all(row.reason is None or len(row.reason) > 5 for row in table)
    assert all(row.hardware for row in table)
    chosen = [row.backend for row in table if row.is_chosen]
    assert len(render(table).splitlines()) == len(table) + (not chosen)
    if chosen:
        assert [choose_backend(MoeBackend.AUTO, Device(arch=arch), format_name, a2a, CONFIG)] == chosen
    else:
        with pytest.raises(UnsupportedPathError):
            choose_backend(MoeBackend.AUTO, Device(arch=arch), format_name, a2a, CONFIG)


@rows(
    "arch, format_name, a2a, usable",
    ("sm90", "fp8_block", "deepep", {"deep_gemm", "torch"}),
    ("gfx942", "fp8_block", "mori", {"aiter"}),
    ("gfx942", "mxfp4", "mori", set()),
    ("gfx950", "mxfp4", "mori", {"aiter"}),
    ("cpu", "mxfp4", "deepep", {"torch"}),
)
def test_known_answers(arch: str, format_name: str, a2a: str, usable: set[str]) -> None:
    found = {str(row.backend) for row in explain(arch, format_name, MoeA2ABackend(a2a), CONFIG) if row.reason is None}
    assert usable <= found
    assert bool(usable) == bool(found)


def test_the_mode_narrows_what_must_be_taken() -> None:
    def reason(mode: DeepepMode) -> str | None:
        rows = explain("sm100", "nvfp4", MoeA2ABackend.DEEPEP, CONFIG, mode.dispatch_formats)
        return next(row.reason for row in rows if row.backend is MoeBackend.FLASHINFER_CUTEDSL)

    assert reason(DeepepMode.LOW_LATENCY) is None
    for mode in (DeepepMode.AUTO, DeepepMode.NORMAL):
        assert "deepep" in str(reason(mode))


def test_biases_and_activations_count() -> None:
    """What `prepare` would refuse for a layer like GPT-OSS's is refused here, and `auto` takes what remains."""
    config = dataclasses.replace(CONFIG, has_biases=True, activation=GPT_OSS)
    reasons = {row.backend: str(row.reason) for row in explain("sm90", "fp8_block", MoeA2ABackend.NONE, config)}
    for backend in (MoeBackend.DEEP_GEMM, MoeBackend.FLASHINFER_CUTLASS):
        assert reasons[backend] == "fp8_block experts with biases are not supported"
    assert reasons[MoeBackend.TRITON] == reasons[MoeBackend.TORCH] == "None"
    config = dataclasses.replace(config, has_biases=False)
    reasons = {row.backend: str(row.reason) for row in explain("sm100", "nvfp4", MoeA2ABackend.NONE, config)}
    for backend in (MoeBackend.FLASHINFER_TRTLLM, MoeBackend.FLASHINFER_CUTEDSL, MoeBackend.FLASHINFER_CUTLASS):
        assert reasons[backend].endswith("is not supported for nvfp4, only plain SwiGLU")
    assert reasons[MoeBackend.TRITON] == "None"


def test_text() -> None:
    text = render(explain("cpu", "mxfp4", MoeA2ABackend.NONE, hostile.make_config(8, 64, 64, 2, dtype=torch.float32)))
    lines = text.splitlines()
    assert any(line.startswith("torch ") and line.endswith(f"usable  <- auto, by {WORDS}") for line in lines)
    assert any(line.startswith("aiter ") and "cpu" in line for line in lines)
    nothing = [Row(backend=MoeBackend.AITER, hardware="", reason="no", source=None)]
    assert render(nothing).endswith("auto: no backend can run this")


def test_the_words_say_whether_the_choice_was_measured() -> None:
    """G66: what `explain` prints beside the choice is what is known of that backend."""
    shape = hostile.make_config(64, 7168, 2048, 8)
    assert "triton" in chosen_line("fp8_block", shape)
    assert "moe/tables/backends.json: NVIDIA H100" in chosen_line("fp8_block", shape)
    other = hostile.make_config(64, 7040, 2112, 8, activation=Activation(limit=10.0))
    assert "nearest measured shape: 64 experts of 7168 x 2048" in chosen_line("nvfp4", other)
    assert f"auto, by {RULE}; nobody measured this format" in chosen_line("bf16", shape)


def test_a_usable_backend_that_nobody_measured_is_not_called_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """G66: the measured ones cannot run here; the next is taken by the rule, and says so."""
    for name in ("triton.backend.TritonBackend", "flashinfer.cutlass.FlashinferCutlassBackend"):
        monkeypatch.setattr(f"moe.backends.{name}.supports", lambda self, *path: "not here")
    line = chosen_line("fp8_block", hostile.make_config(64, 7168, 2048, 8))
    assert line.startswith("deep_gemm")
    assert line.endswith(f"auto, by {RULE}; nobody measured deep_gemm on this GPU")


def chosen_line(format_name: str, config: MoeRunnerConfig) -> str:
    text = render(explain("sm90", format_name, MoeA2ABackend.NONE, config))
    return next(line for line in text.splitlines() if "<- auto" in line)


@rows(
    "arch, format_name, words",
    ("sm70", "bf16", "--gpu sm70 is not known; known: sm80, sm86"),
    ("sm90", "int4", "--format int4 is not known; known: bf16, fp8_block"),
)
def test_unknown_words_are_named(arch: str, format_name: str, words: str) -> None:
    with pytest.raises(MoeConfigError, match=words):
        explain(arch, format_name, MoeA2ABackend.NONE, CONFIG)
