"""EngineCore on a fake model: the same tokens however a request is cut, batched, cached or preempted."""

import math

import numpy as np
import pytest

from engine.errors import EngineError
from tests.engine.fakes import FakeModel, fake_core, in_both_orders
from tests.engine.requests import request, run_all, tokens_of
from tests.tables import rows

PROMPTS = [list(range(1, 1 + length)) for length in (1, 3, 4, 5, 16, 17, 40)]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}


def alone(make_core, prompt, **kwargs):
    return tokens_of(run_all(make_core(max_num_batched_tokens=256), [request("a", prompt, **kwargs)])["a"])


@in_both_orders
@rows("sampling", {}, SAMPLED)
@rows(
    "settings",
    {"max_num_batched_tokens": 8},
    {"page_size": 1, "num_pages": 250},
    {"page_size": 16, "num_pages": 20, "enable_prefix_caching": False},
    {"max_num_seqs": 2},
    {"num_pages": 26},
)
def test_tokens_do_not_depend_on_chunks_pages_or_neighbours(make_core, settings, sampling):
    requests = [
        request(f"r{i}", prompt, max_tokens=20, ignore_eos=True, **sampling) for i, prompt in enumerate(PROMPTS)
    ]
    outputs = run_all(make_core(**settings), requests)
    for i, prompt in enumerate(PROMPTS):
        expected = alone(make_core, prompt, max_tokens=20, ignore_eos=True, **sampling)
        assert tokens_of(outputs[f"r{i}"]) == expected
        assert len(expected) == 20


@in_both_orders
def test_preemption_keeps_the_tokens(make_core):
    core = make_core(num_pages=16)
    requests = [request(f"r{i}", [i + 1] * 8, max_tokens=40, ignore_eos=True, **SAMPLED) for i in range(4)]
    outputs = run_all(core, requests)
    assert core.stats().num_preemptions > 0
    for i in range(4):
        assert tokens_of(outputs[f"r{i}"]) == alone(make_core, [i + 1] * 8, max_tokens=40, ignore_eos=True, **SAMPLED)


@in_both_orders
def test_a_seeded_request_ignores_unseeded_neighbours(make_core):
    neighbours = [request(f"n{i}", [i + 2], max_tokens=9, temperature=1.3, ignore_eos=True) for i in range(7)]
    mine = request("mine", [5, 6], max_tokens=12, ignore_eos=True, **SAMPLED)
    outputs = run_all(make_core(), [*neighbours[:3], mine, *neighbours[3:]])
    assert tokens_of(outputs["mine"]) == alone(make_core, [5, 6], max_tokens=12, ignore_eos=True, **SAMPLED)


@in_both_orders
def test_every_seed_counts_and_unseeded_requests_follow_the_engine_s(make_core):
    def answer(engine_seed, seed):
        item = request("a", [3], max_tokens=16, temperature=2.0, ignore_eos=True, seed=seed)
        return tokens_of(run_all(make_core(seed=engine_seed), [item])["a"])

    assert answer(1, 0) == answer(2, 0) != answer(1, 5)

    def run(seed):
        requests = [request(f"r{i}", [3], max_tokens=16, temperature=2.0, ignore_eos=True) for i in range(2)]
        outputs = run_all(make_core(seed=seed), requests)
        return [tokens_of(outputs[f"r{i}"]) for i in range(2)]

    first = run(7)
    assert first[0] != first[1]
    assert first == run(7)
    assert first != run(8)


@in_both_orders
def test_a_request_that_runs_to_its_length_has_no_stop_reason(make_core):
    outputs = run_all(make_core(), [request("a", [9, 8], max_tokens=3, ignore_eos=True)])["a"]
    assert [(output.finish_reason, output.stop_reason) for output in outputs] == [(None, None)] * 2 + [("length", None)]


