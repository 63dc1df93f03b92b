"""House rules that a tool can check: short files, no asserts for user mistakes, packages that say what they export."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "engine", "model", "loaders", "moe", "evals", "benchmarks", "tools", "tests")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PRODUCT = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PACKAGES[:5]]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_file_fits_one_review(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("path", PRODUCT, ids=name)
def test_a_module_says_what_it_does_and_asserts_nothing(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the first line of a file says what it does"
    asserts = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert not asserts, f"asserts vanish under -O: raise an error instead, lines {asserts}"


@pytest.mark.parametrize(
    "package", ["moe", "moe.formats", "moe.backends", "moe.dispatch", "loaders", "engine", "server"]
)
def test_exports_exist(package: str) -> None:
    module = importlib.import_module(package)
    for export in getattr(module, "__all__", []):
        assert hasattr(module, export)
