"""Bits of the tokens that may come next: packed alike for grammars and masks, where rows begin, who may stop."""

import itertools

import numpy as np
import pytest
import torch

from engine.gpu_params import RequestRules, row_numbers
from engine.grammar_spec import free_tokens, regex, text
from engine.logits import process_logits
from engine.sampler import launch_sampling
from engine.sequence import Sequence
from engine.token_masks import has_no_token, make_masks
from tests.engine.grammars import EOS, bound, compiler, ids
from tests.engine.requests import request
from tests.interpreter import waits_for_interpreter
from tests.tables import rows


def sequence(index, mask=None, format_=None, output="", **sampling):
    item = request(f"r{index}", [1], 99, **sampling) if format_ is None else bound(f"r{index}", format_, **sampling)
    own = set() if sampling.get("ignore_eos") else {EOS}
    seq = Sequence(item, stop_ids=frozenset({*own, *sampling.get("stop_token_ids", ())}), seed=0, logit_mask=mask)
    if item.grammar is not None:
        seq.grammar = compiler().make_matcher(compiler().compile(item.grammar.format_json).result())
    for token in ids(output):
        seq.token_ids.append(token)
        seq.grammar.accept(token)
    return seq


def some(vocab_size, seed):
    return np.random.default_rng(seed).random(vocab_size) < 0.5


