"""Runs a well-known eval through lm-eval: gsm8k, mmlu, gpqa, ifeval, aime, or any task that lm-eval or a folder has."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evals.client import add_server_arguments, json_object, make_client
from evals.files import check_can_write
from evals.report import write_report
from evals.results import Run
from evals.tasks import FORMS, TASKS, Task

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-lm-eval" / "bin" / "python"


class HarnessError(ValueError):
    """lm-eval could not run the tasks; the message says why and what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of an eval."""
    parser.add_argument("names", nargs="+", metavar="EVAL", help=f"{', '.join(TASKS)}, or the name of an lm-eval task")
    add_server_arguments(parser)
    parser.add_argument(
        "--form", choices=FORMS, default="chat",
        help="chat: the final channel of an answer is scored; completions: raw prompts, and log-likelihoods of choices",
    )  # fmt: skip
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", type=Path, help="folder with the datasets as OWNER/NAME; the hub is not asked")
    source.add_argument("--offline", action="store_true", help="only data that the hub's cache on this machine has")
    parser.add_argument("--tasks-folder", type=Path, help="folder with task files of your own, in lm-eval's format")
    parser.add_argument("--limit", type=int, help="first items of each task only")
    parser.add_argument("--num-fewshot", type=int, help="examples before each question; default: the task's number")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--max-tokens", type=int, help="of an answer; default: in a chat what the server allows, else the task's"
    )
    parser.add_argument("--seed", type=int, default=0, help="of examples, shuffled choices and sampling [0]")
    parser.add_argument("--fields", type=json_object, default={}, metavar="JSON", help="more fields of each request")
    parser.add_argument("--out", type=Path, help="folder for NAME.json and NAME.html of each eval [evals-out]")
    parser.add_argument(
        "--lm-eval-python", type=Path, default=PYTHON, help=f"interpreter that has lm-eval [{PYTHON.relative_to(ROOT)}]"
    )


def main(args: argparse.Namespace) -> int:
    """Exit status 0 if every eval ran; scores are reported, not judged."""
    for name, value in (("--limit", args.limit), ("--max-tokens", args.max_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    for name, folder in (("--data", args.data), ("--tasks-folder", args.tasks_folder)):
        if folder is not None and not folder.is_dir():
            raise ValueError(f"{name} {folder} is not a folder")
    if not args.lm_eval_python.exists():
        raise HarnessError(
            f"{args.lm_eval_python} does not exist: `scripts/lm_eval_environment` makes it, or give --lm-eval-python "
            "an interpreter that has lm_eval"
        )
    client = make_client(args)
    out = args.out or Path("evals-out")
    for name in args.names:
        check_can_write("--out", out / f"{name}.json")
    for name in args.names:
        task = TASKS.get(name) or Task(chat=(name,), completions=(name,), scored_by=("", ""))
        run = _run(name, task, args, asdict(client), out)
        write_report(run, out / f"{name}.html")
        _show(run, out / f"{name}.json")
    return 0


def _run(name: str, task: Task, args: argparse.Namespace, client: dict[str, Any], out: Path) -> Run:
    """One eval, in a process of lm-eval's environment. Its progress goes to standard error.

    Raises:
        HarnessError: it failed; the message is the process's own.
    """
    path = (out / f"{name}.json").resolve()
    order = {
        "name": name, "tasks": task.of(args.form), "scored_by": task.scored_by, "client": client, "form": args.form,
        "offline": args.offline or args.data is not None, "limit": args.limit, "num_fewshot": args.num_fewshot,
        "temperature": args.temperature, "max_tokens": args.max_tokens, "seed": args.seed, "fields": args.fields,
        "concurrency": args.concurrency, "out": str(path),
        "tasks_folder": str(args.tasks_folder.resolve()) if args.tasks_folder else None,
    }  # fmt: skip
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    if order["offline"]:
        environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    folder = args.data.resolve() if args.data else None
    if folder is not None:
        environment["NLTK_DATA"] = str(folder / "nltk_data")
    done = subprocess.run(
        [args.lm_eval_python.absolute(), "-m", "evals.harness"], input=json.dumps(order), text=True,
        stdout=subprocess.PIPE, env=environment, cwd=folder, check=False,
        start_new_session=True,  # Ctrl-C is for this process, which ends that one
    )  # fmt: skip
    if done.returncode:
        raise HarnessError(f"{name}: {done.stdout.strip() or f'lm-eval ended with status {done.returncode}'}")
    return Run.read(path)


def _show(run: Run, path: Path) -> None:
    """The table, and a line of JSON."""
    print(f"{run.eval:40} {'items':>6} {'per cent':>9} {'95 % interval':>16}")
    for category, row in run.summary().items():
        low, high = row["interval"]
        print(f"{category:40} {row['items']:6} {row['percent']:9.2f} {low:8.2f}-{high:<7.2f}")
    print(json.dumps({"eval": run.eval, "out": str(path), "summary": run.summary(), "notes": run.notes}), flush=True)
