"""Choosing tokens: filters, penalties, log-probabilities, and draws that depend on seed and index alone."""

import math
from collections import Counter

import pytest
import torch

from engine.counter_rng import uniform
from engine.filters import filter_probs
from engine.sampler import Sampled, launch_sampling
from engine.sequence import GREEDY_TEMPERATURE, Sequence
from tests.engine.requests import request
from tests.tables import rows

LOGITS = torch.tensor([2.0, 1.0, 3.0, 0.0, -1.0])
PROBS = torch.softmax(LOGITS, 0).tolist()


def sample(logits: torch.Tensor, seqs: list[Sequence]) -> Sampled:
    return launch_sampling(logits, seqs).read()


def make(prompt=(0,), output=(), seed=1, stop_ids=(), max_tokens=1000, **sampling):
    sampling.setdefault("temperature", 1.0)
    item = request("a", prompt, max_tokens, **sampling)
    seq = Sequence(item, stop_ids=frozenset(stop_ids), seed=seed)
    seq.token_ids += output
    return seq


def choose(*seqs, logits=LOGITS):
    return sample(logits.repeat(len(seqs), 1), list(seqs))


def support(num=400, **sampling):
    """Tokens that come up in many draws, with their frequencies."""
    tokens = choose(*(make(seed=seed, **sampling) for seed in range(num))).tokens
    return {token: count / num for token, count in Counter(tokens).items()}


def test_greedy_takes_the_best_and_the_first_of_equals():
    assert choose(make(temperature=0.0)).tokens == [2]
    assert choose(make(temperature=0.0), logits=torch.tensor([1.0, 5.0, 5.0])).tokens == [1]
    assert choose(make(temperature=0.0, logprobs=0), logits=torch.tensor([1.0, 5.0, 5.0])).tokens == [1]
    [wanted, other] = choose(make(temperature=0.0, logprobs=2), make(temperature=0.0)).logprobs
    assert (wanted.token_id, [token for token, _ in wanted.top]) == (2, [2, 0])
    assert other is None


@rows("logprobs", None, 0)
def test_the_greedy_temperature_itself_draws_nothing(logprobs):
    """Of equals the first comes, whatever the seed; a draw would find the second one, too."""
    equals = torch.tensor([1.0, 5.0, 5.0])
    seqs = [make(temperature=GREEDY_TEMPERATURE, seed=seed, logprobs=logprobs) for seed in range(20)]
    assert set(choose(*seqs, logits=equals).tokens) == {1}
    warmer = [make(temperature=2 * GREEDY_TEMPERATURE, seed=seed, logprobs=logprobs) for seed in range(20)]
    assert set(choose(*warmer, logits=equals).tokens) == {1, 2}


def test_draws_follow_the_probabilities():
    frequencies = support(4000)
    for token, probability in enumerate(PROBS):
        deviation = math.sqrt(probability * (1 - probability) / 4000)
        assert abs(frequencies[token] - probability) < 4 * deviation


def test_temperature_sharpens_and_flattens():
    assert support(temperature=0.01) == {2: 1.0}
    flat = support(2000, temperature=50.0)
    assert min(flat.values()) > 0.15


def test_filters_keep_a_head_of_the_sorted_tokens():
    for sampling, kept in [
    ({"top_k": 1}, {2}),
    ({"top_k": 2}, {2, 0}),
    ({"top_k": 99}, {0, 1, 2, 3, 4}),
    ({"top_p": 1e-9}, {2}),
    ({"top_p": 0.63}, {2}),  # the best has 0.636
    ({"top_p": 0.65}, {2, 0}),
    ({"top_p": 0.90}, {2, 0, 1}),
    ({"min_p": 1.0}, {2}),
    ({"min_p": 0.3}, {2, 0}),  # e**-1 is 0.37
    ({"top_k": 3, "top_p": 0.71}, {2, 0}),  # of the three best, the best two have 0.91 and the best 0.67
    ({"top_k": 3, "top_p": 0.92}, {2, 0, 1}),
    ({"min_p": 0.1, "top_p": 0.5}, {2}),
]:  # fmt: skip
        assert set(support(600, **sampling)) == kept, (sampling, kept)


def test_equals_at_top_k_and_at_min_p_one():
    tokens = choose(*(make(seed=s, top_k=2) for s in range(200)), logits=torch.ones(6)).tokens
    assert set(tokens) == {0, 1}
    probs = torch.tensor([[0.25, 0.375, 0.375, 0.0]])
    assert filter_probs(probs, [make(min_p=1.0)]).tolist() == [[0.0, 0.375, 0.375, 0.0]]


