"""Serves models with every backend, KV dtype, launch mode and number of ranks, and compares each with the reference.

The reference is torch with a bf16 KV cache, eager, on one rank. What is found is written as it comes, and cells that
the file has are kept: with --limit-minutes the same command can be repeated until all are there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from evals import texts, tiny
from evals.client import Client, ServerError, json_object
from evals.compare import pairs_of
from evals.distributions import Scores, difference, score
from evals.files import check_can_write, replace_text
from evals.results import Run
from evals.servers import StartRefused, serving
from evals.stats import paired

BACKENDS = "torch,triton,flashinfer_mxfp4,flashinfer_cutlass,deep_gemm"
PICTURES = (".png", ".svg", ".pdf")
LAUNCHES = {"eager": ["--enforce-eager"], "graphs": []}
CONCURRENCY = 16
OPTIONS = {"temperature": 0, "max_tokens": 400}
_OPEN = "not yet"  # begins the reason of a cell that is tried again


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to serve a model."""

    model: str
    backend: str
    kv: str
    launch: str
    ranks: int

    @property
    def name(self) -> str:
        """Its key in the file."""
        return f"{self.model} {self.backend} {self.kv} {self.launch} {self.ranks}"

    @property
    def reference(self) -> Cell:
        """What it is compared with."""
        return Cell(model=self.model, backend="torch", kv="bfloat16", launch="eager", ranks=1)

    def flags(self, device: str) -> list[str]:
        """Those of the server."""
        return [
            "--port", "0", "--model", self.model, "--device", device, "--moe-backend", self.backend,
            "--kv-cache-dtype", self.kv, "--tensor-parallel-size", str(self.ranks), *LAUNCHES[self.launch],
        ]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the matrix."""
    parser.add_argument("--models", type=_words, default=["tiny-gpt-oss"], help="names or folders [tiny-gpt-oss]")
    parser.add_argument("--backends", type=_words, default=_words(BACKENDS), help=f"[{BACKENDS}]")
    parser.add_argument("--kv", type=_words, default=["bfloat16", "fp8"], help="dtypes of the KV cache [bfloat16,fp8]")
    parser.add_argument("--launches", type=_words, default=list(LAUNCHES), help="[eager,graphs]")
    parser.add_argument("--ranks", type=lambda text: [int(word) for word in _words(text)], default=[1, 2], help="[1,2]")
    parser.add_argument("--device", default="auto", help="of the servers [auto]")
    parser.add_argument("--items", type=int, default=90, help="items of the tiny evals for each cell [90]")
    parser.add_argument("--questions", type=int, default=60, help="questions whose answers are scored [60]")
    parser.add_argument(
        "--fields", type=json_object, default={}, metavar="JSON",
        help='more fields of each eval request, such as {"reasoning_effort": "high"}',
    )  # fmt: skip
    parser.add_argument("--limit-minutes", type=float, default=60.0, help="begin no other cell after so long [60]")
    parser.add_argument("--out", type=Path, default=Path("evals-out/matrix.json"), help="[evals-out/matrix.json]")
    parser.add_argument("--plot", type=Path, help="file for a picture of the table; needs matplotlib")


def _words(text: str) -> list[str]:
    return text.split(",")


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """Every cell, each model's reference first. Raises ValueError for an unknown launch mode."""
    if unknown := set(args.launches) - LAUNCHES.keys():
        raise ValueError(f"--launches {', '.join(sorted(unknown))}: known are {', '.join(LAUNCHES)}")
    cells: dict[Cell, None] = {}
    for model in args.models:
        for backend, kv, launch, ranks in itertools.product(args.backends, args.kv, args.launches, args.ranks):
            cell = Cell(model=model, backend=backend, kv=kv, launch=launch, ranks=ranks)
            cells |= {cell.reference: None, cell: None}
    return list(cells)


