"""The pages are whole: links lead somewhere, generated pages are as the code has them, every error has an entry."""

import ast
import functools
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.write_paths_page import PAGE as PATHS_PAGE
from scripts.write_paths_page import paths_page
from scripts.write_results_page import PAGE as RESULTS_PAGE
from scripts.write_results_page import results_page, section
from server import cli

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted(DOCS.glob("*.md")),
    *sorted(ROOT.glob("assets/*/README.md")),
]
TROUBLE = (DOCS / "troubleshooting.md").read_text()
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Those of a page's headings, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(FENCED.sub("", page.read_text())):
        name, _, anchor = target.partition("#")
        if re.match(r"\w+:", target):
            continue
        file = page if not name else (page.parent / name).resolve()
        if not file.exists() or (DOCS in page.parents and DOCS not in file.parents):
            yield f"{page.name}: {target} does not lead to a file of the repository, or out of the site"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
            yield f"{page.name}: {target} names no heading"


def test_every_link_leads_somewhere() -> None:
    assert [fault for page in PAGES for fault in broken_links(page)] == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b\n[x](#a-b) [y](#c) [z](no.md) [w](https://x)\n```\n[v](no)\n```\n")
    assert [fault.split(": ")[1].split()[0] for fault in broken_links(page)] == ["#c", "no.md"]


def test_every_page_is_on_the_site() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def files(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for part in entry.values() if isinstance(entry, dict) else entry:
                yield from files(part)

    listed = list(files(site["nav"]))
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md")), "name the page in mkdocs.yml's nav"


@pytest.mark.parametrize(("page", "written"), [(PATHS_PAGE, paths_page), (RESULTS_PAGE, results_page)])
def test_a_generated_page_is_as_the_code_has_it(page: Path, written: Callable[[], str]) -> None:
    assert page.read_text() == written(), "run `make pages`"


def test_a_record_must_say_how_and_where_it_was_measured() -> None:
    with pytest.raises(ValueError, match="neither by which command"):
        section(Path("x.json"), {"card": "H100"})
    with pytest.raises(ValueError, match="on which hardware"):
        section(Path("x.json"), {"command": "python -m benchmarks.bench_cpu"})


@functools.cache
def nodes() -> list[ast.AST]:
    """Of all files of the five packages."""
    packages = (ROOT / package for package in ("moe", "loaders", "model", "engine", "server"))
    files = (path for package in packages for path in package.rglob("*.py"))
    return [node for path in files for node in ast.walk(ast.parse(path.read_text()))]


def error_classes() -> set[str]:
    """Names of all exceptions that the five packages declare, by their bases."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for node in nodes()
        if isinstance(node, ast.ClassDef)
    }
    known = {"BaseException", "Exception", "ValueError", "RuntimeError", "OSError", "TypeError", "KeyError"}
    while more := {name for name, above in bases.items() if above & known} - known:
        known |= more
    return known & bases.keys()


def test_every_error_class_has_its_entry() -> None:
    entries = re.findall(r"^\| `(\w+)` \|", TROUBLE, re.MULTILINE)
    assert len(entries) == len(set(entries)), "an entry stands twice"
    assert set(entries) == error_classes()


STARTS = {
    "--model nowhere": "does not exist; give the folder of a checkpoint",
    "--model {empty}": "is not a checkpoint: it has no",
    "--host 192.0.2.1": "cannot listen on",
    "--max-num-seq 3": "unrecognized arguments",
    "--config {unknown_key}": "there is no setting",
    "--ssl-certfile {unknown_key} --port 0": "holds no certificate in PEM form",
    "--expert-parallel-size 2": "must divide the",
}


@pytest.mark.parametrize("flags", STARTS)
def test_common_errors_at_start_have_their_entry(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.yaml").write_text("unknown: 1\n")
    words = flags.format(empty=tmp_path / "empty", unknown_key=tmp_path / "file.yaml").split()
    may_pass = words == ["--host", "192.0.2.1"]  # an interface may get the address later
    assert cli.main(words) == (1 if may_pass else 2)
    assert STARTS[flags] in capsys.readouterr().err
    assert STARTS[flags] in TROUBLE


def test_every_message_of_the_page_is_one_of_the_code() -> None:
    """Words between the parts that a message fills in, so the search ignores how the code breaks its strings."""
    code = "\n".join(
        "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        if isinstance(node, ast.JoinedStr)
        else str(node.value)
        for node in nodes()
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    )
    headings = re.findall(r"^### (.+)$", TROUBLE.split("## While it serves")[0], re.MULTILINE)
    assert len(headings) > 15
    assert [text for text in headings if text.partition("; known:")[0] not in code] == []


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    versions = re.findall(r"^## \[?([\w.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    package = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert package is not None
    assert versions[0] == "Unreleased"
    assert versions[1] == package[1]


def test_the_site_asks_nothing_from_outside() -> None:
    """What the built site asks is checked by `make docs`; here, that its settings name no font or script."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert site["theme"]["font"] is False
    assert "extra_javascript" not in site
    assert subprocess.run(["bash", "-n", ROOT / "scripts" / "docs"], check=False).returncode == 0
