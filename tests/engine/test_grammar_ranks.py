"""Grammars where several ranks run a step: only the rank that schedules follows them, the others see plain steps."""

from pathlib import Path

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.grammar_spec import regex, text
from engine.runner import ModelRunner
from tests.engine.fakes import FakeModel
from tests.engine.grammars import bound, compiler, make_core, text_of
from tests.engine.requests import request, run_all, tokens_of
from tests.engine.test_ranks_policy import Links


def test_answers_are_those_of_one_rank_and_followers_need_no_grammar():
    items = [
        bound("word", text("abc")),
        bound("number", regex("[0-9]{3,5}"), prompt=range(1, 20)),
        request("free", [7], 9, ignore_eos=True),
    ]
    links = Links()
    config = EngineConfig(
        model=Path("unused"), device="cpu", page_size=4, num_pages=64, max_num_seqs=8, max_num_batched_tokens=16
    )
    core = EngineCore(config, FakeModel(), ranks=links, grammars=compiler())
    answers = {name: tokens_of(outputs) for name, outputs in run_all(core, items).items()}
    assert answers == {name: tokens_of(outputs) for name, outputs in run_all(make_core(), items).items()}
    assert text_of(answers["word"][:-1]) == "abc"
    follower = ModelRunner(FakeModel(), core._runner.kv, page_size=4, max_num_seqs=8, max_model_len=256)
    for step in links.sent:
        follower.launch(type(step).unpack(memoryview(step.pack())))
    assert len(links.sent) == core.stats().num_steps >= 9
