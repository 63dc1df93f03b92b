"""Attention by FlashInfer with the library's real wrapper over emulated kernels: numbers, replays, what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from model.attention import base, flashinfer
from model.attention.base import AttentionDtypes, AttentionSpec, choose_attention, make_attention
from model.attention.flashinfer import FlashInferPlan
from model.attention.triton import TritonAttention
from model.batch import ForwardBatch, LayerKv
from model.errors import UnsupportedModelError
from tests.emulators import flashinfer_mla
from tests.model.paged import PagedCache
from tests.tables import rows

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SPEC = AttentionSpec(num_heads=16, num_kv_heads=1, key_dim=192, value_dim=128, scale=0.08, values_in_keys=True)
DEEPSEEK = replace(SPEC, num_heads=128, key_dim=576, value_dim=512)
TOLERANCE = 0.01  # relative; results and weights are rounded to bf16
PAGE = 16


class Requests:
    """Random steps over one bf16 cache, attended by FlashInfer and, in fp32, by torch."""

    def __init__(self) -> None:
        self.attention = make_attention("flashinfer", [SPEC], CPU)
        self.reference = make_attention("torch", [SPEC], CPU)
        self.cache = PagedCache([SPEC.kv_spec], dtype=torch.bfloat16)
        self.generator = torch.Generator().manual_seed(0)

    def step(self, query_lens: dict[str, int]) -> ForwardBatch:
        return self.cache.batch({name: [0] * length for name, length in query_lens.items()})

    def inputs(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = (num_tokens, SPEC.num_heads, SPEC.key_dim), (num_tokens, 1, SPEC.key_dim)
        q_THD, k_T1D = (torch.randn(shape, generator=self.generator).bfloat16() for shape in shapes)
        return q_THD, k_T1D

    def error(self, batch: ForwardBatch, q_THD: torch.Tensor, k_T1D: torch.Tensor, got_THV: torch.Tensor) -> float:
        """Of the worst token; infinite for NaN. The torch side runs on a copy of the cache."""
        exact = LayerKv(self.cache.layers[0].keys.float(), self.cache.layers[0].values)
        plan = self.reference.plan(batch)
        want_THV = self.reference.run(SPEC, plan, exact, q_THD.float(), k_T1D.float(), None, None)
        error_T = (got_THV.float() - want_THV).flatten(1).norm(dim=1) / want_THV.flatten(1).norm(dim=1)
        return float(error_T.nan_to_num(float("inf")).max())


@rows("arch", "sm90", "sm100")
def test_chunks_and_decodes_in_one_step_are_attended_as_by_torch(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths at the borders of pages, chunks that go on, requests in other orders, unused slots that hold NaN."""
    kernels = flashinfer_mla.install(monkeypatch, arch)
    requests = Requests()
    steps: list[dict[str, int]] = [{"a": 1, "b": 15, "c": 16, "d": 17, "e": 33}, {"e": 1, "a": 15, "c": 1, "b": 1}]
    steps += [{"b": 1, "a": 40, "d": 1}, dict.fromkeys("abcde", 1), {"a": 1}]
    for step in steps:
        batch = requests.step(step)
        q_THD, k_T1D = requests.inputs(batch.num_tokens)
        plan = requests.attention.plan(batch)
        assert isinstance(plan, FlashInferPlan)
        got_THV = requests.attention.run(SPEC, plan, requests.cache.layers[0], q_THD, k_T1D, None, None)
        assert requests.error(batch, q_THD, k_T1D, got_THV) < TOLERANCE
    assert len(kernels.calls) == len(steps)


