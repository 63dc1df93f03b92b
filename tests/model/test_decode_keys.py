"""Keys that stay gathered from one decode step to the next, against a dense reference; unused slots hold NaN."""

from dataclasses import replace

import pytest
import torch

from model.attention import decode_keys
from model.attention import torch as torch_attention
from model.attention.base import Attention, AttentionDtypes, AttentionSpec, make_attention
from tests.model.attention_cases import GQA, MLA, Requests, Sequence, worst_error
from tests.tables import rows

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
WINDOW_9 = replace(GQA, window=9)
WINDOW_40 = replace(GQA, window=40)


FP32 = AttentionDtypes(model=torch.float32, kv=torch.float32)
LATER = {"a": 1, "b": 1, "c": 1}


def make(*specs: AttentionSpec, dtypes: AttentionDtypes = FP32) -> Attention:
    """The torch attention of a CPU."""
    return make_attention("torch", specs, torch.device("cpu"), dtypes)


def requests_of(spec: AttentionSpec, length: int, dtype: torch.dtype = torch.float32) -> Requests:
    """Requests a, b and c of up to so many tokens."""
    sequences = {name: Sequence(spec, length, seed, SINKS, dtype) for seed, name in enumerate("abc")}
    return Requests(spec, sequences, SINKS, kv_dtype=dtype)


@pytest.fixture(autouse=True)
def keeps_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step that follows another keeps its keys."""
    monkeypatch.setattr(decode_keys, "_WORTH_KEEPING", 1)


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of keys each time that those of a layer are gathered by a step that may keep them."""
    found: list[int] = []
    gather = decode_keys.StepKeys._gather

    def counting(step, kv, dtype):  # type: ignore[no-untyped-def]
        found.append(step._end - step._start)
        return gather(step, kv, dtype)

    monkeypatch.setattr(decode_keys.StepKeys, "_gather", counting)
    return found


@rows("spec", GQA, WINDOW_9, WINDOW_40, MLA)
def test_steps_append_to_kept_keys_until_the_room_is_used_up(spec: AttentionSpec, gathers: list[int]) -> None:
    """Requests of unequal length, shorter than the window at first: the masked columns leave it one after another."""
    gathers.clear()
    room = decode_keys._ROOM
    start = {"a": 3, "b": 30, "c": 17}
    steps = [start, *[LATER] * (room + 4)]
    assert worst_error(make(spec), requests_of(spec, 200), steps) < 2e-5
    first, second = (min(length, spec.window or length) for length in (32, 32 + room + 1))
    assert gathers == [first, second], "the first step that follows, and the one for which there is no room"


@rows("dtype", torch.float8_e4m3fn, torch.bfloat16)
def test_kept_keys_are_rounded_as_those_of_the_cache(dtype: torch.dtype) -> None:
    """Keys and values that the cache has to round: every step must see what a gather of all keys gives."""
    requests = requests_of(GQA, 60)
    narrow = Requests(GQA, requests.sequences, SINKS, kv_dtype=dtype)
    kept = make(GQA)
    for counts in [{"a": 7, "b": 20}, *[{"a": 1, "b": 1}] * 5]:
        step, kv = narrow.step(counts), narrow.cache.layers[0]
        inputs = (step.q, step.k, step.v, SINKS)
        got, want = (attention.run(GQA, attention.plan(step.batch), kv, *inputs) for attention in (kept, make(GQA)))
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # kept keys are added up in another order


def test_only_steps_that_go_on_for_a_while_keep_their_keys(monkeypatch: pytest.MonkeyPatch, gathers: list[int]) -> None:
    monkeypatch.setattr(decode_keys, "_WORTH_KEEPING", 4)
    short, long = [LATER] * 4, [LATER] * 6
    steps = [{"a": 9, "b": 3}, *short, {"c": 5}, *short, {"a": 2}, *long]
    assert worst_error(make(GQA), requests_of(GQA, 60), steps[:-3]) < 2e-5
    assert gathers == []
    assert worst_error(make(GQA), requests_of(GQA, 60), steps) < 2e-5
    assert gathers == [9 + 4 + 4 + 2 + 5]


def test_bf16_keeps_nothing(gathers: list[int]) -> None:
    requests = requests_of(GQA, 60)
    assert worst_error(make(GQA, dtypes=AttentionDtypes()), requests, [{"a": 16, "b": 3, "c": 4}, *[LATER] * 4]) < 2e-5
    assert gathers == []


@rows("spec, num_numbers", (GQA, 2 * 14), (MLA, 12))
def test_layers_for_which_no_memory_is_left_gather_in_every_step(
    monkeypatch: pytest.MonkeyPatch, gathers: list[int], spec: AttentionSpec, num_numbers: int
) -> None:
    """Two kinds of layers share the memory, whose halves just hold one layer: the second one gathers."""
    gathers.clear()
    layer_bytes = 3 * (18 + decode_keys._ROOM) * num_numbers * 4
    steps = [{"a": 16, "b": 3, "c": 4}, *[LATER] * 4]
    for max_bytes, expected in ((2 * layer_bytes, [18, 18, 19, 20]), (2 * layer_bytes - 2, [18, 18, 19, 19, 20, 20])):
        monkeypatch.setattr(decode_keys, "_MAX_KEPT_BYTES", max_bytes)
        attention, first, second = make(spec, WINDOW_9), requests_of(spec, 40), requests_of(spec, 40)
        for counts in steps:
            step, other = first.step(counts), second.step(counts)
            plan = attention.plan(step.batch)
            for requests, inputs in ((first, step), (second, other)):
                kv = requests.cache.layers[0]
                got = attention.run(spec, plan, kv, inputs.q, inputs.k, inputs.v, SINKS)
                assert (got.double() - inputs.want).abs().max() < 2e-5
        assert gathers == expected
        gathers.clear()


