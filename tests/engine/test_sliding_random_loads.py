"""Random loads on a model with sliding layers: the answers of uniform pages, whatever is freed or preempted."""

import random
from functools import cache

import pytest

from tests.engine.requests import request, tokens_of
from tests.engine.windowed import windowed_core

LOADS = {
    "few pages": {"num_pages": 14, "max_num_seqs": 4},
    "few pages, no cache": {"num_pages": 14, "max_num_seqs": 6, "enable_prefix_caching": False},
    "small chunks": {"num_pages": 17, "max_num_seqs": 6, "max_num_batched_tokens": 7},
    "pages of a token": {"num_pages": 46, "page_size": 1, "max_num_seqs": 5, "max_num_batched_tokens": 5},
    "window in a page": {"num_pages": 12, "max_num_seqs": 4, "max_num_batched_tokens": 6, "window": 3},
    "roomy": {"num_pages": 200},
}


def random_requests(rng, count):
    """(step of its arrival, request, number of its tokens after which it is aborted or None) of each."""
    shared = [rng.randrange(97) for _ in range(40)]
    asked = []
    for index in range(count):
        own = [rng.randrange(97) for _ in range(rng.choice([1, 2, 5, 9]))]
        prompt = shared[: rng.choice([0, 0, 8, 13, 24, 36, 40])] + own
        sampling = rng.choice([{}, {"temperature": 0.9, "seed": index}, {"prompt_logprobs": 1}])
        max_tokens = min(rng.choice([1, 3, 19, 45]), 68 - len(prompt))
        item = request(f"r{index}", prompt, max_tokens=max_tokens, ignore_eos=True, **sampling)
        asked.append((rng.randrange(40), item, rng.choice([None, None, None, 0, 1, 5])))
    return asked


def play(core, asked):
    """Tokens, prompt log-probabilities and finish reason of each request."""
    outputs = {item.request_id: [] for _, item, _ in asked}
    arrivals = sorted(asked, key=lambda entry: entry[0])
    begun = {}
    for step in range(5000):
        while arrivals and arrivals[0][0] <= step:
            _, item, limit = arrivals.pop(0)
            core.add(item)
            begun[item.request_id] = limit
        if not arrivals and not core.has_work:
            break
        for output in core.step():
            outputs[output.request_id].append(output)
        for name, limit in begun.items():
            if limit is not None and len(tokens_of(outputs[name])) >= limit:
                core.abort(name)
    else:
        raise AssertionError("not idle after 5000 steps")
    return {
        name: (tokens_of(got), [o.prompt_logprobs for o in got if o.prompt_logprobs], got[-1].finish_reason)
        for name, got in outputs.items()
    }


@cache
def uniform_answers(seed, window):
    """With uniform pages and room for all, one order of steps: the model alone decides them."""
    core, _ = windowed_core(is_uniform=True, overlap=False, num_pages=300, window=window)
    return play(core, random_requests(random.Random(seed), 20))


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("load", LOADS)
def test_answers_are_those_of_uniform_pages(load, overlap):
    settings = LOADS[load]
    counts = {"preemptions": 0, "cached": 0, "slid": 0}
    for seed in range(3):
        asked = random_requests(random.Random(seed), 20)
        core, guard = windowed_core(overlap=overlap, **settings)
        got = play(core, asked)
        stats = core.stats()
        assert (stats.num_pages_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert guard.pages.num_available == core.info.num_pages
        counts["preemptions"] += stats.num_preemptions
        counts["cached"] += stats.num_cached_tokens
        counts["slid"] += guard.num_slid
        want = uniform_answers(seed, settings.get("window", 9))
        for _, item, limit in asked:
            mine, its = got[item.request_id], want[item.request_id]
            if limit is None:
                assert mine == its
            else:  # an abort comes some steps earlier or later
                shared = min(len(mine[0]), len(its[0]))
                assert mine[0][:shared] == its[0][:shared]
            assert mine[2] in ("length", "abort")
    assert counts["slid"] > 0
    assert (counts["preemptions"] > 0) == (load != "roomy")
    assert (counts["cached"] > 0) == settings.get("enable_prefix_caching", True)
