"""Formats of any shape against a second opinion: which tokens may follow, by partial matches of a regular expression.

A token is a letter here: a, b and c are text, X and Y control tokens, and "." ends the answer.
"""

import json
import random

import numpy as np
import regex as partial_regex
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar_check import Vocabulary, token_bytes
from engine.grammar_compiler import compile_format, new_compiler
from engine.grammar_spec import free_tokens, one_of, regex, repeated, sequence, text, token

LETTERS = "abcXY."
VOCABULARY = Vocabulary(
    source=[letter.encode() for letter in LETTERS], size=6, eos_ids=frozenset({5}), control_ids=frozenset({3, 4})
)


def leaf():
    """(format, the pattern of the same answers) of a single part."""
    texts = st.text("abc", min_size=1, max_size=3)
    frees = st.sets(st.sampled_from(range(5)), max_size=3).map(lambda out: out | {4, 5})
    return st.one_of(
        texts.map(lambda value: (text(value), value)),
        st.sampled_from("XY").map(lambda letter: (token(LETTERS.index(letter)), letter)),
        frees.map(lambda out: (free_tokens(out), f"[{''.join(LETTERS[i] for i in range(5) if i not in out)}]*")
                  if len(out) < 6 else (text("a"), "a")),
        st.sampled_from(["[ab]*c", "a?b", "(ab|c)+"]).map(lambda pattern: (regex(pattern), f"(?:{pattern})")),
        st.just((regex("[^a]"), "[bc]")),
    )  # fmt: skip


def joined(parts):
    """Formats made of others."""
    limits = st.sampled_from([(0, None), (1, None), (0, 1), (0, 2), (1, 3), (2, 2)])
    return st.one_of(
        st.lists(parts, min_size=1, max_size=3).map(
            lambda them: (sequence(*(f for f, _ in them)), "".join(f"(?:{p})" for _, p in them))
        ),
        st.lists(parts, min_size=1, max_size=3).map(
            lambda them: (one_of(*(f for f, _ in them)), "|".join(f"(?:{p})" for _, p in them))
        ),
        st.tuples(parts, limits).map(
            lambda each: (
                repeated(each[0][0], *each[1]),
                f"(?:{each[0][1]}){{{each[1][0]},{'' if each[1][1] is None else each[1][1]}}}",
            )
        ),
    )


def wanted(pattern, answer):
    """Letters that may follow."""
    letters = {x for x in LETTERS[:5] if partial_regex.fullmatch(pattern, answer + x, partial=True)}
    return letters | ({"."} if partial_regex.fullmatch(pattern, answer) else set())


@settings(max_examples=250)
@given(st.recursive(leaf(), joined, max_leaves=6), st.integers(0, 2**32))
def test_masks_are_those_of_a_regular_expression(made, seed):
    import xgrammar

    format_, pattern = made
    info = xgrammar.TokenizerInfo(token_bytes(VOCABULARY), xgrammar.VocabType.RAW, stop_token_ids=[5])
    matcher = xgrammar.GrammarMatcher(compile_format(new_compiler(info, 1), json.dumps(format_)))
    answer, rng = "", random.Random(seed)
    for _ in range(8):
        words = np.zeros((1, 1), dtype=np.int32)
        matcher.fill_next_token_bitmask(words)
        allowed = {letter for index, letter in enumerate(LETTERS) if words[0, 0] >> index & 1}
        assert allowed == wanted(pattern, answer), (format_, pattern, answer)
        letters = sorted(allowed - {"."})
        if not letters:
            break
        answer += rng.choice(letters)
        assert matcher.accept_token(LETTERS.index(answer[-1]))
