"""Overlapped steps: the answers of the plain order under random load, and work for the device before the host knows."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.runner import Pending
from engine.step import LATE_ID
from tests.engine.fakes import FakeModel, fake_core, in_both_orders
from tests.engine.requests import request, run_all, tokens_of
from tests.tables import rows

SAMPLED = {"temperature": 0.9, "top_p": 0.95}
KINDS = [
    {},
    {"logprobs": 2},
    SAMPLED,
    SAMPLED | {"presence_penalty": 1.2, "frequency_penalty": 0.4, "repetition_penalty": 1.3, "logprobs": 0},
    {"frequency_penalty": 0.7},
    {"prompt_logprobs": 1},
    SAMPLED | {"prompt_logprobs": 0, "logprobs": 1},
    {"logit_bias": {5: 4.0, 9: -100.0}},
]


def even_then_odd(output_ids):
    """Even and odd ids in turn: needs the token before."""
    return np.arange(97) % 2 == (output_ids[-1] + 1) % 2 if output_ids else None


def random_requests(rng, count):
    """(step of its arrival, request, logit mask, number of its tokens after which it is aborted or None) of each."""
    asked = []
    for index in range(count):
        stops = {"min_tokens": rng.choice([0, 0, 4]), "stop_token_ids": tuple(rng.sample(range(97), 12))}
        kind = rng.choice(KINDS) | {"seed": rng.randrange(100)} | rng.choice([{"ignore_eos": True}, stops])
        length = rng.choice([1, 3, 4, 5, 9, 17, 30])
        prompt = [rng.randrange(4)] * length if rng.random() < 0.5 else [rng.randrange(97) for _ in range(length)]
        item = request(f"r{index}", prompt, max_tokens=rng.choice([1, 2, 7, 20, 33]), **kind)
        mask = even_then_odd if rng.random() < 0.25 else None
        asked.append((rng.randrange(40), item, mask, rng.choice([None, None, None, 0, 1, 5])))
    return asked


def play(core, asked):
    """Outputs per request; requests arrive and are aborted as `asked` says."""
    outputs = {item.request_id: [] for _, item, _, _ in asked}
    aborts = {item.request_id: limit for _, item, _, limit in asked if limit is not None}
    arrivals = sorted(asked, key=lambda entry: entry[0])
    for step in range(5000):
        while arrivals and arrivals[0][0] <= step:
            _, item, mask, _ = arrivals.pop(0)
            core.add(item, mask)
        if not arrivals and not core.has_work:
            return outputs
        for output in core.step():
            outputs[output.request_id].append(output)
        for name, limit in aborts.items():
            if any(item.request_id == name for _, item, _, _ in arrivals):
                continue
            if len(tokens_of(outputs[name])) >= limit:
                core.abort(name)
    raise AssertionError("not idle after 5000 steps")


def answer(outputs):
    """Everything that a client sees of a request, whatever the steps its tokens came in."""
    assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    last = outputs[-1]
    logprobs = [entry for output in outputs for entry in output.logprobs or []]
    prompts = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    return tokens_of(outputs), logprobs, prompts, last.finish_reason, last.stop_reason, last.error


LOADS = [
    {"num_pages": 17, "max_num_seqs": 4},
    {"num_pages": 17, "max_num_seqs": 6, "enable_prefix_caching": False, "max_num_batched_tokens": 7},
    {"num_pages": 68, "page_size": 1, "max_num_seqs": 5, "max_num_batched_tokens": 5},
    {"num_pages": 200},
]


@pytest.mark.timeout(300)  # 4 random loads for each row, in both orders
@rows("settings", *LOADS)
def test_a_random_load_gets_the_same_answers_in_both_orders(settings):
    num_preemptions = [0, 0]
    for seed in range(4):
        asked = random_requests(random.Random(seed), 24)
        answers = []
        for overlap in (False, True):
            core = fake_core(FakeModel(max_model_len=68), overlap=overlap, **settings)
            answers.append({name: answer(outputs) for name, outputs in play(core, asked).items()})
            stats = core.stats()
            num_preemptions[overlap] += stats.num_preemptions
            assert (stats.num_pages_used, stats.num_running, stats.num_waiting, core.has_work) == (0, 0, 0, False)
        for _, item, _, limit in asked:
            plain, overlapped = (by_name[item.request_id] for by_name in answers)
            if limit is None or "abort" not in (plain[3], overlapped[3]):
                assert overlapped == plain
            else:  # an abort comes a step earlier or later
                shared = min(len(plain[0]), len(overlapped[0]))
                assert overlapped[0][:shared] == plain[0][:shared]
    assert all(num_preemptions) == (settings["num_pages"] < 200)


class StepRecorder:
    """Keeps the steps that a core launches."""

    def __init__(self, core):
        self.steps = []
        launch = core._runner.launch

        def record(step):
            self.steps.append(step)
            return launch(step)

        core._runner.launch = record


def test_a_step_is_launched_before_the_token_it_reads_is_known():
    core = fake_core(overlap=True)
    record = StepRecorder(core)
    core.add(request("a", [5, 6], max_tokens=4, ignore_eos=True))
    assert core.step() == []
    assert tokens_of(core.step()), "the first token comes with the second step"
    assert [step.input_ids.tolist() for step in record.steps] == [[5, 6], [LATE_ID]]
    run_all(core)
    assert len(record.steps) == 4, "the last of four tokens is not fed: its step is known to be the last"


def test_a_stop_token_costs_one_more_step_and_no_more():
    free = tokens_of(run_all(fake_core(), [request("a", [9, 8], max_tokens=30, ignore_eos=True)])["a"])
    core = fake_core(overlap=True)
    record = StepRecorder(core)
    outputs = run_all(core, [request("a", [9, 8], max_tokens=30, stop_token_ids=(free[5],))])["a"]
    num_tokens = free.index(free[5]) + 1
    assert tokens_of(outputs) == free[:num_tokens]
    assert len(record.steps) == num_tokens + 1
    assert core.stats().num_generated_tokens == num_tokens


def test_an_id_is_free_while_the_last_step_of_an_aborted_request_runs():
    core = fake_core(overlap=True)
    core.add(request("a", [5, 6], max_tokens=9, ignore_eos=True))
    core.step()
    core.abort("a")
    core.add(request("a", [7], max_tokens=3, ignore_eos=True))
    outputs = run_all(core)["a"]
    assert [output.finish_reason for output in outputs] == ["abort", None, None, "length"]
    alone = run_all(fake_core(), [request("a", [7], max_tokens=3, ignore_eos=True)])["a"]
    assert tokens_of(outputs) == tokens_of(alone)


def test_the_next_step_never_reads_an_id_outside_the_vocabulary():
    """A row without a token is dropped one step later. Until then a GPU looks its id up, and a wrong one ends it."""
    core = fake_core(FakeModel(nan_after=42), overlap=True)
    outputs = run_all(core, [request("bad", [7, 42], ignore_eos=True), request("good", [1, 2], ignore_eos=True)])
    assert outputs["bad"][-1].finish_reason == "error"
    assert core._runner.tokens_M.min() >= 0


def test_a_mask_is_made_on_the_host_while_the_next_pass_runs():
    """A grammar needs token n to say what token n+1 may be; pass n+1 is launched before it is asked."""
    model = FakeModel()
    core = fake_core(model, overlap=True)
    calls_when_asked, asked_with = [], []

    def mask(output_ids):
        calls_when_asked.append(model.num_calls)
        asked_with.append(list(output_ids))
        return even_then_odd(output_ids)

    first_call = model.num_calls
    core.add(request("a", [5, 6], max_tokens=6, ignore_eos=True), mask)
    tokens = tokens_of(run_all(core)["a"])
    assert calls_when_asked == [first_call + 1 + n for n in range(6)], "pass n is launched when mask n is made"
    assert asked_with == [tokens[:n] for n in range(6)], "and it sees every token before"
    parities = [token % 2 for token in tokens]
    assert all(before != after for before, after in pairwise(parities))
    plain = fake_core(FakeModel(), overlap=False)
    plain.add(request("a", [5, 6], max_tokens=6, ignore_eos=True), even_then_odd)
    assert tokens_of(run_all(plain)["a"]) == tokens


@in_both_orders
def test_a_mask_that_forbids_everything_fails_its_request_alone(make_core):
    core = make_core()
    core.add(request("stuck", [5], max_tokens=6, ignore_eos=True), lambda ids: np.full(97, len(ids) < 2))
    core.add(request("fine", [7], max_tokens=6, ignore_eos=True))
    outputs = run_all(core)
    assert len(tokens_of(outputs["stuck"])) == 2
    assert outputs["stuck"][-1].finish_reason == "error"
    assert outputs["fine"][-1].finish_reason == "length"


@in_both_orders
def test_a_mask_that_raises_fails_its_request_alone(make_core):
    def broken(ids):
        if len(ids) == 3:
            raise RuntimeError("a bug in a grammar")
        return None

    core = make_core()
    core.add(request("bad", [5], max_tokens=6, ignore_eos=True), broken)
    core.add(request("fine", [7], max_tokens=6, ignore_eos=True))
    outputs = run_all(core)
    assert outputs["bad"][-1].finish_reason == "error"
    assert len(tokens_of(outputs["bad"])) == 3
    alone = run_all(make_core(), [request("fine", [7], max_tokens=6, ignore_eos=True)])["fine"]
    assert tokens_of(outputs["fine"]) == tokens_of(alone)


@in_both_orders
@rows("settings", *(LOADS[:2]))
@rows("method", "sample", "collect")
def test_steps_that_fail_late_are_computed_again(make_core, monkeypatch, method, settings):
    """A step of several requests that fails when it is sampled or collected; another may be launched by then."""
    asked = [entry for entry in random_requests(random.Random(3), 24) if entry[3] is None]
    want = {name: answer(outputs) for name, outputs in play(make_core(**settings), asked).items()}
    core = make_core(**settings)
    original, num_failures = getattr(Pending, method), 0

    def fail_often(pending, *args, **kwargs):
        nonlocal num_failures
        if len(pending.step.rows) > 1 and random.Random(len(pending.step.positions)).random() < 0.5:
            num_failures += 1
            raise RuntimeError("not all at once")
        return original(pending, *args, **kwargs)

    monkeypatch.setattr(Pending, method, fail_often)
    got = {name: answer(outputs) for name, outputs in play(core, asked).items()}
    assert num_failures > 3
    assert got == want
    assert core.stats().num_pages_used == 0


class SmallModel(FakeModel):
    """Has memory for `limit` tokens a step."""

    limit = 10**9

    def __call__(self, batch, plan, kv):
        if batch.num_tokens > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().__call__(batch, plan, kv)


@in_both_orders
@rows("limit", 1, 2, 3, 5, 9)
def test_a_step_without_memory_is_tried_again_with_half_of_its_tokens(make_core, limit):
    asked = [request(f"r{n}", range(1, 12 + n), 9, ignore_eos=True, **SAMPLED, seed=n) for n in range(7)]
    want = {name: answer(outputs) for name, outputs in run_all(make_core(), asked).items()}
    model = SmallModel()
    core = make_core(model)
    model.limit = limit
    got = {name: answer(outputs) for name, outputs in run_all(core, asked).items()}
    assert got == want
    assert core.stats().num_pages_used == 0


def test_the_budget_is_lower_for_a_while_after_a_step_without_memory():
    model = SmallModel()
    core = fake_core(model)
    record = StepRecorder(core)
    model.limit = 9
    run_all(core, [request("a", range(40), 1)])
    assert [len(step.input_ids) for step in record.steps] == [16, 8, 8, 8, 8, 8], "only the first one was too large"
    run_all(core, [request("b", [1], 58, ignore_eos=True)])
    record.steps.clear()
    model.limit = 100
    run_all(core, [request("c", range(50, 90), 1)])
    assert [len(step.input_ids) for step in record.steps] == [8, 16, 16], "64 steps later the budget is doubled"


@in_both_orders
def test_a_request_that_never_fits_in_memory_fails_alone(make_core):
    class Greedy(FakeModel):
        def __call__(self, batch, plan, kv):
            if (batch.input_ids_T == 42).any():
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().__call__(batch, plan, kv)

    core = make_core(Greedy())
    outputs = run_all(core, [request("bad", [42, 1]), request("good", [1, 2])])
    assert outputs["bad"][-1].finish_reason == "error"
    assert tokens_of(outputs["good"]) == tokens_of(run_all(make_core(), [request("good", [1, 2])])["good"])


@in_both_orders
def test_an_error_of_the_device_ends_the_engine(make_core):
    class Broken(FakeModel):
        def __call__(self, batch, plan, kv):
            if (batch.input_ids_T == 42).any():
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered", -1)
            return super().__call__(batch, plan, kv)

    core = make_core(Broken())
    core.add(request("bad", [42, 1]))
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        core.step()