@in_both_orders
def test_a_cached_prefix_is_used_unless_switched_off_and_changes_nothing(make_core):
    core = make_core()
    prompt = list(range(1, 30))
    first = run_all(core, [request("a", prompt)])["a"]
    second = run_all(core, [request("b", prompt)])["b"]
    assert first[0].num_cached_tokens == 0
    assert second[-1].num_cached_tokens == 28
    assert tokens_of(first) == tokens_of(second)
    assert core.stats().num_cached_tokens == 28
    core = make_core(enable_prefix_caching=False)
    for name in "ab":
        assert run_all(core, [request(name, range(1, 30))])[name][-1].num_cached_tokens == 0


@in_both_orders
def test_stop_token_ends_the_request_and_is_included(make_core):
    free = alone(make_core, [9, 8], max_tokens=30, ignore_eos=True)
    stop = free[5]
    outputs = run_all(make_core(), [request("a", [9, 8], max_tokens=30, stop_token_ids=(stop,))])["a"]
    assert tokens_of(outputs) == free[: free.index(stop) + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)


@in_both_orders
def test_end_of_turn_ids_stop_unless_ignored_and_stop_ids_always(make_core):
    """As in vLLM; a stop id of the client was ignored, too, and the answer ran to its whole budget."""
    free = alone(make_core, [9, 8], max_tokens=30, ignore_eos=True)
    model = FakeModel(eos_token_ids=(free[3],))
    assert run_all(make_core(model), [request("a", [9, 8], max_tokens=30)])["a"][-1].stop_reason == free[3]
    ignored = run_all(make_core(model), [request("a", [9, 8], max_tokens=30, ignore_eos=True)])["a"]
    assert tokens_of(ignored) == free
    assert ignored[-1].finish_reason == "length"
    own = run_all(make_core(model), [request("a", [9, 8], max_tokens=30, ignore_eos=True, stop_token_ids=(free[5],))])
    assert tokens_of(own["a"]) == free[: free.index(free[5]) + 1]
    assert own["a"][-1].stop_reason == free[5]


@in_both_orders
def test_min_tokens_forbids_the_stop_ids_until_then(make_core):
    free = alone(make_core, [9, 8], max_tokens=30, ignore_eos=True)
    tokens = alone(make_core, [9, 8], max_tokens=30, min_tokens=6, stop_token_ids=(free[2],))
    assert len(tokens) > 6
    assert free[2] not in tokens[:6]


@in_both_orders
def test_prompt_logprobs_arrive_once_whatever_the_chunks(make_core):
    prompt = list(range(1, 40))
    wholes = []
    for settings in ({"max_num_batched_tokens": 256}, {"max_num_batched_tokens": 8}, {"page_size": 1, "num_pages": 60}):
        core = make_core(**settings)
        run_all(core, [request("warm", prompt)])  # its pages are in the cache and must not be used
        outputs = run_all(core, [request("a", prompt, prompt_logprobs=2, max_tokens=3, ignore_eos=True)])["a"]
        assert [output.prompt_logprobs is not None for output in outputs] == [True, False, False]
        entries = outputs[0].prompt_logprobs
        assert entries[0] is None
        assert [entry.token_id for entry in entries[1:]] == prompt[1:]
        wholes.append(entries[1:])
    for entries in wholes[1:]:
        for entry, first in zip(entries, wholes[0], strict=True):
            assert entry.logprob == pytest.approx(first.logprob, abs=1e-5)
            assert [token for token, _ in entry.top] == [token for token, _ in first.top]
            assert [value for _, value in entry.top] == pytest.approx([value for _, value in first.top], abs=1e-5)
    best = [entry.top[0] for entry in wholes[0]]
    assert best[-1][0] == alone(make_core, prompt[:-1], max_tokens=1)[0]
    assert all(math.exp(logprob) <= 1 for _, logprob in best)


@in_both_orders
def test_prompt_logprobs_of_a_preempted_prompt_are_whole(make_core):
    core = make_core(num_pages=12, max_num_batched_tokens=2, max_num_seqs=2)
    core.add(request("old", [1] * 8, max_tokens=40, ignore_eos=True))
    core.add(request("young", range(1, 29), max_tokens=2, prompt_logprobs=0))
    outputs = run_all(core)
    assert core.stats().num_preemptions > 0
    assert [entry.token_id for entry in outputs["young"][0].prompt_logprobs[1:]] == list(range(2, 29))


