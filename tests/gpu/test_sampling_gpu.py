"""The sampling kernels on a card, at the vocabulary sizes of real models, against torch; and that nothing waits."""

import numpy as np
import pytest
import torch

from engine.counter_rng import uniform
from engine.filters import filter_probs
from engine.gpu_sampler import GpuSampler
from engine.logits import process_logits
from engine.sampler import launch_sampling
from engine.sequence import Sequence
from tests.engine.requests import request
from tests.gpu.common import no_waiting

pytestmark = pytest.mark.gpu

SIZES = [97, 4096, 129_280, 201_088]
NEAR = 1e-5  # of the whole mass: rounding moves a border between two tokens by less
RULES = [
    {}, {"top_k": 1}, {"top_k": 40}, {"top_k": 3000}, {"top_p": 1e-9}, {"top_p": 0.95}, {"top_p": 0.9999},
    {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9, "min_p": 0.02}, {"top_k": 5000, "top_p": 0.5}, {"temperature": 1e-4},
    {"temperature": 50.0, "top_p": 0.3}, {"temperature": 0.6, "top_p": 0.95},
]  # fmt: skip


def make(index, output=(), seed=1, mask=None, **sampling):
    sampling.setdefault("temperature", 1.0)
    item = request(f"r{index}", [0, 1, 1, 5], 1000, **sampling)
    seq = Sequence(item, stop_ids=frozenset(), seed=seed, logit_mask=mask)
    seq.token_ids += output
    return seq


def spread_logits(num_rows, vocab_size, spread):
    """Normal logits; with spread 3 a few hundred tokens have most of the probability, with 0 all are equals."""
    g = torch.Generator("cuda").manual_seed(vocab_size)
    return torch.randn(num_rows, vocab_size, device="cuda", generator=g) * spread


def gpu_sampler(vocab_size, num_places=256):
    return GpuSampler(torch.zeros(num_places, dtype=torch.int64, device="cuda"), vocab_size)


def run(sampler, logits, seqs):
    rows = list(range(len(seqs)))
    pending = sampler.launch(logits.clone(), seqs, rows, rows)
    torch.cuda.synchronize()
    return pending.read()


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("vocab_size", SIZES)
def test_draws_are_the_lookup_that_torch_defines(vocab_size, spread):
    logits = spread_logits(1, vocab_size, spread)
    seqs = [make(i, seed=i, **RULES[i % len(RULES)]) for i in range(4 * len(RULES))]
    tokens = run(gpu_sampler(vocab_size), logits.expand(len(seqs), -1), seqs).tokens
    relative = (logits - logits.amax()).double().cpu()
    for index, rule in enumerate(RULES):
        probs = torch.softmax(relative / rule.get("temperature", 1.0), dim=-1)
        ends = filter_probs(probs, [make(0, **rule)])[0].cumsum(0).numpy()
        for row in range(index, len(seqs), len(RULES)):
            token, target = tokens[row], uniform(row, 0) * ends[-1]
            start = ends[token - 1] if token else 0.0
            assert start - NEAR <= target <= ends[token] + NEAR, (rule, row)


@pytest.mark.parametrize("vocab_size", SIZES)
def test_a_row_is_the_same_in_every_batch(vocab_size):
    kinds = [RULES[i % len(RULES)] for i in range(64)]
    logits = spread_logits(64, vocab_size, 2.0)
    together = run(gpu_sampler(vocab_size), logits, [make(i, seed=i, **kind) for i, kind in enumerate(kinds)]).tokens
    again = run(gpu_sampler(vocab_size), logits, [make(i, seed=i, **kind) for i, kind in enumerate(kinds)]).tokens
    assert together == again
    for row in range(0, 64, 9):
        alone = run(gpu_sampler(vocab_size), logits[row : row + 1], [make(row, seed=row, **kinds[row])]).tokens
        assert alone == together[row : row + 1]


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("num_rows", [1, 8, 256])
def test_greedy_takes_the_first_of_the_best(vocab_size, num_rows):
    logits = spread_logits(num_rows, vocab_size, 3.0).bfloat16().float()  # with equals
    tokens = run(gpu_sampler(vocab_size), logits, [make(i, temperature=0.0) for i in range(num_rows)]).tokens
    first = (logits == logits.amax(dim=1, keepdim=True)).int().argmax(dim=1)
    assert tokens == first.tolist()


