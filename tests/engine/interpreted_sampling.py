"""Runs the sampling kernels in Triton's interpreter against the torch path; prints what differs, by case, as JSON.

Started as a program of its own, since Triton decides when it is imported whether it compiles or interprets. Small tiles
make a row of a thousand tokens cross every border that a real one crosses: chunks, groups, a full list of candidates.
"""

import itertools
import json
import math
import random
import sys

import numpy as np
import torch

from engine import gpu_params, gpu_sample_graphs
from engine.counter_rng import uniform
from engine.gpu_sampler import GpuSampler, Tiling
from engine.logits import process_logits
from engine.sampler import Sampled, launch_sampling
from engine.sequence import Sequence
from tests.engine.fakes import FakeModel, fake_core
from tests.engine.requests import request
from tests.engine.test_overlap import answer, play, random_requests

SMALL = Tiling(chunk=256, group=16, list_size=64, block=256, max_groups=64)
SHORT_BLOCKS = Tiling(chunk=128, group=16, list_size=64, block=16, max_groups=64)
NEAR = 1e-5  # of the whole mass: a draw this close to a border between two tokens may fall on either side


def make(index=0, prompt=(0,), output=(), seed=1, stop_ids=(), mask=None, **sampling):
    sampling.setdefault("temperature", 1.0)
    item = request(f"r{index}", prompt, 1000, **sampling)
    seq = Sequence(item, stop_ids=frozenset(stop_ids), seed=seed, logit_mask=mask)
    seq.token_ids += output
    return seq


def gpu_sampler(vocab_size, num_places=64, tiling=SMALL):
    return GpuSampler(torch.zeros(num_places, dtype=torch.int64), vocab_size, tiling)


def run(sampler, logits, seqs, places=None) -> Sampled:
    rows = list(range(len(seqs)))
    return sampler.launch(logits.clone(), seqs, rows, rows if places is None else places).read()


def kept_by_definition(weights, sampling):
    """Weights as the filters leave them, in fp64, one row: sorted by weight, then id."""
    top_k, top_p, min_p = sampling.get("top_k", 0), sampling.get("top_p", 1.0), sampling.get("min_p", 0.0)
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))[: top_k or None]
    total, mass, kept = math.fsum(weights[i] for i in order), 0.0, np.zeros(len(weights))
    for place, token in enumerate(order):
        if place and ((top_p < 1 and mass >= top_p * total) or weights[token] < min_p * weights[order[0]]):
            break
        kept[token] = weights[token]
        mass += weights[token]
    return kept


def draws_off(logits, sampling, tiling=SMALL, num_draws=40):
    """Draws that are not the inverse-CDF lookup by definition, beyond rounding."""
    vocab_size = logits.shape[-1]
    seqs = [make(seed=seed, **sampling) for seed in range(num_draws)]
    tokens = run(gpu_sampler(vocab_size, num_draws, tiling), logits.expand(num_draws, -1), seqs).tokens
    temperature = np.float32(sampling.get("temperature", 1.0))
    relative = (logits - logits.max()).numpy() / temperature
    kept = kept_by_definition(np.exp(relative).astype(np.float64), sampling)
    ends = np.cumsum(kept)
    off = 0
    for seed, token in enumerate(tokens):
        target = uniform(seed, 0) * ends[-1]
        start = ends[token - 1] if token else 0.0
        off += not (kept[token] > 0 and start - NEAR * ends[-1] <= target <= ends[token] + NEAR * ends[-1])
    return off


RULES = [
    {}, {"top_k": 1}, {"top_k": 3}, {"top_k": 40}, {"top_k": 70}, {"top_k": 5000}, {"top_p": 1e-9}, {"top_p": 0.5},
    {"top_p": 0.95}, {"top_p": 0.9999}, {"min_p": 1.0}, {"min_p": 0.1}, {"min_p": 1e-6},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.3}, {"top_k": 300, "top_p": 0.8}, {"top_k": 200, "min_p": 0.2},
    {"top_p": 0.7, "min_p": 0.05}, {"temperature": 1e-4}, {"temperature": 100.0}, {"temperature": 100.0, "top_p": 0.3},
    {"temperature": 0.3, "top_p": 0.9},
]  # fmt: skip


