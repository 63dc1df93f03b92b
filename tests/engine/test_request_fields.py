"""Priorities within a client, salts of the prefix cache, and log-probabilities of tokens that a request lists."""

import math

import pytest
import torch
from msgspec.structs import replace

from engine.errors import RequestError
from engine.sampler import launch_sampling
from engine.types import EngineRequest, SamplingParams
from engine.validate import RequestLimits, check_request
from tests.engine.fakes import FakeModel, fake_core
from tests.engine.requests import request, run_all, tokens_of
from tests.engine.test_sampler import LOGITS, make
from tests.tables import rows

LIMITS = RequestLimits(vocab_size=97, max_model_len=256, num_kv_tokens=256)


def ends_of(core, requests):
    """Ids in the order in which their requests end."""
    for item in requests:
        core.add(item)
    ends = []
    while core.has_work:
        ends += [output.request_id for output in core.step() if output.finish_reason]
    return ends


def asked(name, priority=0, path=("", ""), prompt=(1, 2, 3), max_tokens=8, salt=""):
    client, connection = path
    return replace(
        request(name, prompt, max_tokens), priority=priority, client=client, connection=connection, cache_salt=salt
    )


def order_of(*requests, **settings):
    """Names in the order in which answers begin, one place at a time."""
    core = fake_core(FakeModel(eos_token_ids=()), **{"max_num_seqs": 1, **settings})
    return list(run_all(core, requests))


@rows(
    "requests, order",
    ([asked("late", 5), asked("soon", -1), asked("mid")], ["soon", "mid", "late"]),
    ([asked("one", 1), asked("two", 1)], ["one", "two"]),
    (  # over several connections, too
        [asked("late", 5, ("a", "1")), asked("soon", 0, ("a", "2")), asked("mid", 3, ("a", "3"))],
        ["soon", "mid", "late"],
    ),
    (  # another client's numbers do not count: its request came in between, and keeps its turn
        [asked("late", 9, ("a", "1")), asked("other", 7, ("b", "1")), asked("soon", 0, ("a", "2"))],
        ["other", "soon", "late"],
    ),
)
def test_lower_numbers_run_first_within_a_client(requests, order):
    assert order_of(*requests) == order


def test_a_shortage_of_pages_pauses_the_least_urgent():
    """The oldest of three gives way, since the others are more urgent, and nobody's tokens change."""
    requests = [asked(name, number, max_tokens=40) for name, number in (("late", 5), ("soon", 0), ("mid", 0))]
    alone = {each.request_id: tokens_of(run_all(fake_core(), [each])[each.request_id]) for each in requests}
    core = fake_core(num_pages=24)
    outputs = run_all(core, requests)
    assert core.stats().num_preemptions
    assert {name: tokens_of(each) for name, each in outputs.items()} == alone
    assert ends_of(fake_core(num_pages=24), requests)[-1] == "late"


def test_an_urgent_request_is_not_paused_for_one_that_would_run_after_it():
    """Two connections of a client: the waiting one runs less, but is less urgent. It would be overtaken at once."""
    core = fake_core(FakeModel(eos_token_ids=()), max_num_seqs=3)
    busy = [asked(f"busy{number}", 0, ("a", "1"), max_tokens=20) for number in range(3)]
    assert ends_of(core, [*busy, asked("idle", 1, ("a", "2"), max_tokens=2)])[-1] == "idle"
    assert core.stats().num_preemptions == 0


@rows(
    "salts, num_cached",
    (("", ""), 12),
    (("a", "a"), 12),
    (("a", "b"), 0),
    (("", "a"), 0),
)
def test_cached_pages_are_shared_by_requests_with_one_salt(salts, num_cached):
    core = fake_core()
    for name, salt in zip("xy", salts, strict=True):
        outputs = run_all(core, [asked(name, prompt=range(1, 14), salt=salt)])
    assert outputs["y"][0].num_cached_tokens == num_cached


@rows("temperature", 0.0, 1.0)
def test_listed_tokens_are_the_alternatives(temperature):
    """In the order asked for; other rows keep their best ones. A bias changes the choice, not these numbers."""
    seqs = [
        make(temperature=temperature, logprobs=0, logprob_token_ids=(4, 0), logit_bias={1: 100.0}),
        make(temperature=temperature, logprobs=2),
        make(temperature=temperature, logprobs=0, logprob_token_ids=(3,)),
        make(temperature=temperature),
    ]
    first, second, third, fourth = launch_sampling(LOGITS.repeat(4, 1), seqs).read().logprobs
    expected = torch.log_softmax(LOGITS, 0).tolist()
    assert first.token_id == 1
    assert math.isclose(first.logprob, expected[1], rel_tol=1e-5)
    for entry, ids in ((first, [4, 0]), (second, [2, 0]), (third, [3])):
        assert [token for token, _ in entry.top] == ids
        assert all(math.isclose(value, expected[token], rel_tol=1e-5) for token, value in entry.top)
    assert fourth is None


@rows(
    "sampling",
    {"logprob_token_ids": (1,)},
    {"logprob_token_ids": (97,), "logprobs": 0},
    {"logprob_token_ids": (-1,), "logprobs": 0},
    {"logprob_token_ids": tuple([1] * 129), "logprobs": 0},
)
def test_lists_that_cannot_be_answered_are_refused_by_name(sampling):
    item = EngineRequest(request_id="a", prompt_ids=[1], sampling=SamplingParams(max_tokens=1, **sampling))
    with pytest.raises(RequestError) as caught:
        check_request(item, LIMITS)
    assert caught.value.param == "logprob_token_ids"