def naive_filter(probs, top_k, top_p, min_p):
    """The definition, one row, in Python floats."""
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))[: top_k or len(probs)]
    total, mass, kept = sum(probs[i] for i in order), 0.0, []
    for token in order:
        if kept and (mass >= top_p * total or probs[token] < min_p * probs[order[0]]):
            break
        kept.append(token)
        mass += probs[token]
    return set(kept)


@rows("spread", 0.0, 0.3, 3.0)
@rows("vocab_size", 5, 255, 256, 257, 1000)
def test_filters_agree_with_their_definition(spread, vocab_size):
    rules = [{"top_k": k} for k in (1, 3, 255, 256, 257, 999, 5000)] + [{"top_p": p} for p in (0.01, 0.5, 0.9, 0.97)]
    rules += [{"min_p": p} for p in (0.01, 0.6)] + [
        {"top_k": 300, "top_p": 0.8},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.3},
    ]
    logits = torch.randn(len(rules), vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * spread
    logits = (logits * 16).round() / 16  # many equal ones
    probs = torch.softmax(logits, dim=-1)
    kept = filter_probs(probs, [make(**rule) for rule in rules]) > 0
    for row, rule in enumerate(rules):
        expected = naive_filter(
            probs[row].tolist(), rule.get("top_k", 0), rule.get("top_p", 1.0), rule.get("min_p", 0.0)
        )
        assert set(kept[row].nonzero()[:, 0].tolist()) == expected, rule


@rows("vocab_size", 5, 300)
@rows(
    "sampling, kept",
    ({"min_p": 0.5}, {0, 1, 2}),  # exactly half of the best one's probability stays
    ({"min_p": 0.5000001}, {0}),
    ({"min_p": 0.25}, {0, 1, 2}),
    ({"min_p": 1.0}, {0}),
    ({"top_p": 0.5}, {0}),  # the best one fills it exactly
    ({"top_p": 0.75}, {0, 1}),
    ({"top_p": 0.7500001}, {0, 1, 2}),
    ({"top_k": 2}, {0, 1}),  # of equals the smaller id
    ({"top_k": 2, "top_p": 0.625}, {0}),  # the best has two thirds of the two
    ({"top_k": 3, "min_p": 0.5}, {0, 1, 2}),
)
def test_exact_ties_at_the_edge_of_a_filter(vocab_size, sampling, kept):
    """Section G: `>=` or `>` decides. All numbers are exact in binary, and the rest of the vocabulary has 0."""
    probs = torch.zeros(1, vocab_size)
    probs[0, :5] = torch.tensor([0.5, 0.25, 0.25, 0.0, 0.0])
    assert set(filter_probs(probs, [make(**sampling)])[0].nonzero()[:, 0].tolist()) == kept


def test_rows_of_a_mixed_batch_are_what_they_are_alone():
    kinds = [
        {"temperature": 0.0},
        {"top_p": 0.8},
        {},
        {"top_k": 2},
        {"min_p": 0.2},
        {"temperature": 0.0, "logprobs": 2},
        {"presence_penalty": 1.0},
        {"logit_bias": {4: 5.0}},
    ]
    logits = torch.randn(len(kinds), 50, generator=torch.Generator().manual_seed(3))
    together = sample(logits.clone(), [make(seed=9, output=[4, 2], **kind) for kind in kinds]).tokens
    alone = [
        sample(logits[i : i + 1].clone(), [make(seed=9, output=[4, 2], **kind)]).tokens[0]
        for i, kind in enumerate(kinds)
    ]
    assert together == alone


def test_bias_and_penalties_change_the_choice():
    greedy = {"temperature": 0.0}
    assert choose(make(**greedy, logit_bias={4: 5.0})).tokens == [4]
    assert choose(make(**greedy, logit_bias={2: -100.0})).tokens == [0]
    assert choose(make(**greedy, logit_bias={0: 1.5})).tokens == [0]  # 2.0 and 1.5 are more than 3.0
    assert choose(make(**greedy, logit_bias={2: -0.5, 0: 0.25})).tokens == [2]
    assert choose(make(**greedy, presence_penalty=1.5, output=[2])).tokens == [0]
    assert choose(make(**greedy, presence_penalty=0.5, output=[2, 2, 2, 2])).tokens == [2]
    assert choose(make(**greedy, frequency_penalty=0.5, output=[2, 2, 2, 2])).tokens == [0]
    assert choose(make(**greedy, frequency_penalty=0.5, prompt=[2] * 9)).tokens == [2]  # the prompt does not count
    assert choose(make(**greedy, repetition_penalty=1.6, prompt=[2])).tokens == [0]  # here it does
    negative = torch.tensor([-1.0, -1.1])
    assert choose(make(**greedy, repetition_penalty=2.0, prompt=[0]), logits=negative).tokens == [1]


def test_penalties_follow_the_tokens_as_they_come():
    seq = make(temperature=0.0, frequency_penalty=0.4)
    tokens = []
    for _ in range(6):
        seq.token_ids += choose(seq).tokens
        tokens.append(seq.token_ids[-1])
    assert tokens == [2, 2, 2, 0, 2, 0]


def test_stop_ids_are_forbidden_before_min_tokens():
    assert choose(make(temperature=0.0, min_tokens=2, stop_ids=[2], output=[1])).tokens == [0]
    assert choose(make(temperature=0.0, min_tokens=2, stop_ids=[2], output=[1, 1])).tokens == [2]


def test_logprobs_are_those_of_the_raw_logits():
    seq = make(temperature=0.0, logprobs=3, logit_bias={4: 9.0})
    entry = choose(seq, make(temperature=0.7, logprobs=1), make()).logprobs
    assert entry[0].token_id == 4
    assert entry[0].logprob == pytest.approx(math.log(PROBS[4]), abs=1e-6)
    assert [token for token, _ in entry[0].top] == [2, 0, 1]
    assert [value for _, value in entry[0].top] == pytest.approx([math.log(PROBS[i]) for i in (2, 0, 1)], abs=1e-6)
    assert len(entry[1].top) == 1
    assert entry[2] is None
    assert [len(e.top) for e in choose(make(logprobs=1), make(logprobs=4), make(logprobs=0)).logprobs] == [1, 4, 0]
    assert choose(make(logprobs=0)).logprobs[0].top == []
    assert len(choose(make(logprobs=9)).logprobs[0].top) == len(PROBS)


@rows("sampling", {"temperature": 0.0}, {}, {"top_p": 0.5, "logprobs": 1})
@rows("bad", math.nan, math.inf)
def test_a_row_that_is_not_finite_has_no_token(sampling, bad):
    logits = torch.stack([LOGITS, LOGITS, LOGITS])
    logits[1, 3] = bad
    tokens = sample(logits, [make(seed=5, **sampling) for _ in range(3)]).tokens
    assert tokens[1] is None
    assert tokens[0] == tokens[2] == choose(make(seed=5, **sampling)).tokens[0]


@rows("sampling", {"temperature": 0.0}, {}, {"top_p": 0.5, "logprobs": 1})
def test_a_row_with_every_token_masked_has_no_token(sampling):
    logits = torch.stack([LOGITS, torch.full_like(LOGITS, -math.inf)])
    assert sample(logits, [make(seed=5, **sampling) for _ in range(2)]).tokens[1] is None


def test_masked_logits_are_fine_and_never_chosen():
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    assert set(choose(*(make(seed=s) for s in range(100)), logits=logits).tokens) == {1, 3}


@rows("rule", {"repetition_penalty": 0.01}, {"temperature": 0.1})
@rows("sampling", {}, {"top_p": 0.5}, {"temperature": 0.0}, {"logprobs": 2}, {"temperature": 1e-4})
def test_logits_that_a_rule_drives_to_infinity_choose_no_id_beyond_the_vocabulary(rule, sampling):
    """An infinity became a NaN, and its draw the id after the last; on a GPU that ends the process."""
    logits = torch.tensor([3e38, 1.0, 2e37, 0.0, -1.0])
    sampled = choose(*(make(prompt=(0, 2), seed=seed, **{**rule, **sampling}) for seed in range(20)), logits=logits)
    assert set(sampled.tokens) <= {0, 2}


def test_draws_are_uniform_and_know_only_seed_and_index():
    values = [uniform(seed, index) for seed in range(40) for index in range(100)]
    assert uniform(3, 7) == values[307]
    assert len(set(values)) == len(values)
    assert 0 <= min(values) < 0.01
    assert 0.99 < max(values) < 1
    assert abs(sum(values) / len(values) - 0.5) < 0.02
    assert uniform(-1, 0) != uniform(0, 0)
    shifted = {uniform(4, index) for index in range(50)} & {uniform(5, index) for index in range(50)}
    assert not shifted


@rows(
    "seed, index, number",
    (0, 0, "0x1.4e0dba5e9a32ep-1"), (0, 1, "0x1.6705460be8828p-1"), (1, 0, "0x1.7906ac21d0e58p-2"),
    (-1, 0, "0x1.77082a9eca89cp-2"), (2**63 - 1, 100, "0x1.777c196222718p-3"),
)  # fmt: skip
def test_a_seed_means_the_same_in_every_version(seed, index, number):
    """Answers to a seed are kept in users' own tests: the sequence of draws must not change."""
    assert uniform(seed, index).hex() == number


def test_the_largest_draw_chooses_a_possible_token(monkeypatch):
    monkeypatch.setattr("engine.sampler.uniform", lambda seed, index: 1 - 2.0**-52)
    logits = torch.full((1, 1000), 0.1)
    logits[0, 600:] = -math.inf
    assert sample(logits, [make()]).tokens == [599]
