"""The batch of a step, the KV cache's size, loading: exact numbers on a fake model."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine import load, model_settings
from engine.batching import make_step
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineConfigError, MachineError
from engine.kv_cache import KvLayout, choose_cpu_pages, choose_cuda_pages
from engine.load import load_engine
from engine.runner import ModelRunner
from engine.sequence import Chunk, Sequence
from engine.warm_up import run_step_sizes
from model.batch import KvLayerSpec
from tests.engine.fakes import FakeModel
from tests.engine.requests import request
from tests.tables import rows

LAYOUT = KvLayout(
    specs=(KvLayerSpec(num_heads=2, key_dim=64, value_dim=64), KvLayerSpec(num_heads=1, key_dim=576, value_dim=0)),
    page_size=16,
    dtype=torch.bfloat16,
)


def make_seq(tokens, num_prompt, pages, row, **sampling):
    seq = Sequence(request("a", tokens[:num_prompt], **sampling), stop_ids=frozenset(), seed=0)
    seq.token_ids += tokens[num_prompt:]
    seq.pages, seq.row = pages, row
    return seq


def make_runner():
    return ModelRunner(FakeModel(), [], page_size=4, max_num_seqs=4, max_model_len=32)


def chunk_of(seq, start, num_tokens):
    seq.num_computed = start
    return Chunk.next_of(seq, num_tokens)


def build(runner, *chunks):
    """The batch of (sequence, start, number of tokens) each."""
    return runner.make_batch(make_step([chunk_of(*chunk) for chunk in chunks], runner.page_size))


def test_a_mixed_step_is_laid_out_as_documented():
    decode = make_seq([5, 6, 7, 8, 9, 10], 3, [7, 2], row=2)
    prompt = make_seq(list(range(20, 31)), 11, [1, 3, 4], row=0)
    scored = make_seq([40, 41, 42], 3, [6], row=1, prompt_logprobs=1)
    batch = build(make_runner(), (decode, 5, 1), (prompt, 2, 4), (scored, 0, 2), (prompt, 9, 2))
    assert batch.input_ids_T.tolist() == [10, 22, 23, 24, 25, 40, 41, 29, 30]
    assert batch.positions_T.tolist() == [5, 2, 3, 4, 5, 0, 1, 9, 10]
    assert batch.slots_T.tolist() == [9, 6, 7, 12, 13, 24, 25, 17, 18]
    assert batch.query_start_B1.tolist() == [0, 1, 5, 7, 9]
    assert batch.seq_lens_B.tolist() == [6, 6, 2, 11]
    assert batch.page_table_BP.tolist() == [[7, 2, 0], [1, 3, 4], [6, 0, 0], [1, 3, 4]]
    assert batch.logit_rows_R.tolist() == [0, 5, 6, 8]  # a prompt in the middle wants none, a scored one all
    assert (batch.query_lens, batch.seq_lens) == ((1, 4, 2, 2), (6, 6, 2, 11))
    assert not batch.is_decode
    dtypes = [batch.input_ids_T, batch.positions_T, batch.slots_T, batch.logit_rows_R]
    assert {tensor.dtype for tensor in dtypes} == {torch.int64}
    assert {t.dtype for t in (batch.query_start_B1, batch.seq_lens_B, batch.page_table_BP)} == {torch.int32}


def test_a_decode_step_follows_pages_as_they_are_added():
    runner = make_runner()
    seqs = [make_seq([1, 2, 3, 4], 2, [5], row=0), make_seq([9, 8], 1, [3], row=3)]
    batch = build(runner, (seqs[0], 3, 1), (seqs[1], 1, 1))
    assert batch.is_decode
    assert batch.slots_T.tolist() == [23, 13]
    assert batch.page_table_BP.tolist() == [[5], [3]]
    seqs[0].token_ids.append(7)
    seqs[0].pages.append(1)
    batch = build(runner, (seqs[0], 4, 1))
    assert (batch.input_ids_T.tolist(), batch.positions_T.tolist(), batch.slots_T.tolist()) == ([7], [4], [4])
    assert batch.page_table_BP.tolist() == [[5, 1]]


def test_a_prompt_that_is_not_finished_wants_no_logits():
    assert build(make_runner(), (make_seq([1] * 9, 9, [0, 1, 2], row=0), 0, 4)).logit_rows_R.tolist() == []
    decode = make_seq([5, 6, 7], 2, [7], row=2)
    first, last = (make_seq(list(range(20, 31)), 11, [1, 3, 4], row=0) for _ in "ab")
    batch = build(make_runner(), (decode, 2, 1), (first, 5, 1))
    assert batch.is_decode
    assert batch.logit_rows_R.tolist() == [0]
    assert build(make_runner(), (last, 10, 1), (decode, 2, 1)).logit_rows_R.tolist() == [0, 1]


def test_bytes_and_tensors_of_the_cache():
    assert LAYOUT.bytes_per_page == (2 * 128 + 576) * 16 * 2
    first, second = LAYOUT.allocate(3, torch.device("cpu"))
    assert (first.keys.shape, first.values.shape) == ((48, 2, 64), (48, 2, 64))
    assert (second.keys.shape, second.values.shape) == ((48, 1, 576), (48, 1, 0))
    assert first.keys.dtype == torch.bfloat16
    assert not first.keys.any()


def test_cpu_pages_serve_all_places_within_a_gibibyte_and_one_full_request_always():
    choose = partial(choose_cpu_pages, LAYOUT, step_tokens=8)
    assert choose(max_num_seqs=4, max_model_len=100) == 4 * 7
    assert choose(max_num_seqs=4, max_model_len=10**5) == 100_000 // 16
    assert choose(max_num_seqs=4, max_model_len=3000) == 4 * 2048 // 16
    assert choose(max_num_seqs=10**6, max_model_len=4096) == 2**30 // LAYOUT.bytes_per_page


def config(**settings):
    return EngineConfig(model=Path("unused"), device="cpu", **settings)


def test_numbers_left_open_are_filled_in_and_too_long_a_context_is_refused():
    loaded = load_engine(config(), FakeModel(max_model_len=256))
    assert (loaded.max_model_len, loaded.max_num_batched_tokens, loaded.num_pages) == (256, 512, 64 * 16)
    assert load_engine(config(max_model_len=100), FakeModel()).max_model_len == 100
    assert load_engine(config(max_num_seqs=1000), FakeModel()).max_num_batched_tokens == 1000
    for num_pages, max_model_len in ((3, 48), (15, 240), (16, 256), (17, 256)):
        assert load_engine(config(num_pages=num_pages), FakeModel()).max_model_len == max_model_len
    with pytest.raises(EngineConfigError, match=r"max_model_len is 257.*at most 256"):
        load_engine(config(max_model_len=257), FakeModel(max_model_len=256))


@rows("name, dtype", ("bfloat16", torch.bfloat16), ("fp8", torch.float8_e4m3fn))
def test_kv_dtype_is_a_setting(name, dtype):
    dummy = config(kv_cache_dtype=name, load_format="dummy")  # the fake reads positions back, which FP8 rounds, as NaN
    loaded = load_engine(dummy, FakeModel())
    assert {layer.keys.dtype for layer in loaded.runner.kv} == {dtype}


def test_the_model_is_warm_before_the_first_request():
    model = FakeModel()
    core = EngineCore(config(), model)
    assert model.num_calls == 4, "a prompt and a token to warm up, the same again to time"
    assert model.largest_step == 32
    assert core.info.num_pages == core.stats().num_pages_total
    assert (core.info.vocab_size, core.info.dtype, core.info.device) == (97, "float32", "cpu")


def test_the_pace_starts_with_the_time_that_a_prompt_token_took(monkeypatch):
    times = iter([10.0, 10.032])
    monkeypatch.setattr(load, "time", SimpleNamespace(monotonic=lambda: next(times)))
    pace = load_engine(config(max_step_ms=200), FakeModel()).pace
    assert pace.max_prompt_tokens == 192, "1 ms a token; a multiple of 32"


def test_cuda_without_a_device_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MachineError, match="device is 'cuda:1'"):
        load_engine(EngineConfig(model=Path("unused"), device="cuda:1"), None)


def test_another_gpu_than_the_first_becomes_the_current_one(monkeypatch):
    """Triton launches on the current device, whatever device its tensors are on; streams and graphs are there too."""
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert model_settings.choose_device("cuda:1") == torch.device("cuda:1")
    assert model_settings.choose_device("cuda") == torch.device("cuda")
    assert model_settings.choose_device("cpu") == torch.device("cpu")
    assert current == [torch.device("cuda:1")]
    with pytest.raises(MachineError, match="device is 'cuda:2': torch finds 2 CUDA devices"):
        model_settings.choose_device("cuda:2")


@rows("field, value", ("moe_backend", "magic"), ("moe_a2a_backend", "pigeon"))
def test_an_unknown_backend_lists_the_known_ones(field, value):
    with pytest.raises(EngineConfigError, match=f"{field} is '{value}'.*none|{field} is '{value}'.*torch"):
        load_engine(config(**{field: value}), None)


def test_cuda_pages_are_what_weights_and_a_step_leave(monkeypatch):
    gib = 2**30
    numbers = {"memory_allocated": 10 * gib, "max_memory_allocated": 12 * gib}
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (68 * gib, 80 * gib))
    rehearsals = []

    def choose(utilization):
        return choose_cuda_pages(
            LAYOUT,
            device=torch.device("cuda"),
            utilization=utilization,
            sampling_bytes=gib,
            profile_run=lambda: rehearsals.append(1),
        )

    assert choose(0.5) == (40 - 12 - 2 - 1) * gib // LAYOUT.bytes_per_page
    assert rehearsals == [1]
    with pytest.raises(MachineError, match=r"gpu_memory_utilization is 0.1"):
        choose(0.1)


def test_steps_of_every_size_run_beside_a_decode_before_the_first_request():
    model = FakeModel()
    layout = KvLayout(specs=tuple(model.kv_specs), page_size=4, dtype=torch.float32)
    kv = layout.allocate(80, torch.device("cpu"))
    runner = ModelRunner(model, kv, page_size=4, max_num_seqs=2, max_model_len=300)
    sizes = []
    launch = runner.launch
    runner.launch = lambda step: (sizes.append([row.num_tokens for row in step.rows]), launch(step))
    run_step_sizes(runner, 300)
    prompts = [3, 7, 15, 31, 63, 127, 255, 299]
    assert sizes == [*([1, num_tokens] for num_tokens in prompts), [1, 1]], "at last every place decodes"
    sizes.clear()
    run_step_sizes(runner, 10)
    run_step_sizes(runner, 2)
    assert sizes == [[1, 3], [1, 7], [1, 9], [1, 1], [1, 1]]
