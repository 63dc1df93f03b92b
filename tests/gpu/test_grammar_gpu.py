"""Grammars on a card: masks of real vocabulary sizes as torch applies them, answers that fit, nothing that waits."""

import json

import jsonschema_rs
import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.grammar_check import Vocabulary
from engine.grammar_compiler import GrammarCompiler
from engine.grammar_spec import json_object, regex, text
from engine.logits import process_logits
from engine.sequence import Sequence
from tests.engine.harmony import FOLDER, SCHEMAS, TOKENIZER, turn
from tests.engine.requests import run_all, tokens_of
from tests.engine.test_grammar_bundled import TURN, bound
from tests.gpu.common import no_waiting
from tests.gpu.test_sampling_gpu import gpu_sampler, spread_logits

pytestmark = pytest.mark.gpu
FORMATS = (regex("[ -~]*"), text("abc"), json_object(), regex("a+"))


def sequences(vocab_size, num_rows):
    """Rows in the middle of grammars, over a made-up vocabulary: every byte, then words of two of them."""
    words = [bytes([32 + number // 95 % 95, 32 + number % 95]) for number in range(vocab_size - 256)]
    vocabulary = Vocabulary(
        source=[bytes([code]) for code in range(256)] + words, size=vocab_size, eos_ids=frozenset({vocab_size - 1})
    )
    grammars = GrammarCompiler(vocabulary, timeout_s=60.0, cache_bytes=1 << 28)
    seqs = []
    for row in range(num_rows):
        item = bound(f"r{row}", FORMATS[row % 4], seed=row, temperature=1.0 if row % 3 else 0.0)
        seqs.append(Sequence(item, stop_ids=frozenset({vocab_size - 1}), seed=row))
        seqs[-1].grammar = grammars.make_matcher(grammars.compile(item.grammar.format_json).result())
    return seqs


@pytest.mark.parametrize("vocab_size", [4096, 4097, 129_280, 201_088])
def test_masks_are_those_of_the_torch_path(vocab_size):
    seqs = sequences(vocab_size, 9)
    logits, all_rows = spread_logits(9, vocab_size, 3.0), list(range(9))
    got, want = logits.clone(), logits.cpu()
    pending = gpu_sampler(vocab_size).launch(got, seqs, all_rows, all_rows)
    process_logits(want, seqs)
    assert torch.equal(got.cpu(), want)
    assert want.isinf().any(dim=1).all()
    torch.cuda.synchronize()
    for row, token in enumerate(pending.read().tokens):
        assert want[row, token].isfinite()
        seqs[row].grammar.accept(token)


def test_a_launch_with_grammars_does_not_wait_for_the_device():
    seqs, all_rows = sequences(201_088, 16), list(range(16))
    sampler, logits = gpu_sampler(201_088), spread_logits(16, 201_088, 2.0)
    for step in range(4):
        work = logits.clone()
        with no_waiting(is_on=step > 0):
            pending = sampler.launch(work, seqs, all_rows, all_rows)
        torch.cuda.synchronize()
        for seq, token in zip(seqs, pending.read().tokens, strict=True):
            if not seq.grammar.is_over and token not in seq.stop_ids:
                seq.token_ids.append(token)
                seq.grammar.accept(token)


@pytest.mark.parametrize("overlap", [True, False])
def test_answers_on_the_card_are_valid(overlap):
    core = EngineCore(EngineConfig(model=FOLDER, device="cuda", num_pages=512, max_model_len=512, overlap=overlap))
    asked = [
        bound(f"{name} {seed}", turn(schema), seed=seed, max_tokens=200)
        for name, schema in SCHEMAS.items()
        for seed in range(16)
    ]
    outputs = run_all(core, asked)
    for item in asked:
        its = outputs[item.request_id]
        assert its[-1].finish_reason == "stop"
        found = TURN.fullmatch(TOKENIZER.decode(tokens_of(its)))
        assert found
        answer = json.loads(found["final"] or found["call"])
        assert jsonschema_rs.is_valid(SCHEMAS[item.request_id.split()[0]], answer)
    lengths = [len(tokens_of(its)) for its in outputs.values()]
    assert np.std(lengths) > 0, "answers end at different steps"