@rows("vocab_size", 1, 31, 32, 33, 65, 97, 300)
def test_masks_reach_the_kernels_and_torch_as_they_are(vocab_size):
    """Rows with and without a mask in turn; a mask may also allow everything by being None."""
    masks = [None, *(lambda ids, seed=seed: some(vocab_size, seed) for seed in range(3)), lambda ids: None]
    seqs = [sequence(index, mask) for index, mask in enumerate(masks)]
    made = make_masks(seqs, vocab_size)
    assert made.rows == [1, 2, 3]
    assert np.array_equal(made.allowed_EV(vocab_size), [some(vocab_size, seed) for seed in range(3)])

    logits = torch.zeros(len(seqs), vocab_size)
    process_logits(logits, seqs)
    finite = logits.isfinite().numpy()
    assert np.array_equal(finite[1:4], made.allowed_EV(vocab_size))
    assert finite[[0, 4]].all()

    rules = [RequestRules.of(seq, num_groups=1, list_size=8, vocab_size=vocab_size) for seq in seqs]
    ints, _, edits = row_numbers(seqs, rules, list(range(5)), list(range(5)), vocab_size)
    assert edits.rows == [1, 2, 3]
    sent = edits.mask_words().view(np.uint8)
    for row, start in enumerate(ints[:, 3]):
        if row not in made.rows:
            assert start == -1
            continue
        bits = [sent[start + token // 8] >> token % 8 & 1 for token in range(vocab_size)]  # as the kernel reads them
        assert np.array_equal(np.array(bits, dtype=bool), finite[row])


def test_a_step_without_restrictions_makes_no_masks():
    assert make_masks([sequence(0), sequence(1, lambda ids: None)], 97) is None


def test_grammars_and_masks_share_a_step():
    seqs = [sequence(0, lambda ids: some(97, 5)), sequence(1, format_=text("ab"), output="a"), sequence(2)]
    made = make_masks(seqs, 97)
    by_row = dict(zip(made.rows, made.allowed_EV(97), strict=True))
    assert by_row.keys() == {0, 1}
    assert np.array_equal(by_row[0], some(97, 5))
    assert np.flatnonzero(by_row[1]).tolist() == ids("b")


def test_no_bit_stands_for_a_token_beyond_the_vocabulary():
    """One would look like a way to go on where only stop tokens are left."""
    made = make_masks([sequence(0, format_={"type": "any_text"}), sequence(1, format_=free_tokens([]))], 97)
    assert (made.words_EN[:, -1].view(np.uint32) <= 1).all()
    assert made.allowed_EV(97).any(axis=1).all()


Z = ids("z")[0]
STOPS = [
    # pattern, answer so far, min_tokens, another stop token -> stop tokens allowed, whether anything else is
    ("ab?", "", 0, None, set(), True),
    ("ab?", "a", 0, None, {EOS}, True),
    ("ab?", "a", 2, None, set(), True),
    ("ab?", "a", 1, None, {EOS}, True),
    ("ab?", "ab", 9, None, {EOS}, False),
    ("ab?", "a", 0, Z, {EOS, Z}, True),
    ("ab?", "a", 5, Z, set(), True),
    ("ab?", "ab", 5, Z, {EOS, Z}, False),
    ("[az]*b", "a", 0, Z, {Z}, True),  # in the middle of the text; whether it ends the answer is the engine's business
]


@rows("pattern, output, min_tokens, other, stops, has_more", *STOPS)
def test_stop_tokens_may_come_where_the_answer_may_end(pattern, output, min_tokens, other, stops, has_more):
    others = {} if other is None else {"stop_token_ids": (other,)}
    seq = sequence(0, format_=regex(pattern), output=output, min_tokens=min_tokens, **others)
    [allowed] = make_masks([seq], 97).allowed_EV(97)
    found = set(np.flatnonzero(allowed).tolist())
    assert found & {EOS, Z} == stops
    assert bool(found - {EOS, Z}) == has_more


A, B = ids("ab")
EVERY = frozenset(range(97))


def only(allowed):
    """A mask of these tokens; none for None."""
    return None if allowed is None else lambda generated: np.isin(np.arange(97), list(allowed))


def by_definition(*rules):
    """What is left of all tokens when each rule in turn takes effect, unless it would leave nothing."""
    left = EVERY
    for rule in rules:
        left = left & rule or left
    return left


@rows("stops", {Z}, {A, Z}, EVERY - {A}, EVERY)
@rows("mask", None, {Z}, {EOS}, {A, B}, EVERY - {A}, EVERY - {Z})
@rows(
    "pattern, output, by_grammar",
    (None, "", EVERY), ("[az]", "", {A, Z}), ("z", "", {Z}), ("ab?", "a", {B, EOS}), ("ab?", "ab", {EOS}),
)  # fmt: skip
def test_no_pair_of_rules_forbids_every_token(pattern, output, by_grammar, mask, stops):
    """A stop token that a reasoning budget forced was forbidden by `min_tokens`: a 500 that blamed the model."""
    format_ = None if pattern is None else regex(pattern)
    for min_tokens in (0, 9):
        seq = sequence(
            0, only(mask), format_, output, min_tokens=min_tokens, stop_token_ids=tuple(stops), temperature=0.0
        )
        ends = stops | {EOS} if EOS in by_grammar and pattern else frozenset()
        held_back = stops | {EOS} if min_tokens else frozenset()
        want = by_definition(by_grammar | ends, EVERY if mask is None else mask, EVERY - held_back)
        made = make_masks([seq], 97)
        found = EVERY if made is None else set(np.flatnonzero(made.allowed_EV(97)[0]).tolist())
        assert found == want
        assert launch_sampling(torch.zeros(1, 97), [seq]).read().tokens == [min(want)]
        assert not has_no_token(seq, 97)


def test_an_ignored_eos_ends_a_grammar_no_sooner_than_min_tokens():
    for min_tokens, may_end in ((0, True), (9, False)):
        seq = sequence(0, format_=regex("ab?"), output="a", min_tokens=min_tokens, ignore_eos=True)
        [allowed] = make_masks([seq], 97).allowed_EV(97)
        assert set(np.flatnonzero(allowed).tolist()) == {B} | ({EOS} if may_end else set())


def test_a_mask_of_no_token_leaves_none():
    assert has_no_token(sequence(0, only(()), min_tokens=2), 97)


def test_a_mask_follows_each_token():
    """Brute force: what a mask allows after any beginning are the tokens with which some text goes on."""
    texts = {"".join(letters) for size in (2, 3) for letters in itertools.product("ab", repeat=size)} - {"ab", "bba"}
    grammar = {"type": "or", "elements": [text(each) for each in sorted(texts)]}
    for beginning in sorted({each[:size] for each in texts for size in range(len(each) + 1)}):
        [allowed] = make_masks([sequence(0, format_=grammar, output=beginning)], 97).allowed_EV(97)
        want = {each[len(beginning)] for each in texts if each.startswith(beginning) and each != beginning}
        found = set(np.flatnonzero(allowed).tolist())
        assert found == {token for letter in want for token in ids(letter)} | ({EOS} if beginning in texts else set())


@pytest.mark.kernels
@waits_for_interpreter
def test_the_kernels_choose_what_torch_chooses_from_grammars(run_interpreted):
    assert run_interpreted("tests.engine.interpreted_grammar") == 0
