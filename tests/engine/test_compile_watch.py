"""Kernels compiled after ready are counted: Triton's by its listener, libraries' by the programs that they run."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from engine.compile_watch import CompileWatch, is_build


@pytest.fixture
def watch(monkeypatch):
    """It hears of Triton's kernels only: an audit hook stays until its process ends, and slows all later tests."""
    monkeypatch.setattr(sys, "addaudithook", lambda hook: None)
    watch = CompileWatch()
    yield watch
    watch.end()


@pytest.fixture
def knobs(monkeypatch):
    """Triton's settings as far as the watch needs them."""
    knobs = SimpleNamespace(compilation=SimpleNamespace(listener=None))
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    return knobs


def report(knobs, **changes):
    fields = {"src": SimpleNamespace(name="gemm"), "metadata": {}, "metadata_group": {}, "times": None}
    knobs.compilation.listener(**fields | {"cache_hit": False} | changes)


def test_kernels_count_from_ready_on_whether_compiled_or_loaded(watch, knobs, caplog):
    watch.begin()
    assert watch.count == 0
    report(knobs)
    report(knobs, cache_hit=True)
    assert watch.count == 2
    assert "Triton kernel gemm was compiled after the service was ready" in caplog.text
    assert "Triton kernel gemm was loaded from Triton's cache" in caplog.text
    watch.end()
    assert knobs.compilation.listener is None


def test_another_listener_still_hears_everything(watch, knobs):
    heard = []
    knobs.compilation.listener = lambda **report: heard.append(report["cache_hit"])
    watch.begin()
    report(knobs)
    report(knobs, cache_hit=True)
    assert (watch.count, heard) == (2, [False, True])


def test_triton_itself_reports_a_compilation(watch, tmp_path, monkeypatch):
    """A real `triton.compile` for a card that is not here: up to Triton's own intermediate code, no driver needed."""
    program = """
import sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.compile_watch import CompileWatch
from tests.engine.triton_example import double
source = ASTSource(fn=double, signature={"x": "*fp32", "BLOCK": "constexpr"}, constexprs={(1,): 64})
target = GPUTarget("cuda", 90, 32)
triton.compile(source, target=target)
watch = CompileWatch()
watch.begin()
assert watch.count == 0
triton.compile(source, target=target)
print(watch.count)
source = ASTSource(fn=double, signature={"x": "*fp32", "BLOCK": "constexpr"}, constexprs={(1,): 128})
triton.compile(source, target=target)
print(watch.count)
"""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "2"]


def test_a_build_of_a_library_counts(tmp_path):
    program = """
import subprocess, sys
from engine.compile_watch import CompileWatch
ninja, nvcc = sys.argv[1:]
watch = CompileWatch()
subprocess.run([ninja, "-C", "build"], check=True)
watch.begin()
print(watch.count)
subprocess.run([ninja, "-C", "build"], check=True)
subprocess.run([nvcc, "a.cu", "-o", "a.o"], check=True)
subprocess.run([nvcc, "--version"], check=True)
subprocess.run(["true"], check=True)
print(watch.count)
watch.end()
subprocess.run([ninja], check=True)
print(watch.count)
"""
    tools = [tmp_path / "ninja", tmp_path / "nvcc"]
    for tool in tools:
        tool.write_text("#!/bin/sh\n")
        tool.chmod(0o755)
    command = [sys.executable, "-c", program, *map(str, tools)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "2", "2"]


def test_questions_to_a_compiler_are_no_builds():
    assert is_build(["/usr/bin/ninja", "-v"])
    assert is_build(["g++", "-shared", "a.cpp", "-o", "a.so"])
    assert not is_build(["ninja", "--version"])
    assert not is_build(["c++", "-dumpfullversion", "-dumpversion"])
    assert not is_build(["python", "-o", "x"])
