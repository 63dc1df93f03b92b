"""Dialects that write transcripts, and a model that writes the first of several transcripts that its grammar allows.

The model follows the token masks of the engine, so a grammar that is too wide lets the wrong transcript through, and
one that is too narrow leaves nothing to write.
"""

import functools
import shutil
from pathlib import Path
from typing import NamedTuple

import xgrammar

from engine.grammar_check import Vocabulary, token_bytes
from engine.grammar_compiler import compile_format, new_compiler
from engine.grammar_matcher import GrammarMatcher
from engine.sequence import Sequence
from engine.token_masks import make_masks
from loaders.tokenizer import load_tokenizer
from tests.server.conftest import ASSETS
from tests.server.test_deepseek_parser import MARKERS

TEMPLATES = Path(__file__).parent / "templates"


class Call(NamedTuple):
    """A call that a model wants to make; the arguments are JSON text."""

    name: str
    arguments: str


class Harmony:
    """GPT-OSS."""

    ends = ("<|return|>", "<|call|>", "<|endoftext|>")

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def thinks(self, _prompt):
        return True

    def thought(self, text):
        return f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"

    def answer(self, text):
        return f"<|channel|>final<|message|>{text}<|return|>"

    def call(self, call):
        header = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json"
        return f"{header}<|message|>{call.arguments}<|call|>"


class DeepSeek:
    """DeepSeek-V3.1, which thinks if its prompt ends so."""

    ends = ("<｜end▁of▁sentence｜>",)

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def thinks(self, prompt):
        return prompt.endswith("<think>")

    def thought(self, text):
        return f"{text}</think>"

    def answer(self, text):
        return f"{text}<｜end▁of▁sentence｜>"

    def call(self, call):
        body = f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{call.arguments}<｜tool▁call▁end｜>"
        return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"


def deepseek_tokenizer(folder, *, thinks=False):
    """The bundled tokenizer with DeepSeek's control tokens and chat template, for a folder that does not exist yet.

    With `thinks` the template opens the reasoning unless a request forbids it.
    """
    shutil.copytree(ASSETS, folder)
    names = [*load_tokenizer(ASSETS).special_tokens]
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        text = (folder / file).read_text(encoding="utf-8")
        for old, new in zip(names, ["<｜begin▁of▁sentence｜>", *MARKERS], strict=False):
            text = text.replace(f'"{old}"', f'"{new}"')
        (folder / file).write_text(text, encoding="utf-8")
    template = (TEMPLATES / "deepseek_v31.jinja").read_text(encoding="utf-8")
    changed = template.replace("thinking is defined else false", "thinking is defined else true")
    assert changed != template
    (folder / "chat_template.jinja").write_text(changed if thinks else template, encoding="utf-8")
    return load_tokenizer(folder)


class ScriptedModel:
    """The script of a `FakeEngine`. It thinks where its dialect does, then writes one of its `wishes`.

    A wish is an answer or a call. The first choice of a request wants the first wish most, the second one the second.
    """

    def __init__(self, dialect):
        self.dialect = dialect
        self.thought = ""
        self.wishes = []
        self.written = []  # what it wrote for each request, as ids

    def wish(self, thought, wishes):
        """What to write from now on."""
        self.thought, self.wishes = thought, wishes
        self.written.clear()

    def __call__(self, request):
        dialect, tokenizer = self.dialect, self.dialect.tokenizer
        first = int(request.request_id.rpartition("-")[2])
        begun = dialect.thought(self.thought) if dialect.thinks(tokenizer.decode(request.prompt_ids)) else ""
        ends = [dialect.call(wish) if isinstance(wish, Call) else dialect.answer(wish) for wish in self.wishes]
        transcripts = [tokenizer.encode(begun + end) for end in (*ends[first:], *ends[:first])]
        self.written.append(self._allowed(request, transcripts))
        return self.written[-1]

    def _allowed(self, request, transcripts):
        """Token by token what the best transcript says that begins so and goes on with a token that is allowed."""
        seq = Sequence(request, stop_ids=frozenset(request.sampling.stop_token_ids), seed=0)
        if request.grammar is not None:
            seq.grammar = GrammarMatcher(*self._compiled(request.grammar.format_json), self._vocabulary.eos_ids)
        ids = []
        while not ids or ids[-1] not in seq.stop_ids:
            masks = make_masks([seq], self._vocabulary.size)
            wanted = [each[len(ids)] for each in transcripts if each[: len(ids)] == ids and len(each) > len(ids)]
            allowed = [each for each in wanted if masks is None or masks.allowed_EV(self._vocabulary.size)[0, each]]
            assert allowed, f"the grammar allows nothing of {transcripts} after {self.dialect.tokenizer.decode(ids)!r}"
            ids.append(allowed[0])
            seq.token_ids.append(allowed[0])
            if seq.grammar is not None and allowed[0] not in seq.stop_ids:
                seq.grammar.accept(allowed[0])
        return ids

    @functools.cached_property
    def _vocabulary(self):
        tokenizer = self.dialect.tokenizer
        special = tokenizer.special_tokens
        return Vocabulary(
            source=[tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)],
            size=tokenizer.vocab_size,
            eos_ids=frozenset(special[name] for name in self.dialect.ends),
            control_ids=frozenset(special.values()),
        )

    @functools.cached_property
    def _compiler(self):
        names, stops = token_bytes(self._vocabulary), sorted(self._vocabulary.eos_ids)
        return new_compiler(xgrammar.TokenizerInfo(names, xgrammar.VocabType.RAW, stop_token_ids=stops), 1)

    @functools.lru_cache  # noqa: B019  a model lives as long as its module's tests
    def _compiled(self, format_json):
        return compile_format(self._compiler, format_json), xgrammar.BatchGrammarMatcher(1)