@in_both_orders
def test_a_poisoned_request_fails_alone(make_core):
    model = FakeModel()
    core = make_core(model)
    model.raise_on = 42
    outputs = run_all(core, [request("good", [1, 2]), request("bad", [42, 2]), request("fine", [3])])
    assert outputs["bad"][-1].finish_reason == "error"
    assert "poison" not in outputs["bad"][-1].error
    assert outputs["bad"][-1].error_param is None
    assert core.stats().num_not_finite == 0
    assert tokens_of(outputs["good"]) == alone(make_core, [1, 2])
    assert tokens_of(outputs["fine"]) == alone(make_core, [3])
    assert core.stats().num_pages_used == 0


@in_both_orders
@rows("sampling", {}, SAMPLED | {"logprobs": 1})
def test_nan_logits_fail_their_request_only(make_core, sampling):
    core = make_core(FakeModel(nan_after=42))
    outputs = run_all(core, [request("good", [1, 2], ignore_eos=True, **sampling), request("bad", [7, 42], **sampling)])
    assert [output.finish_reason for output in outputs["bad"]] == ["error"]
    assert "not a number" in outputs["bad"][0].error
    assert core.stats().num_not_finite == 1
    assert tokens_of(outputs["good"]) == alone(make_core, [1, 2], ignore_eos=True, **sampling)


@in_both_orders
@rows("sampling", {}, SAMPLED | {"logprobs": 1})
def test_a_request_that_forbids_every_token_does_not_blame_the_model(make_core, sampling):
    """The metric of logits that are not finite counted it."""
    core = make_core()
    core.add(request("a", [1, 2], **sampling), lambda generated: np.full(97, len(generated) < 2))
    outputs = run_all(core)["a"]
    assert len(tokens_of(outputs)) == 2
    assert "forbid every token" in outputs[-1].error
    assert core.stats().num_not_finite == 0


def test_a_model_that_would_fail_every_request_never_becomes_ready():
    """A NaN in one weight gave a service that was ready, and a 500 for every request."""
    with pytest.raises(EngineError, match="the first logits are NaN or infinite, so requests would fail"):
        fake_core(FakeModel(nan_after=0))
    fake_core(FakeModel(nan_after=0), load_format="dummy")


@in_both_orders
def test_refusals_name_the_field_and_both_numbers(make_core):
    core = make_core(num_pages=8, page_size=4)
    assert core.info.max_model_len == 32
    outputs = run_all(
        core,
        [
            request("long", range(1, 41)),
            request("huge", [1], max_tokens=100),
            request("id", [97]),
            request("bias", [1], logit_bias={200: 1.0}),
        ],
    )
    refusals = {name: outs[-1] for name, outs in outputs.items()}
    assert {name: out.error_param for name, out in refusals.items()} == {
        "long": "prompt",
        "huge": "max_tokens",
        "id": "prompt",
        "bias": "logit_bias",
    }
    assert "40" in refusals["long"].error
    assert "32" in refusals["long"].error
    assert all(len(outs) == 1 for outs in outputs.values())


@in_both_orders
def test_a_full_queue_refuses_at_once(make_core):
    core = make_core(max_num_seqs=2, max_queued_requests=3)
    outputs = run_all(core, [request(f"r{i}", [i + 1], max_tokens=2, ignore_eos=True) for i in range(9)])
    refused = {name for name, outs in outputs.items() if outs[-1].overloaded}
    assert refused == {"r5", "r6", "r7", "r8"}
    assert all(outputs[name][-1].finish_reason == "length" for name in set(outputs) - refused)


@in_both_orders
def test_an_id_in_use_is_refused(make_core):
    core = make_core()
    core.add(request("a", [1]))
    with pytest.raises(ValueError, match="'a' is in use"):
        core.add(request("a", [1]))