class Captured:
    """A step of fixed buffers that is planned and called once; `replay` repeats the call as a graph would."""

    def __init__(self, requests: Requests, kernels: flashinfer_mla.Kernels, query_lens: tuple[int, ...]) -> None:
        self.requests, self.kernels = requests, kernels
        num_rows, num_tokens = len(query_lens), sum(query_lens)
        spare = requests.cache.free.pop()
        requests.cache.layers[0].keys[spare * PAGE :][:PAGE] = 0
        self.spare_slot = spare * PAGE
        self.batch = replace(
            requests.step({"none": 1}),
            input_ids_T=torch.zeros(num_tokens, dtype=torch.int64), slots_T=torch.full((num_tokens,), self.spare_slot),
            query_start_B1=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens_B=torch.ones(num_rows, dtype=torch.int32),
            page_table_BP=torch.full((num_rows, 8), spare, dtype=torch.int32),
            query_lens=query_lens, seq_lens=(8 * PAGE,) * num_rows,
        )  # fmt: skip
        self.q_THD, self.k_T1D = requests.inputs(num_tokens)
        self.plan = requests.attention.plan_for_graph(self.batch)
        self.out_THV = self._run()
        self.call = kernels.calls[-1]

    def _run(self) -> torch.Tensor:
        return self.requests.attention.run(
            SPEC, self.plan, self.requests.cache.layers[0], self.q_THD, self.k_T1D, None, None
        )

    def error(self, step: dict[str, int], query_lens: tuple[int, ...], idle_lens: tuple[int, ...]) -> float:
        """Of a replay for this step, with these query lengths of all rows and sequence lengths of those without one."""
        batch = self.requests.step(step)
        num_tokens, (num_rows, num_pages) = batch.num_tokens, batch.page_table_BP.shape
        self.batch.page_table_BP[:num_rows, :num_pages] = batch.page_table_BP
        q_THD, k_T1D = self.requests.inputs(num_tokens)
        self.q_THD[:num_tokens], self.k_T1D[:num_tokens] = q_THD, k_T1D
        self.requests.attention.update_plan(self.plan, query_lens, batch.seq_lens + idle_lens)
        self.requests.cache.layers[0].keys[batch.slots_T] = k_T1D  # the part of the graph that stores
        self.kernels.run(*self.call)
        return self.requests.error(batch, q_THD, k_T1D, self.out_THV[:num_tokens])


def test_a_captured_decode_follows_lengths_pages_and_rows_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of two sizes, which share the buffer of page ids, take turns."""
    kernels = flashinfer_mla.install(monkeypatch)
    requests = Requests()
    large, small = (Captured(requests, kernels, (1,) * size) for size in (4, 2))
    prompts = requests.step({"a": 30, "b": 14, "c": 1})
    q_THD, k_T1D = requests.inputs(prompts.num_tokens)
    plan = requests.attention.plan(prompts)
    requests.attention.run(SPEC, plan, requests.cache.layers[0], q_THD, k_T1D, None, None)
    for _ in range(4):
        assert large.error(dict.fromkeys("abc", 1), (1,) * 4, (1,)) < TOLERANCE
        assert small.error({"c": 1, "a": 1}, (1, 1), ()) < TOLERANCE
        assert small.error({"b": 1}, (1, 1), (1,)) < TOLERANCE


def test_a_captured_step_with_prompts_follows_how_tokens_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that a step lacks are a row of their own, and further rows have none."""
    kernels = flashinfer_mla.install(monkeypatch)
    requests = Requests()
    captured = Captured(requests, kernels, (61, 1, 1, 1))
    assert captured.error({"a": 20, "b": 3}, (20, 3, 41, 0), (41, 1)) < TOLERANCE
    assert captured.error({"b": 1, "a": 40, "c": 17}, (1, 40, 17, 6), (6,)) < TOLERANCE
    assert captured.error({"a": 64}, (64, 0, 0, 0), (1, 1, 1)) < TOLERANCE


def test_a_captured_step_refuses_another_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = flashinfer_mla.install(monkeypatch)
    captured = Captured(Requests(), kernels, (1, 1))
    with pytest.raises(ValueError, match="incompatible capacity"):
        captured.requests.attention.update_plan(captured.plan, (2,), (2,))


def test_sinks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_mla.install(monkeypatch)
    requests = Requests()
    batch, kv = requests.step({"a": 3}), requests.cache.layers[0]
    with pytest.raises(UnsupportedModelError, match="flashinfer: it has no sinks for latent attention"):
        requests.attention.run(
            SPEC, requests.attention.plan(batch), kv, *requests.inputs(3), None, torch.zeros(SPEC.num_heads)
        )