def filter_cases(sizes, rules, tiling=SMALL, spreads=(0.0, 0.3, 3.0, 12.0)):
    """Draws off the definition: flat and peaked rows, with ties, in vocabularies around the sizes of the tiles."""
    off = {}
    for vocab_size, spread, rule in itertools.product(sizes, spreads, rules):
        g = torch.Generator().manual_seed(vocab_size)
        logits = (torch.randn(vocab_size, generator=g) * spread * 16).round() / 16  # many equal ones
        off[f"{vocab_size} tokens, spread {spread}, {rule}"] = draws_off(logits, rule, tiling, num_draws=2)
    return off


def spread_logits(num_rows, vocab_size, spread=3.0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(num_rows + vocab_size)) * spread


def sparse_groups():
    """Draws off the definition where the list has fewer tokens than `top_k` or `top_p` needs, though it is not full."""
    logits = torch.arange(700) / 1000
    logits[::16] += 2.0  # one likely token in each group
    rules = [{"top_k": 60}, {"top_k": 60, "top_p": 0.9999}, {"top_p": 0.97}]
    return sum(draws_off(logits, rule, num_draws=4) for rule in rules)


KINDS = [
    {"temperature": 0.0}, {"top_p": 0.8}, {}, {"top_k": 2}, {"min_p": 0.2}, {"temperature": 0.0, "logprobs": 3},
    {"presence_penalty": 1.5, "output": [4, 2, 2]}, {"logit_bias": {4: 5.0, 7: -100.0}},
    {"temperature": 0.0, "frequency_penalty": 0.7, "output": [5, 5, 5, 9], "logprobs": 0},
    {"repetition_penalty": 1.7, "output": [3], "top_p": 0.9, "logprobs": 20},
    {"repetition_penalty": 0.4, "presence_penalty": -0.3, "temperature": 0.0, "output": [8, 9]},
    {"min_tokens": 5, "stop_ids": [2, 3, 4], "logit_bias": {3: 50.0}, "temperature": 0.0, "logprobs": 2},
    {"min_tokens": 5, "stop_ids": [2, 3, 4], "logit_bias": {5: 50.0}, "temperature": 0.0},
    {"mask": lambda ids: np.arange(300) % 3 == 0, "temperature": 0.0}, {"top_k": 70, "top_p": 0.6, "logprobs": 1},
    {"mask": lambda ids: np.arange(300) == 299, "top_p": 0.5, "frequency_penalty": 1.0, "output": [1]},
    {"logit_bias": {4: 90.0}, "logprobs": 0, "logprob_token_ids": (299, 4)},
    {"mask": lambda ids: np.arange(300) == 7, "min_tokens": 5, "stop_ids": [7], "temperature": 0.0},
]  # fmt: skip


def mixed_batch():
    """Rows that differ between a batch of every kind, each row alone, and the torch path; logprobs that differ."""
    logits, prompt = spread_logits(len(KINDS), 300), (2, 3, 299)
    logits[:, 17] = logits.amax(dim=1)  # the best twice

    def makers():
        return [make(index, prompt, seed=9 + index, **kind) for index, kind in enumerate(KINDS)]

    want = launch_sampling(logits.clone(), makers()).read()
    together = run(gpu_sampler(300), logits, makers())
    off = {}
    for row, kind in enumerate(KINDS):
        alone = run(gpu_sampler(300), logits[row : row + 1], makers()[row : row + 1], places=[5])
        off[f"token of {sorted(kind)}"] = float(not want.tokens[row] == together.tokens[row] == alone.tokens[0])
        off[f"logprobs of {sorted(kind)}"] = max(
            logprobs_off(together.logprobs[row], want.logprobs[row]),
            logprobs_off(alone.logprobs[0], want.logprobs[row]),
        )
    return off


