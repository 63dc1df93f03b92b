"""Grammars on the bundled model and its real tokenizer: JSON by schema, free reasoning before it, bound tool calls."""

import asyncio
import json
import re

import jsonschema_rs
import msgspec
import pytest
import torch

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.grammar_spec import GrammarSpec, json_schema
from model.config import ModelSettings
from model.registry import build_model
from tests.engine.harmony import FOLDER, RETURN, SCHEMAS, TOKENIZER, turn
from tests.engine.requests import request, run_all, tokens_of
from tests.tables import rows

PROMPT = TOKENIZER.encode("<|start|>user<|message|>What is the capital of France?<|end|><|start|>assistant")
TURN = re.compile(
    r"(?:<\|channel\|>analysis<\|message\|>((?:(?!<\|).)*)<\|end\|><\|start\|>assistant){0,2}"
    r"(?:<\|channel\|>final<\|message\|>(?P<final>.*)<\|return\|>"
    r"| to=functions\.look_up<\|channel\|>commentary <\|constrain\|>json<\|message\|>(?P<call>.*)<\|call\|>)",
    re.DOTALL,
)


@pytest.fixture(scope="module")
def model():
    return build_model(FOLDER, ModelSettings(device=torch.device("cpu"), selfcheck="off"))


@pytest.fixture(scope="module")
def grammars(model):
    """One compiler for the whole file: its process takes seconds to start."""
    return EngineCore(EngineConfig(model=FOLDER, device="cpu"), model)._compiling._compiler


def bound(request_id, format_, **sampling):
    sampling = {"temperature": 1.5, "max_tokens": 160} | sampling
    item = request(request_id, PROMPT, **sampling)
    return msgspec.structs.replace(item, grammar=GrammarSpec.of(format_, param="response_format"))


SETTINGS = (
    {"overlap": True, "max_num_batched_tokens": 8, "max_num_seqs": 8},  # the prompt is read in three parts
    {"overlap": False, "num_pages": 46, "page_size": 4},  # too few pages for all of them
)


@rows("settings", *SETTINGS)
def test_answers_are_valid_at_temperature_15(model, grammars, settings):
    config = EngineConfig(model=FOLDER, device="cpu", **settings)
    core = EngineCore(config, model, grammars=grammars)
    asked = [
        bound(f"{name} {kind} {seed}", format_, seed=seed, logprobs=1 if seed else None)
        for name, schema in SCHEMAS.items()
        for kind, format_ in (("json", json_schema(schema, max_whitespace=1)), ("turn", turn(schema)))
        for seed in range(2)
    ]
    outputs = run_all(core, asked)
    for item in asked:
        name, kind, _ = item.request_id.split()
        its = outputs[item.request_id]
        assert its[-1].finish_reason == "stop", item.request_id
        answer = TOKENIZER.decode(tokens_of(its) if kind == "turn" else tokens_of(its)[:-1])
        if kind == "turn":
            found = TURN.fullmatch(answer)
            assert found, answer
            answer = found["final"] or found["call"]
        assert jsonschema_rs.is_valid(SCHEMAS[name], json.loads(answer)), answer
        logprobs = [entry for output in its for entry in output.logprobs or []]
        assert [entry.token_id for entry in logprobs] == (tokens_of(its) if item.sampling.logprobs else [])
    assert bool(core.stats().num_preemptions) == ("num_pages" in settings)
    assert core.stats().num_pages_used == 0


def test_a_model_that_would_answer_so_anyway_is_not_changed(model, grammars):
    """Greedy, with a grammar that allows every turn: the tokens are those of the model alone."""
    config = EngineConfig(model=FOLDER, device="cpu")
    free = {"type": "any_tokens", "exclude_tokens": []}
    item = bound("a", free, temperature=0.0)
    alone = msgspec.structs.replace(item, grammar=None)
    got = run_all(EngineCore(config, model, grammars=grammars), [item])["a"]
    want = run_all(EngineCore(config, model), [alone])["a"]
    assert tokens_of(got) == tokens_of(want)
    assert tokens_of(got)[-1] == RETURN
    assert "Paris" in TOKENIZER.decode(tokens_of(got))


@pytest.mark.processes
def test_the_engine_process_compiles_what_comes_over_its_socket():
    async def ask():
        client = EngineClient(EngineConfig(model=FOLDER, device="cpu", num_pages=256, max_model_len=256))
        await client.start()
        try:
            while not client.ready:
                assert client.failure is None
                await asyncio.sleep(0.05)
            answers = []
            for format_ in (json_schema(SCHEMAS["either"], max_whitespace=1), json_schema({"type": "objct"})):
                stream = client.generate(bound("a", format_, seed=3))
                answers.append([output async for output in stream])
            return answers
        finally:
            await client.close()

    good, [refusal] = asyncio.run(ask())
    assert jsonschema_rs.is_valid(SCHEMAS["either"], json.loads(TOKENIZER.decode(tokens_of(good)[:-1])))
    assert (refusal.error_param, refusal.finish_reason) == ("response_format", "error")
    assert "objct" in refusal.error
