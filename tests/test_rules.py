"""House rules that a tool can check: short files, no asserts for user mistakes, packages that say what they export."""

import ast
import importlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "engine", "model", "loaders", "moe", "evals", "benchmarks", "tools", "tests")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PRODUCT = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PACKAGES[:5]]


def test_a_file_fits_one_review() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert len(lengths) > 400, "the folders are where they were"
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_a_module_says_what_it_does_and_asserts_nothing() -> None:
    faults = []
    for path in PRODUCT:
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree):
            faults.append(f"{path}: the first line of a file says what it does")
        faults += [
            f"{path}:{node.lineno}: asserts vanish under -O: raise an error instead"
            for node in ast.walk(tree)
            if isinstance(node, ast.Assert)
        ]
    assert faults == []


def test_exports_exist() -> None:
    for package in ("moe", "moe.formats", "moe.backends", "moe.dispatch", "loaders", "engine", "server"):
        module = importlib.import_module(package)
        missing = [export for export in getattr(module, "__all__", []) if not hasattr(module, export)]
        assert missing == [], package


def test_make_processes_finds_its_tests_by_their_mark() -> None:
    """The Makefile looks for the mark's name in files of tests, so no other file may set it."""
    mark = "mark" + ".processes"
    marked = [path for path in (ROOT / "tests").rglob("*.py") if mark in path.read_text()]
    assert len(marked) > 10
    assert [path for path in marked if not path.name.startswith("test_")] == []