def logprobs_off(got, want):
    """The largest difference; infinite where ids differ and their values do not say that they are equals."""
    if got is None or want is None:
        return 0.0 if got is want else math.inf
    if got.token_id != want.token_id or len(got.top) != len(want.top):
        return math.inf
    pairs = [(got.logprob, want.logprob), *((a, b) for (_, a), (_, b) in zip(got.top, want.top, strict=True))]
    differences = [0.0 if a == b else abs(a - b) for a, b in pairs]
    return max(math.inf if math.isnan(difference) else difference for difference in differences)


def edits_off():
    """Logits that the torch processors would not have made, bit by bit, over several tokens of each request."""
    sampler, logits = gpu_sampler(300), spread_logits(len(KINDS), 300)
    mine, theirs = ([make(index, (2, 3, 299), **kind) for index, kind in enumerate(KINDS)] for _ in "ab")
    rows, off = list(range(len(KINDS))), 0
    for step in range(2):
        got, want = logits.clone(), logits.clone()
        sampler.launch(got, mine, rows, rows[::-1])
        process_logits(want, theirs)
        off += int((got != want).sum())
        for seq in (*mine, *theirs):
            seq.token_ids += [step * 7 % 5, 11][: step + 1]
    return off


def broken_rows():
    """Rows that get a token and must not, or the reverse; tokens kept on the device outside the vocabulary."""
    off = {}
    nothing, all_but_3 = np.zeros(300, dtype=bool), np.arange(300) != 3
    kinds = [{"temperature": 0.0}, {"top_p": 0.5, "logprobs": 1, "repetition_penalty": 1.2}]
    wants = [run(gpu_sampler(300), spread_logits(3, 300), [make(seed=5, **kind)] * 3).tokens for kind in kinds]
    for name, spoil, mask in [
        ("NaN", lambda x: x.index_fill_(0, torch.tensor([3]), math.nan), None),
        ("infinity", lambda x: x.index_fill_(0, torch.tensor([3]), math.inf), None),
        ("nothing allowed", lambda x: x, lambda ids: nothing),
        ("all minus infinity", lambda x: x.fill_(-math.inf), None),
        ("a masked NaN", lambda x: x.index_fill_(0, torch.tensor([3]), math.nan), lambda ids: all_but_3),
        ("a masked infinity", lambda x: x.index_fill_(0, torch.tensor([3]), math.inf), lambda ids: all_but_3),
    ]:
        for kind, want in zip(kinds, wants, strict=True):
            logits, sampler = spread_logits(3, 300), gpu_sampler(300)
            spoil(logits[1])
            masks = [None, mask, None]
            got = run(sampler, logits, [make(row, seed=5, mask=masks[row], **kind) for row in range(3)]).tokens
            is_wrong = got != [want[0], None, want[2]] or not 0 <= int(sampler.tokens_M.min()) <= 300
            off[f"{name}, {kind}"] = float(is_wrong)
    return off


def overflow_off():
    """Ids beyond the vocabulary and -inf where a penalty or a temperature drives logits towards infinity."""
    logits = torch.tensor([[3e38, 1.0, 2e37, 0.0, -1.0]])
    off = 0
    for rule, sampling in itertools.product(
        [{"repetition_penalty": 0.01}, {"temperature": 0.1}],
        [{}, {"top_p": 0.5}, {"temperature": 0.0}, {"logprobs": 2}],
    ):
        kind = {**rule, **sampling}
        off += run(gpu_sampler(5), logits, [make(prompt=(0, 2), **kind)]).tokens[0] not in (0, 2)
    return off


