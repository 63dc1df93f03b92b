"""Texts that a schema allows, chosen at random in a vocabulary of bytes: what a model without sense would answer."""

import json
import random
from typing import Any

import numpy as np
import xgrammar

from engine.grammar_compiler import compile_format
from engine.grammar_spec import json_schema
from server.structured.json_schema import prepare_schema
from server.structured.turn import MAX_WHITESPACE

_END = 256
_TOKENS = [*(bytes([byte]) for byte in range(256)), b"</s>"]
_CLOSING = frozenset(b'"}]')
MAX_BYTES = 1500


def _compiler() -> xgrammar.GrammarCompiler:
    info = xgrammar.TokenizerInfo(_TOKENS, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[_END])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


_COMPILER = _compiler()


def compile_schema(schema: Any) -> xgrammar.CompiledGrammar:
    """The grammar of a client's schema."""
    return compile_format(_COMPILER, json.dumps(json_schema(prepare_schema(schema), max_whitespace=MAX_WHITESPACE)))


def accepts(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    """Whether the grammar allows the whole text."""
    matcher = xgrammar.GrammarMatcher(grammar)
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(_END)


def random_text(grammar: xgrammar.CompiledGrammar, seed: int) -> str | None:
    """A text that the grammar allows, the likelier to end the longer it gets; None if it has not ended by then."""
    rng = random.Random(seed)
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, len(_TOKENS))
    data = bytearray()
    while len(data) < MAX_BYTES:
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: len(_TOKENS)]
        allowed = bits.nonzero()[0].tolist()
        assert allowed, f"no token may follow {bytes(data)!r}"
        if _END in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return data.decode()
        closing = [byte for byte in allowed if byte in _CLOSING]
        others = [byte for byte in allowed if byte != _END]
        byte = rng.choice(closing if closing and rng.random() < 0.3 + len(data) / MAX_BYTES else others)
        assert matcher.accept_token(byte)
        data.append(byte)
    return None
