"""Which tokens the rows of a step may choose: the bits of all restricted rows, made at once on the host.

They are made when every token before the one to choose is known; the model may be computing meanwhile.

Shape letters: E restricted rows, V vocabulary, N words of 32 tokens that cover it.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np

from engine.grammar_matcher import GrammarMatcher, fill_masks
from engine.sequence import Sequence

_LAST_WORD = [-1, *((1 << size) - 1 for size in range(1, 32))]  # bits of a last word that holds `size` tokens, 0: all


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """`rows` among those that sample, and in `words_EN` (int32) a bit for each token: 1 if it may come next."""

    rows: list[int]
    words_EN: np.ndarray

    def allowed_EV(self, vocab_size: int) -> np.ndarray:
        """The same as bools."""
        bits_EV = np.unpackbits(self.words_EN.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return bits_EV.view(np.bool_)


def make_masks(seqs: ListLike[Sequence], vocab_size: int) -> TokenMasks | None:
    """The masks of the sequences that have a grammar or a mask of their own; None if none has."""
    allowed_by_row: dict[int, np.ndarray] = {}
    matchers: dict[int, GrammarMatcher] = {}
    for row, seq in enumerate(seqs):
        if seq.grammar is not None:
            matchers[row] = seq.grammar
        if seq.logit_mask is not None:
            allowed_V = seq.logit_mask(seq.token_ids[seq.num_prompt :])
            if allowed_V is not None:
                allowed_by_row[row] = allowed_V
    if not matchers and not allowed_by_row:
        return None
    rows = [*matchers, *(row for row in allowed_by_row if row not in matchers)]
    words_EN = np.zeros((len(rows), -(-vocab_size // 32)), dtype=np.int32)
    if matchers:
        fill_masks(list(matchers.values()), words_EN)
        words_EN[:, -1] &= _LAST_WORD[vocab_size % 32]  # the rest may be set
        for row, matcher, words_N in zip(matchers, matchers.values(), words_EN, strict=False):
            _apply_stop_rules(words_N, seqs[row], matcher)
    for row, allowed_V in allowed_by_row.items():
        own_N = np.zeros_like(words_EN[0])
        bits = np.packbits(allowed_V, bitorder="little")
        own_N.view(np.uint8)[: len(bits)] = bits
        _restrict(words_EN[rows.index(row)], own_N, has_grammar=row in matchers)
    return TokenMasks(rows, words_EN)


def _restrict(words_N: np.ndarray, own_N: np.ndarray, *, has_grammar: bool) -> None:
    """Allow what a mask and the row's grammar, if it has one, both allow; if that is nothing, the grammar decides."""
    joint_N = words_N & own_N if has_grammar else own_N
    if not has_grammar or joint_N.any():
        words_N[:] = joint_N


def _apply_stop_rules(words_N: np.ndarray, seq: Sequence, matcher: GrammarMatcher) -> None:
    """Where the answer may end, every stop token of the request may end it, but not before `min_tokens`.

    A grammar that has nothing else to offer ends all the same.
    """
    if not matcher.eos_ids.issuperset(seq.stop_ids) and matcher.is_complete:
        _set_bits(words_N, seq.stop_ids)
    if seq.num_output < seq.sampling.min_tokens:
        others_N = words_N.copy()
        _clear_bits(others_N, seq.stop_ids | matcher.eos_ids)
        if others_N.any():
            words_N[:] = others_N


def _set_bits(words_N: np.ndarray, token_ids: frozenset[int]) -> None:
    bits = words_N.view(np.uint32)
    for token_id in token_ids:
        bits[token_id // 32] |= np.uint32(1 << token_id % 32)


def _clear_bits(words_N: np.ndarray, token_ids: frozenset[int]) -> None:
    bits = words_N.view(np.uint32)
    for token_id in token_ids:
        bits[token_id // 32] &= ~np.uint32(1 << token_id % 32)
