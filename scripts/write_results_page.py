"""Writes docs/results.md from the records in benchmarks/results. Run it with `make pages` after adding one."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
_HEAD = """# Results

`make pages` writes this page from the records in `benchmarks/results`. Each names the command that measured it, the
hardware and the commit; run the command there to measure again. [Performance](performance.md) and
[kernels](kernels.md) say what the figures mean.

`moe-serve bench plot RECORD.json --out FILE.png` draws the records of expert layers and of services, and what
`moe-serve bench --json` wrote.

![One expert layer on an H100, microseconds by number of tokens](pictures/moe_h100.png)

The same with tokens that prefer some experts (zipf):

![One expert layer on an H100, zipf routing](pictures/moe_zipf_h100.png)

## Records
"""
_MODULE = re.compile(r"python3? (?:-m (?P<module>benchmarks\.\w+)|(?P<script>scripts/\w+\.py))")


def results_page(folder: Path = RECORDS) -> str:
    """The page: a section for every record."""
    return _HEAD + "".join(section(path, json.loads(path.read_text())) for path in sorted(folder.glob("*.json")))


def section(path: Path, record: dict[str, Any]) -> str:
    """What a record says of itself. Raises ValueError if it says neither a command nor a note, or no hardware."""
    commands, cards, cpus, notes = (list(found(record, name)) for name in ("command", "card", "cpu", "note"))
    commits = sorted({text for name in ("commit", "commit_now") for text in found(record, name)})
    if not commands and not notes:
        raise ValueError(f"{path.name} says neither by which command it was measured nor a note")
    if not cards and not cpus:
        raise ValueError(f"{path.name} does not say on which hardware it was measured")
    where = cards or [f"{cpu}, {threads} threads" for cpu, threads in zip(cpus, found(record, "threads"), strict=False)]
    lines = [f"\n### {path.name}\n"]
    if commands and (said := what_is_measured(commands[0])):
        lines.append(f"{said}\n")
    lines += [f"- note: {text}" for text in notes]
    lines.append(f"- hardware: {', '.join(dict.fromkeys(where))}")
    lines.append(f"- commit: {', '.join(commits) or 'not noted'}")
    lines += [f"- command: `{text}`" if "`" not in text else f"- command: {text}" for text in dict.fromkeys(commands)]
    return "\n".join(lines) + "\n"


def found(record: Any, name: str) -> Iterator[str]:
    """Values of a key in the record, its parts and their rows, in order; not those that are null."""
    if isinstance(record, dict):
        if record.get(name) is not None and not isinstance(record[name], dict | list):
            yield str(record[name])
        for value in record.values():
            yield from found(value, name)
    elif isinstance(record, list):
        for value in record:
            yield from found(value, name)


def what_is_measured(command: str) -> str:
    """The first sentence of the program that a command runs; empty if it is none of ours."""
    match = _MODULE.search(command)
    if match is None:
        return ""
    file = ROOT / (match["script"] or match["module"].replace(".", "/") + ".py")
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


if __name__ == "__main__":
    PAGE.write_text(results_page())
