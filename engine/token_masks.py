"""Which tokens the rows of a step may choose: the bits of all restricted rows, made at once on the host.

They are made when every token before the one to choose is known; the model may be computing meanwhile.

Shape letters: E restricted rows, V vocabulary, N words of 32 tokens that cover it, S stop tokens.
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
    """The masks of the sequences that may not choose every token; None if all may.

    Three rules may restrict a row, in this order: its grammar, its own mask, `min_tokens`. A rule that would leave none
    of the tokens that those before it allow is not applied.
    """
    restricted = [(row, seq) for row, seq in enumerate(seqs) if not seq.is_plain_greedy]
    matchers = {row: seq.grammar for row, seq in restricted if seq.grammar is not None}
    allowed_by_row = {row: allowed_V for row, seq in restricted if (allowed_V := _own_mask(seq)) is not None}
    stops_by_row = {row: stop_ids for row, seq in restricted if (stop_ids := _stops_too_early(seq))}
    rows = [*matchers, *sorted((allowed_by_row.keys() | stops_by_row.keys()) - matchers.keys())]
    if not rows:
        return None
    words_EN = np.zeros((len(rows), -(-vocab_size // 32)), dtype=np.int32)
    words_EN[len(matchers) :] = -1
    if matchers:
        fill_masks(list(matchers.values()), words_EN)
    words_EN[:, -1] &= _LAST_WORD[vocab_size % 32]
    for row, words_N in zip(rows, words_EN, strict=True):
        if row in matchers:
            _allow_stops(words_N, seqs[row], matchers[row])
        if row in allowed_by_row:
            _apply_mask(words_N, allowed_by_row[row], has_grammar=row in matchers)
        if row in stops_by_row:
            _forbid_stops(words_N, stops_by_row[row])
    return TokenMasks(rows, words_EN)


def has_no_token(seq: Sequence, vocab_size: int) -> bool:
    """Whether the grammar or the mask of a sequence forbids every token that could come next."""
    masks = make_masks([seq], vocab_size)
    return masks is not None and not masks.words_EN.any()


def _own_mask(seq: Sequence) -> np.ndarray | None:
    return None if seq.logit_mask is None else seq.logit_mask(seq.token_ids[seq.num_prompt :])


def _stops_too_early(seq: Sequence) -> frozenset[int]:
    """The tokens that would end the answer before `min_tokens`; none once it has so many."""
    if seq.num_output >= seq.sampling.min_tokens:
        return frozenset()
    return seq.stop_ids if seq.grammar is None else seq.stop_ids | seq.grammar.eos_ids


def _allow_stops(words_N: np.ndarray, seq: Sequence, matcher: GrammarMatcher) -> None:
    """Where the answer may end, every stop token of the request may end it."""
    if not matcher.eos_ids.issuperset(seq.stop_ids) and matcher.is_complete:
        np.bitwise_or.at(words_N.view(np.uint32), *_places(seq.stop_ids))


def _apply_mask(words_N: np.ndarray, allowed_V: np.ndarray, *, has_grammar: bool) -> None:
    """Allow what a row's own mask and its grammar both allow; if that is nothing, the grammar, if any, decides."""
    joint_N = np.zeros_like(words_N)
    bits = np.packbits(allowed_V, bitorder="little")
    joint_N.view(np.uint8)[: len(bits)] = bits
    joint_N &= words_N
    if not has_grammar or joint_N.any():
        words_N[:] = joint_N


def _forbid_stops(words_N: np.ndarray, stop_ids: frozenset[int]) -> None:
    """Forbid the stop tokens, unless nothing else may follow: then the answer ends before `min_tokens`."""
    bits_N = words_N.view(np.uint32)
    words_S, bits_S = _places(stop_ids)
    before_S = bits_N[words_S]
    np.bitwise_and.at(bits_N, words_S, ~bits_S)
    if not bits_N.any():
        bits_N[words_S] = before_S


def _places(token_ids: frozenset[int]) -> tuple[np.ndarray, np.ndarray]:
    """Where S tokens are: their words, and in these the bit of each."""
    ids_S = np.fromiter(token_ids, np.int64, len(token_ids))
    return ids_S // 32, np.uint32(1) << (ids_S % 32).astype(np.uint32)
