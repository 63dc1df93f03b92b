"""Grammars that cannot be compiled in time, and the process that finds them: it is killed, and another one starts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from engine.errors import CompilerFailure, GrammarError
from engine.grammar_check import GrammarChecker, Vocabulary, token_bytes
from engine.grammar_compiler import GrammarCompiler
from engine.grammar_spec import GrammarSpec, regex, text
from tests.engine.grammars import VOCABULARY, bound, compiler, make_core
from tests.engine.requests import request, run_all

DEEP = '{"type":"json_schema","json_schema":' + '{"type":"array","items":' * 4000 + "{}" + "}" * 4000 + "}"


def ends_within(pid, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def checker():
    checker = GrammarChecker(VOCABULARY, timeout_s=0.5)
    yield checker
    checker.close()


@pytest.mark.processes
def test_a_grammar_that_takes_too_long_ends_the_process_and_not_the_next_grammar(checker):
    with pytest.raises(GrammarError, match=r"longer than 0\.5 s"):
        checker.check(DEEP)
    checker._timeout_s = 60.0
    checker.check(GrammarSpec.of(text("abc"), param="x").format_json)
    os.kill(checker._process.pid, signal.SIGKILL)
    with pytest.raises(GrammarError, match="too complex"):
        checker.check(GrammarSpec.of(text("abc"), param="x").format_json)


def test_a_grammar_that_is_slow_to_follow_is_refused():
    """It is short and compiled at once, but every token doubles what its text may mean."""
    slow = regex("((a{1,100}){1,100}){1,100}")
    outputs = run_all(make_core(), [bound("slow", slow), request("fine", [7], 6, ignore_eos=True)])
    assert outputs["slow"][-1].finish_reason == "error"
    assert "longer than" in outputs["slow"][-1].error
    assert outputs["fine"][-1].finish_reason == "length"


@pytest.mark.processes
def test_the_process_ends_with_its_parent_even_while_it_compiles():
    code = (
        "import sys, time; from tests.engine.test_grammar_process import *\n"
        "checker = GrammarChecker(VOCABULARY, timeout_s=60.0)\n"
        "checker.read_tokenizer_info(); print(checker._process.pid, flush=True)\n"
        "checker._connection.send_bytes(DEEP.encode()); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert ends_within(child, 10)


@pytest.mark.processes
def test_a_vocabulary_that_cannot_be_read_is_said_and_not_waited_for(tmp_path):
    broken = GrammarCompiler(
        Vocabulary(source=tmp_path, size=97, eos_ids=frozenset({0})), timeout_s=1.0, cache_bytes=1 << 20
    )
    [refusal] = run_all(make_core(grammars=broken), [bound("a", text("abc"))])["a"]
    assert refusal.finish_reason == "error"
    assert (refusal.error, refusal.error_param) == (str(CompilerFailure()), None), "it is no fault of the client"


@pytest.mark.processes
def test_a_check_that_fails_is_our_fault_and_not_the_grammars(caplog):
    """An end token beyond the vocabulary ended the process, and the client read that its schema was too complex."""
    wrong = msgspec.structs.replace(VOCABULARY, eos_ids=frozenset({VOCABULARY.size}))
    core = make_core(grammars=GrammarCompiler(wrong, timeout_s=60.0, cache_bytes=1 << 20))
    [refusal] = run_all(core, [bound("a", text("abc"))])["a"]
    assert (refusal.error, refusal.error_param) == (str(CompilerFailure()), None)
    assert "IndexError" in caplog.text


def test_a_failure_of_ours_is_tried_again_later(monkeypatch):
    grammars = GrammarCompiler(VOCABULARY, timeout_s=60.0, cache_bytes=1 << 20)
    monkeypatch.setattr(grammars, "_compile", Mock(side_effect=OSError("no process")))
    first = grammars.compile("{}")
    assert isinstance(first.exception(), CompilerFailure)
    assert grammars.compile("{}") is first
    first.exception().raised_s -= 61
    assert grammars.compile("{}") is not first


def test_no_character_begins_like_a_control_token():
    tokens = token_bytes(VOCABULARY)
    assert [tokens[0][:1], tokens[96][:1]] == [b"\xff", b"\xff"]
    assert all(token[:1] != b"\xff" for token in tokens[1:96])


def test_the_cache_keeps_what_was_used_last(monkeypatch):
    kept = compiler()
    monkeypatch.setattr(kept, "_cache_bytes", 0)
    first = kept.compile(GrammarSpec.of(text("cached"), param="x").format_json)
    first.result()
    assert kept.compile(GrammarSpec.of(text("cached"), param="x").format_json) is first
    kept.compile(GrammarSpec.of(text("other"), param="x").format_json).result()
    assert kept.compile(GrammarSpec.of(text("cached"), param="x").format_json) is not first, "it had no room"


def test_an_engine_that_sees_no_grammar_imports_no_xgrammar():
    code = (
        "import sys; from tests.engine.fakes import *; from tests.engine.requests import *\n"
        "run_all(fake_core(), [request('a', [1, 2])])\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('xgrammar', 'tvm_ffi', 'transformers')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