@pytest.mark.parametrize("vocab_size", SIZES)
def test_edits_are_those_of_the_torch_path_bit_by_bit(vocab_size):
    allowed = np.arange(vocab_size) % 3 != 1
    kinds = [
        {"presence_penalty": 0.7, "frequency_penalty": 0.3, "output": [3, 3, 9]}, {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7, "output": [8], "logit_bias": {8: 2.5, 90: -3.0}}, {"mask": lambda ids: allowed},
        {"frequency_penalty": -0.3, "output": [7] * 50, "logprobs": 5},
    ]  # fmt: skip
    logits, rows = spread_logits(len(kinds), vocab_size, 3.0), list(range(len(kinds)))
    got, want = logits.clone(), logits.cpu()
    gpu_sampler(vocab_size).launch(got, [make(i, **kind) for i, kind in enumerate(kinds)], rows, rows)
    process_logits(want, [make(i, **kind) for i, kind in enumerate(kinds)])  # on a GPU torch multiplies by 1 / penalty
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_logprobs_are_those_of_torch(vocab_size, spread):
    logits = spread_logits(5, vocab_size, spread)
    kinds = [{"logprobs": 0}, {"logprobs": 20}, {"logprobs": 5, "logit_bias": {3: 9.0}}, {}, {"logprobs": 1}]
    got = run(gpu_sampler(vocab_size), logits, [make(i, seed=i, **kind) for i, kind in enumerate(kinds)])
    want = torch.log_softmax(logits.double(), dim=1).cpu()
    for row, entry in enumerate(got.logprobs):
        num_top = kinds[row].get("logprobs")
        assert (entry is None) == (num_top is None)
        if entry is not None and num_top is not None:
            assert entry.token_id == got.tokens[row]
            assert entry.logprob == pytest.approx(float(want[row, entry.token_id]), abs=1e-4)
            best = want[row].topk(num_top)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_rows_that_are_not_finite_have_no_token():
    logits = spread_logits(8, 201_088, 3.0)
    logits[1, 200_000], logits[4, 7], logits[6] = float("nan"), float("inf"), float("-inf")
    seqs = [make(i, seed=i, **({"top_p": 0.9} if i % 2 else {"temperature": 0.0})) for i in range(8)]
    tokens = run(gpu_sampler(201_088), logits, seqs).tokens
    assert [row for row, token in enumerate(tokens) if token is None] == [1, 4, 6]


def test_a_launch_neither_waits_for_the_device_nor_takes_more_memory():
    vocab_size, rows = 201_088, list(range(16))
    kinds = [*RULES, {"temperature": 0.0}, {"logprobs": 3, "frequency_penalty": 0.5}, {"logit_bias": {4: 1.0}}]
    seqs = [make(i, seed=i, **kind) for i, kind in enumerate(kinds)]
    sampler, logits = gpu_sampler(vocab_size), spread_logits(16, vocab_size, 2.0)
    for step in range(6):
        work = logits.clone()
        if step == 2:
            torch.cuda.synchronize()
            before = torch.cuda.memory_reserved()
        with no_waiting(is_on=step >= 2):
            pending = sampler.launch(work, seqs, rows, rows)
        torch.cuda.synchronize()
        for seq, token in zip(seqs, pending.read().tokens, strict=True):
            seq.token_ids.append(token)
    assert torch.cuda.memory_reserved() == before


def test_warming_up_leaves_the_places_to_the_first_requests():
    sampler, logits = gpu_sampler(4096), spread_logits(1, 4096, 3.0)
    sampler.warm_up()
    kind = {"temperature": 0.0, "frequency_penalty": 1.0, "output": [5, 5]}
    assert (
        run(sampler, logits, [make(0, **kind)]).tokens
        == launch_sampling(logits.clone(), [make(0, **kind)]).read().tokens
    )
