"""Penalties count exactly the tokens of their own request: through preemption, reused rows, cached prefixes, aborts.

The model is a hash of the tokens before, so what it answers to one request alone is worked out here without an engine.
"""

import random
from collections import Counter

import numpy as np
import pytest

from tests.engine.fakes import _PRIME, FakeModel, fake_core, in_both_orders
from tests.engine.requests import request, tokens_of

MAX_LEN = 96
LOADS = [
    {"num_pages": 25, "max_num_seqs": 4},
    {"num_pages": 25, "max_num_seqs": 8, "enable_prefix_caching": False, "max_num_batched_tokens": 9},
    {"num_pages": 97, "page_size": 1, "max_num_seqs": 3},
]


def greedy_answer(model, item):
    """The answer by definition: one request, counted afresh before each token."""
    sampling, prompt, output = item.sampling, item.prompt_ids, []
    value = 7
    for token in prompt:
        value = (value * 31 + token + 1) % _PRIME
    while len(output) < sampling.max_tokens:
        logits = model._logits((value, False))
        met = np.zeros(len(logits), dtype=bool)
        met[[*prompt, *output]] = True
        if sampling.repetition_penalty != 1.0:
            factor = np.float32(sampling.repetition_penalty)
            logits = np.where(met, np.where(logits > 0, logits / factor, logits * factor), logits)
        for token, count in Counter(output).items():
            logits[token] -= np.float32(sampling.frequency_penalty) * np.float32(count)
            logits[token] -= np.float32(sampling.presence_penalty)
        output.append(int(logits.argmax()))
        value = (value * 31 + output[-1] + 1) % _PRIME
    return output


def random_requests(rng, count):
    """Penalized and plain requests; several share a prompt, as the choices of one `n` do."""
    asked = []
    while len(asked) < count:
        length = rng.choice([1, 4, 9, 20])
        prompt = [rng.randrange(97) for _ in range(length)]
        kind = {
            "frequency_penalty": rng.choice([0.0, 0.5, 2.0, -0.25]),
            "presence_penalty": rng.choice([0.0, 0.75]),
            "repetition_penalty": rng.choice([1.0, 1.0, 1.5, 0.5]),
            "logprobs": rng.choice([None, 1]),
        }
        for _ in range(rng.choice([1, 3])):
            name = f"r{len(asked)}"
            asked.append(request(name, prompt, rng.choice([3, 30, 70]), ignore_eos=True, **kind))
    return asked


def play(core, asked, aborted_at):
    """Tokens per request; some are aborted after a number of tokens, so that others get their rows."""
    tokens = {item.request_id: [] for item in asked}
    waiting = list(asked)
    while waiting or core.has_work:
        for item in waiting[:2]:
            core.add(item)
        del waiting[:2]
        for output in core.step():
            tokens[output.request_id] += tokens_of([output])
        for name, limit in aborted_at.items():
            if len(tokens[name]) >= limit:
                core.abort(name)
    return tokens


@pytest.mark.parametrize("settings", LOADS, ids=["few pages", "small chunks, no cache", "pages of a token"])
@in_both_orders
def test_every_token_is_the_one_of_a_request_that_is_alone(make_core, settings):
    num_preemptions = 0
    for seed in range(3):
        rng = random.Random(seed)
        model = FakeModel(vocab_size=97, max_model_len=MAX_LEN, sharpness=1.0)
        core = make_core(model, **settings)
        asked = random_requests(rng, 20)
        aborted_at = {item.request_id: rng.randrange(1, 20) for item in asked if rng.random() < 0.25}
        for name, tokens in play(core, asked, aborted_at).items():
            item = next(item for item in asked if item.request_id == name)
            want = greedy_answer(model, item)
            assert tokens == (want[: len(tokens)] if name in aborted_at else want), (seed, name)
        num_preemptions += core.stats().num_preemptions
    assert num_preemptions > 20


def test_the_penalties_of_these_requests_matter():
    model = FakeModel(max_model_len=MAX_LEN, sharpness=1.0)
    plain = request("a", [5, 6], 70, ignore_eos=True)
    penalized = request("a", [5, 6], 70, ignore_eos=True, frequency_penalty=0.5)
    assert greedy_answer(model, plain) != greedy_answer(model, penalized)
    core = fake_core(model)
    core.add(penalized)
    tokens = []
    while core.has_work:
        tokens += tokens_of(core.step())
    assert tokens == greedy_answer(model, penalized)