def test_other_requests_that_are_one_key_longer_do_not_follow() -> None:
    steps = [{"a": 20}, {"b": 21}, {"a": 1}, {"b": 1}, {"a": 1}, {"b": 1}, {"b": 1}]
    assert worst_error(make(GQA), requests_of(GQA, 60), steps) < 2e-5
    steps = [{"a": 20, "b": 20}, {"a": 1, "b": 1}, {"b": 1, "a": 1}, {"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 1}]
    assert worst_error(make(GQA), requests_of(GQA, 60), steps) < 2e-5


def test_a_request_that_takes_over_the_pages_of_another_does_not_follow() -> None:
    """Its prompt is as long as the other request was, so length and pages look like those of the next step."""
    requests, attention = requests_of(GQA, 60), make(GQA)
    assert worst_error(attention, requests, [{"a": 20}, {"a": 1}, {"a": 1}]) < 2e-5
    requests.cache.pages["b"] = requests.cache.pages.pop("a")
    assert worst_error(attention, requests, [{"b": 22}, {"b": 1}, {"b": 1}]) < 2e-5


def test_pages_that_changed_places_do_not_follow() -> None:
    """The page came after the first of the steps. Its slots hold other numbers now, which a gather shows."""
    requests, attention = requests_of(GQA, 80), make(GQA)
    assert worst_error(attention, requests, [{"a": 20}, *[{"a": 1}] * 30]) < 2e-5
    pages, layer = requests.cache.pages["a"], requests.cache.layers[0]
    free, size = requests.cache.free.pop(), requests.cache.page_size
    for tensor in (layer.keys, layer.values):
        tensor[free * size : (free + 1) * size] = 7.0 * tensor[pages[2] * size : (pages[2] + 1) * size]
    pages[2] = free
    step = requests.step({"a": 1})
    inputs = (step.q, step.k, step.v, SINKS)
    got, want = (a.run(GQA, a.plan(step.batch), layer, *inputs) for a in (attention, make(GQA)))
    assert torch.equal(got, want)


def test_a_plan_that_never_ran_or_ran_twice_costs_a_gather_and_nothing_else(gathers: list[int]) -> None:
    requests, attention = requests_of(GQA, 60), make(GQA)
    assert worst_error(attention, requests, [{"a": 20}, {"a": 1}, {"a": 1}]) < 2e-5
    step, later = requests.step({"a": 1}), requests.step({"a": 1})
    kv = requests.cache.layers[0]
    plan, later_plan = attention.plan(step.batch), attention.plan(later.batch)
    again = attention.plan(step.batch)
    for now, its_plan in ((step, plan), (step, plan), (later, later_plan), (step, plan), (step, again)):
        got = attention.run(GQA, its_plan, kv, now.q, now.k, now.v, SINKS)
        assert (got.double() - now.want).abs().max() < 2e-5
    assert gathers == [22, 23, 23]


def test_a_step_that_ran_elsewhere_leaves_no_gap(gathers: list[int]) -> None:
    """Planned here and run by another object, which wrote to the cache: the next step finds a column missing."""
    requests, attention = requests_of(GQA, 60), make(GQA)
    assert worst_error(attention, requests, [{"a": 20}, {"a": 1}, {"a": 1}]) < 2e-5
    step, kv, other = requests.step({"a": 1}), requests.cache.layers[0], make(GQA)
    attention.plan(step.batch)
    other.run(GQA, other.plan(step.batch), kv, step.q, step.k, step.v, SINKS)
    assert worst_error(attention, requests, [{"a": 1}, {"a": 1}]) < 2e-5
    assert gathers == [22, 24]


def test_requests_too_many_for_one_group_keep_nothing(monkeypatch: pytest.MonkeyPatch, gathers: list[int]) -> None:
    monkeypatch.setattr(torch_attention, "_MAX_DECODE_KEYS", 64)
    assert worst_error(make(GQA), requests_of(GQA, 60), [{"a": 22, "b": 3, "c": 4}, *[LATER] * 4]) < 2e-5
    assert gathers == []


def test_layers_of_one_kind_keep_their_own_keys(gathers: list[int]) -> None:
    """One plan serves all layers of a kind, each with a cache of its own."""
    first, second = requests_of(GQA, 60), requests_of(GQA, 60)
    second.sequences["a"] = Sequence(GQA, 60, 9, SINKS)
    attention = make(GQA)
    for counts in [{"a": 20}, *[{"a": 1}] * 4]:
        steps = [requests.step(counts) for requests in (first, second)]
        plan = attention.plan(steps[0].batch)
        for requests, step in zip((first, second), steps, strict=True):
            got = attention.run(GQA, plan, requests.cache.layers[0], step.q, step.k, step.v, SINKS)
            assert (got.double() - step.want).abs().max() < 2e-5
    assert gathers == [22, 22]