class Matrix:
    """The file of the matrix, and the folder beside it with the references' scores and answers, and all logs."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Read what the file has.

        Raises:
            ValueError: its name does not end in .json, it is none of ours, or was made with other settings.
            OSError: it cannot be read.
        """
        if args.out.suffix != ".json":
            raise ValueError(f"--out {args.out} must end in .json: without that it is the folder of scores and logs")
        check_can_write("--out", args.out)
        self._args = args
        self._path: Path = args.out
        self._folder = self._path.with_suffix("")
        settings = {"device": args.device, "items": args.items, "questions": args.questions, "fields": args.fields}
        self.content: dict[str, Any] = {"eval": "matrix", "settings": settings, "cells": {}}
        if self._path.exists():
            try:
                self.content = json.loads(self._path.read_text(encoding="utf-8"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{self._path} is damaged: {error}: remove it, or give another --out") from error
            if not isinstance(self.content, dict) or not isinstance(self.content.get("cells"), dict):
                raise ValueError(f"{self._path} is not a file of this command: give another --out")
            if self.content.get("settings") != settings:
                raise ValueError(
                    f"{self._path} has cells of other settings, {self.content.get('settings')}: give another --out"
                )

    def run(self, cell: Cell) -> dict[str, Any]:
        """Fill one cell, unless it is there. One stays open if its server failed, other than by refusing to start."""
        cells = self.content["cells"]
        if cell.name in cells:
            known: dict[str, Any] = cells[cell.name]
            return known
        row = asdict(cell) | self._found(cell)
        if not _is_open(row):
            cells[cell.name] = row
            replace_text(self._path, json.dumps(self.content, indent=1) + "\n")
        return row

    def _found(self, cell: Cell) -> dict[str, Any]:
        """What is known of a cell: `figures`, or the `reason` why there are none, or not yet."""
        if cell != cell.reference:
            reference = self.content["cells"].get(cell.reference.name)
            if reference is None:
                return {"reason": f"{_OPEN}: its reference has not run"}
            if "reason" in reference:
                return {"reason": f"no reference: {reference['reason']}"}
            if cell.launch == "graphs" and reference["figures"]["device"] == "cpu":
                return {"reason": "a CPU has no CUDA graphs"}
        log = self._file(cell.name.replace(" ", "-"), ".log")
        start_s = time.monotonic()
        try:
            with serving([sys.executable, "-m", "server", *cell.flags(self._args.device)], log) as url:
                try:
                    figures = self._measured(cell, url)
                except ServerError as error:
                    return {"reason": f"{_OPEN}: the server failed after it was ready: {error}; its log is {log}"}
                return {"figures": figures | {"seconds": round(time.monotonic() - start_s, 1)}}
        except ServerError as error:
            return {"reason": str(error) if isinstance(error, StartRefused) else f"{_OPEN}: {error}"}

    def _file(self, name: str, ending: str) -> Path:
        """One for each name, also if names hold dots or slashes."""
        return self._folder / f"{quote(name, safe='')}{ending}"

    def _measured(self, cell: Cell, url: str) -> dict[str, Any]:
        client = Client(base_url=url)
        client = Client(base_url=url, model=client.first_model(), timeout_s=900.0, patience_s=60.0)
        engine = client.get("//health/ready")["engine"]
        scores_path, run_path = (self._file(cell.model, ending) for ending in (".scores.json", ".answers.json"))
        is_reference = cell == cell.reference
        if is_reference:
            sequences = texts.from_questions(client, self._args.questions, CONCURRENCY)
        else:
            first_scores, first_run = Scores.read(scores_path), Run.read(run_path)
            for path, model in ((scores_path, first_scores.model), (run_path, first_run.server.get("model"))):
                if model != cell.model:
                    raise ValueError(f"{path} is of the model {model!r}, not of {cell.model!r}: give another --out")
            sequences = first_scores.sequences
        scores = replace(score(client, sequences, CONCURRENCY), model=cell.model)
        options, items = OPTIONS | self._args.fields, []
        for category, chosen in tiny.spread(tiny.load([], None), self._args.items).items():
            items += tiny.evaluate(client, category, chosen, options, CONCURRENCY)[0]
        run = Run(eval="tiny", settings=options, server={"cell": cell.name, "model": cell.model}, items=items)
        if is_reference:
            scores.write(scores_path)
            run.write(run_path)
            first_scores, first_run = scores, run
        pairs = pairs_of(first_run, run)
        result = paired([one.score for one, _ in pairs], [other.score for _, other in pairs])
        return {
            "device": engine["device"], "dtype": engine["dtype"],
            "paths": dict(Counter(line.partition(": ")[2] for line in engine["moe_paths"])),
            "items": len(items), "right": sum(item.score == 1 for item in items), "p": result.p,
            "same_answer": sum(one.answer == other.answer for one, other in pairs),
        } | difference(first_scores, scores)  # fmt: skip


def _is_open(row: dict[str, Any]) -> bool:
    """Whether the same command, repeated, tries a cell again."""
    return str(row.get("reason", "")).startswith(_OPEN)


def table(rows: list[dict[str, Any]]) -> str:
    """The cells that ran as a Markdown table, then the others by their reason."""
    lines = [
        "| model | backend | KV | launch | ranks | right | same answer | p | same best token | KL, mean | KL, p99 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        names = [str(row[name]) for name in ("model", "backend", "kv", "launch", "ranks")]
        if "figures" not in row:
            reasons.setdefault(row["reason"], []).append(" ".join(names))
            continue
        found = row["figures"]
        kl = found["kl_lower_bound"]
        cells = [
            *names, f"{found['right']} of {found['items']}", str(found["same_answer"]), f"{found['p']:.2g}",
            f"{100 * found['top1_agreement']:.2f} %", f"{kl['mean']:.2g}", f"{kl['p99']:.2g}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    for reason, names in reasons.items():
        lines.append(f"\nNot run, {len(names)}: {reason}\n" + "\n".join(f"- {name}" for name in names))
    return "\n".join(lines)


def figure_class() -> Any:
    """Of matplotlib, which is none of our dependencies. Raises ValueError if it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: `pip install matplotlib`, or leave --plot out") from error
    return Figure


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw KL divergence and right answers of the cells that ran. Raises ValueError if there is no matplotlib."""
    ran = [row for row in rows if "figures" in row]
    names = [" ".join(str(row[name]) for name in ("model", "backend", "kv", "launch", "ranks")) for row in ran]
    figure = figure_class()(figsize=(11, 1.2 + 0.35 * len(ran)), layout="constrained")
    divergence, right = figure.subplots(1, 2, sharey=True)
    divergence.barh(names, [max(1e-12, row["figures"]["kl_lower_bound"]["mean"]) for row in ran])
    divergence.set(xscale="log", xlabel="KL from the reference, mean (nats)")
    right.barh(names, [100 * row["figures"]["right"] / row["figures"]["items"] for row in ran])
    right.set(xlabel="right answers, per cent", xlim=(0, 100))
    divergence.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(args: argparse.Namespace) -> int:
    """Exit status 0 if every cell is known: has figures, or the reason why it cannot run.

    It is 1 if cells are open, since time was over or a server failed, and 2 if not one cell can run.
    Wrong flags are refused before the first server starts.
    """
    if args.plot:  # before hours of cells, not after
        figure_class()
        if args.plot.suffix.lower() not in PICTURES:
            raise ValueError(f"--plot {args.plot} must end in {', '.join(PICTURES)}")
        check_can_write("--plot", args.plot)
    for flag, count in (("--items", args.items), ("--questions", args.questions)):
        tiny.spread(tiny.load([], None), count, flag=flag)
    cells = cells_of(args)
    matrix, end_s = Matrix(args), time.monotonic() + 60 * args.limit_minutes
    rows = []
    for cell in cells:
        if cell.name not in matrix.content["cells"] and time.monotonic() > end_s:
            rows.append(asdict(cell) | {"reason": f"{_OPEN}: --limit-minutes was over"})
            continue
        rows.append(matrix.run(cell))
        print(f"{cell.name}: {rows[-1].get('reason') or 'done'}", file=sys.stderr, flush=True)
    print(table(rows))
    if args.plot:
        plot(rows, args.plot)
    waiting = sum(map(_is_open, rows))
    ran = sum("figures" in row for row in rows)
    print(json.dumps({"eval": "matrix", "out": str(args.out), "cells": len(rows), "ran": ran, "waiting": waiting}))
    if waiting:
        return 1
    return 0 if ran else 2