def greedy_ties():
    """Rows whose best tokens are several: the first must come, wherever the chunks end."""
    logits = torch.zeros(6, 1000)
    firsts = [0, 255, 256, 511, 999, 700]
    for row, first in enumerate(firsts):
        logits[row, first:] = 5.0
    tokens = run(gpu_sampler(1000), logits, [make(row, temperature=0.0) for row in range(6)]).tokens
    return float(tokens != firsts)


def ranked_off():
    """Log-probabilities of rows that fill the list of candidates, leave it short, or have equals, against torch."""
    flat, ties = torch.zeros(1, 1000), torch.zeros(1, 1000)
    ties[0, 400:420] = 1.0
    peaked = torch.linspace(0, -999, 1000)[torch.randperm(1000, generator=torch.Generator().manual_seed(1))][None] * 9
    off = {}
    for name, logits in [("random", spread_logits(1, 1000)), ("flat", flat), ("ties", ties), ("peaked", peaked)]:
        for num_top in (0, 1, 20):
            got, want = (
                sample(logits.clone(), make(temperature=0.0, logprobs=num_top))
                for sample in (
                    lambda x, seq: run(gpu_sampler(1000), x, [seq]),
                    lambda x, seq: launch_sampling(x, [seq]).read(),
                )
            )
            off[f"{num_top} best of {name}"] = logprobs_off(got.logprobs[0], want.logprobs[0])
            ids = [token for token, _ in got.logprobs[0].top]
            order = sorted(range(1000), key=lambda token: (-float(logits[0, token]), token))
            off[f"order of {num_top} best of {name}"] = float(ids != order[:num_top])
    return off


def chi_square():
    """Of 200 draws over five tokens; 18.5 is exceeded once in a thousand times, and the seeds are fixed."""
    logits = torch.tensor([2.0, 1.0, 3.0, 0.0, -1.0])
    probs = torch.softmax(logits, 0)
    tokens = run(gpu_sampler(5, 200), logits.expand(200, -1), [make(seed=seed) for seed in range(200)]).tokens
    counts = torch.bincount(torch.tensor(tokens), minlength=5)
    return float(((counts - 200 * probs) ** 2 / (200 * probs)).sum()) > 18.5


def largest_draw():
    """The last token with a probability is chosen, never one after it."""
    gpu_params.uniform = lambda seed, index: 1 - 2.0**-52
    logits = torch.full((1, 1000), 0.1)
    logits[0, 600:] = -math.inf
    tokens = [run(gpu_sampler(1000), logits, [make(**kind)]).tokens[0] for kind in ({}, {"top_p": 0.99999999})]
    gpu_params.uniform = uniform
    return float(tokens != [599, 599])


def rows_apart():
    """Rows that sample among rows that do not; their tokens must be in the places that the next step reads."""
    logits, sampler = spread_logits(6, 300), gpu_sampler(300, 8)
    kinds = [
        {"temperature": 0.0, "logprobs": 1},
        {"top_p": 0.9},
        {"frequency_penalty": 1.0, "output": [1], "logprobs": 2},
    ]
    seqs = [make(index, seed=index, **kind) for index, kind in enumerate(kinds)]
    got = sampler.launch(logits.clone(), seqs, [1, 3, 4], [7, 0, 2]).read()
    want = launch_sampling(logits[[1, 3, 4]], [make(i, seed=i, **kind) for i, kind in enumerate(kinds)]).read()
    is_wrong = got.tokens != want.tokens or sampler.tokens_M[[7, 0, 2]].tolist() != want.tokens
    return max(float(is_wrong), *(logprobs_off(a, b) for a, b in zip(got.logprobs, want.logprobs, strict=True)))


class UncapturedGraph:
    """Stands for a captured graph; counts its replays."""

    num_replays = 0

    def __init__(self, rows, choose):
        self._rows, self._choose = rows, choose

    def replay(self):
        UncapturedGraph.num_replays += 1
        self._choose(self._rows)