@rows("num_tokens, is_planned", (16384 - 132 - 1, True), (16384 - 132, False))
def test_steps_that_a_plan_has_no_room_for_run_in_triton(
    num_tokens: int, is_planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library refuses plans of more than 16,384 parts, and accepts the largest one that it is given."""
    flashinfer_mla.install(monkeypatch)
    attention = make_attention("flashinfer", [DEEPSEEK], CPU)
    cache = PagedCache([replace(SPEC.kv_spec, key_dim=2)], num_pages=1200)
    plan = attention.plan(cache.batch({"a": [0] * num_tokens}))
    assert isinstance(plan, FlashInferPlan) == is_planned


REFUSALS = (
    ("sm90", replace(SPEC, values_in_keys=False), {}, "it serves latent attention .MLA. alone"),
    ("sm90", replace(SPEC, window=128), {}, "no sliding windows for latents, and a layer has one of 128"),
    ("sm90", replace(SPEC, value_dim=160), {}, "latents of 128, 256, 512 with a rope part of .* 64, not 160 with 32"),
    ("sm90", replace(SPEC, num_heads=48), {}, "numbers of query heads that divide 128, not 48"),
    ("sm80", SPEC, {}, "an NVIDIA GPU of sm90 or newer, not sm80"),
    ("gfx942", SPEC, {}, "an NVIDIA GPU of sm90 or newer, not gfx942"),
    ("sm90", SPEC, {"kv": torch.float8_e4m3fn}, "kv_cache_dtype is torch.float8_e4m3fn"),
    ("sm90", SPEC, {"model": torch.float32, "kv": torch.float32}, "computes in bfloat16, and dtype is torch.float32"),
)


@rows("arch, spec, dtypes, reason", *REFUSALS)
def test_what_it_cannot_serve_is_refused_by_name(
    arch: str, spec: AttentionSpec, dtypes: dict[str, torch.dtype], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_arch", lambda device: arch)
    monkeypatch.setattr(TritonAttention, "unsupported_reason", classmethod(lambda cls, spec, device: None))
    with pytest.raises(UnsupportedModelError, match=f"attention backend flashinfer: .*{reason}; choose auto or torch"):
        make_attention("flashinfer", [spec], CPU, AttentionDtypes(**dtypes))


@rows(
    "version, wanted",
    (None, "the package flashinfer, which is not installed: pip install flashinfer-python"),
    ((0, 6, 11), "flashinfer-python 0.7.2 or newer and found 0.6.11"),
)
def test_a_missing_or_old_package_is_named(
    version: tuple[int, int, int] | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe.backends.flashinfer.common.flashinfer_version", lambda: version)
    verdicts = base.attention_verdicts([SPEC], CUDA, arch="sm90")
    assert wanted in str(verdicts["flashinfer"])
    assert choose_attention([SPEC], CUDA, arch="sm90") != "flashinfer"


@rows("kv_dtype", torch.bfloat16, torch.float8_e4m3fn)
def test_auto_takes_triton_and_says_why(kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "missing_compiler", lambda: None)
    monkeypatch.setattr(TritonAttention, "unsupported_reason", classmethod(lambda cls, spec, device: None))
    assert choose_attention([DEEPSEEK], CUDA, AttentionDtypes(kv=kv_dtype), "sm90") == "triton"
    assert "126 tokens/s instead of 439" in str(base.not_chosen_reason("flashinfer", [DEEPSEEK], "sm90"))


def test_no_plan_is_made_before_the_last_one_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's pinned memory is used again for each plan, and its copies do not wait."""
    flashinfer_mla.install(monkeypatch, "sm90")
    requests, order = Requests(), []
    wrapper = requests.attention._mla.BatchMLAPagedAttentionWrapper
    plan = wrapper.plan
    event = SimpleNamespace(synchronize=lambda: order.append("wait"), record=lambda: order.append("copied"))
    monkeypatch.setattr(wrapper, "plan", lambda *args, **options: (order.append("plan"), plan(*args, **options))[1])
    monkeypatch.setattr(requests.attention, "_copied", event)
    for _ in range(2):
        requests.attention.plan(requests.step({"a": 1}))
    assert order == ["wait", "plan", "copied"] * 2
