"""Grammars for the fake model: its 97 tokens as text, one compiler for all tests of a process, short requests."""

import functools
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.grammar_check import Vocabulary
from engine.grammar_compiler import GrammarCompiler
from engine.grammar_spec import GrammarSpec
from tests.engine.fakes import FakeModel
from tests.engine.requests import request

EOS, CONTROL = 0, 96
TOKENS = [b"", *(bytes([code]) for code in range(32, 126)), b'"}', b""]
VOCABULARY = Vocabulary(source=TOKENS, size=97, eos_ids=frozenset({EOS}), control_ids=frozenset({CONTROL}))


@functools.cache
def compiler(timeout_s=60.0):
    """Shared, because each has a process of its own, which takes seconds to start."""
    return GrammarCompiler(VOCABULARY, timeout_s=timeout_s, cache_bytes=1 << 26)


def make_core(model=None, grammars=None, **settings):
    """As `fake_core`, with grammars."""
    settings = {"page_size": 4, "num_pages": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16} | settings
    config = EngineConfig(model=Path("unused"), device="cpu", **settings)
    return EngineCore(config, model or FakeModel(), grammars=grammars or compiler())


def ids(text):
    """One token for each character."""
    return [TOKENS.index(char.encode()) for char in text]


def text_of(token_ids):
    return b"".join(TOKENS[token_id] for token_id in token_ids).decode()


def bound(request_id, format_, prompt=(5, 6), max_tokens=60, **sampling):
    """A request whose answer has a format."""
    sampling = {"temperature": 1.5, "seed": 1} | sampling
    item = request(request_id, prompt, max_tokens, **sampling)
    return msgspec.structs.replace(item, grammar=GrammarSpec.of(format_, param="response_format"))