def graphs_off():
    """Steps for which graphs of 1 to 8 rows choose otherwise than launches do, or are used where they must not be."""
    gpu_sample_graphs._capture = UncapturedGraph
    logits_MV, off = spread_logits(9, 300), {}
    logits_MV[2] = math.nan
    captured, plain = (gpu_sampler(300, 8) for _ in "ab")
    captured.capture(logits_MV, [1, 2, 4, 8])
    for sampler in (captured, plain):
        sampler.tokens_M.fill_(-5)
    greedy = [{"temperature": 0.0}] * 8
    drawn = [{}, {"top_k": 3}, {"temperature": 0.0}, {"top_p": 0.7}, {"min_p": 0.1}]
    edited = [{"temperature": 0.0}, {"presence_penalty": 1.0, "output": [5]}]
    reported = [{"temperature": 0.0, "logprobs": 1}]
    for kinds, is_captured in ((drawn, True), (greedy, True), (drawn[:1], True), (greedy[:3], True), (edited, False),
                               (reported, False)):  # fmt: skip
        UncapturedGraph.num_replays = 0
        results = []
        for sampler in (captured, plain):
            seqs = [make(index, seed=3 + index, **kind) for index, kind in enumerate(kinds)]
            rows, places = [7 - index for index in range(len(kinds))], [index ^ 1 for index in range(len(kinds))]
            logits = logits_MV if sampler is captured and is_captured else logits_MV.clone()
            results.append((sampler.launch(logits, seqs, rows, places).read(), sampler.tokens_M.tolist()))
        name = f"{len(kinds)} rows, {kinds[-1]}"
        off[name] = float(results[0] != results[1] or UncapturedGraph.num_replays != is_captured)
    return off


def engine_off():
    """Requests that a whole engine answers otherwise with the kernels: places reused, preemption, aborts, overlap."""
    settings = {"num_pages": 17, "max_num_seqs": 4, "overlap": True}
    asked, off, num_preemptions = random_requests(random.Random(8), 10), 0, 0
    answers = []
    for has_kernels in (False, True):
        core = fake_core(FakeModel(max_model_len=68), **settings)
        if has_kernels:
            core._runner.sampler = GpuSampler(core._runner.tokens_M, 97, Tiling(chunk=64, group=16, list_size=32))
        answers.append({name: answer(outputs) for name, outputs in play(core, asked).items()})
        num_preemptions += core.stats().num_preemptions
    for name, (tokens, logprobs, prompts, *reasons) in answers[0].items():
        got = answers[1][name]
        off += (got[0], got[2], [*got[3:]]) != (tokens, prompts, reasons)
        off += any(logprobs_off(a, b) > 1e-5 for a, b in zip(got[1], logprobs, strict=True))
    return float(off) if num_preemptions else math.inf


FEW = [RULES[index] for index in (0, 1, 4, 8, 11, 13, 14, 19)]
PICK = {
    "filters": lambda: filter_cases([300], FEW, spreads=(3.0,)),
    "mixed batch": mixed_batch,
    "broken rows": broken_rows,
    "overflow": overflow_off,
    "greedy ties": greedy_ties,
    "largest draw": largest_draw,
    "rows apart": rows_apart,
    "graphs": graphs_off,
}
REST = {
    "edits": edits_off,
    "log-probabilities": ranked_off,
    "few and many tokens": lambda: filter_cases([5, 700], FEW, spreads=(0.0,)),
    "sparse groups": sparse_groups,
    "chi square": chi_square,
    "engine": engine_off,
    "all filters": lambda: filter_cases([257], RULES),
    "short blocks": lambda: filter_cases([129], FEW, SHORT_BLOCKS),
}

if __name__ == "__main__":
    chosen = REST if sys.argv[1] == "rest" else PICK
    json.dump({name: case() for name, case in chosen.items()}, sys.stdout)
