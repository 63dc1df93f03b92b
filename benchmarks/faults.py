"""Plants faults into a server, one at a time, and says which checks see each: self-check, KL divergence, tiny evals.

    python -m benchmarks.faults [--items 45] [--questions 30] [--faults NAME,...] [--limit-minutes 20]

The self-check checks all layers while they load. Then the same fault serves, with the self-check off: its next-token
distributions are compared with those of the sound server over the same sequences, and its answers item by item. Two
rows are no faults but the noise that a KL divergence must exceed three times to be seen: `again` is the sound server
once more with another batch size, `bf16` the same model in bf16. A comparison of two servers in fp32 is as sharp as the
first, one across dtypes or kernels as the second. Answers count as seen where McNemar's test says p < 0.05. Rows are
written as they come, and rows that the file has already are kept, so the command can be repeated until all are there.
`--table` prints the table of docs/accuracy.md from the file. The last line is JSON.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.planted import FAULTS
from evals import texts, tiny
from evals.client import Client
from evals.compare import pairs_of
from evals.distributions import Scores, difference, score
from evals.results import Run
from evals.servers import serving
from evals.stats import paired
from model.config import ModelSettings
from model.registry import build_model
from moe.errors import SelfCheckError
from server.model_source import bundled_models

FAULTY = """
import functools, sys
import engine.client, server.service
from server.start import main
server.service.EngineClient = functools.partial(engine.client.EngineClient, worker_module="benchmarks.fault_worker")
sys.exit(main())
"""
SOUND = "sound"
NOISE = {
    "again": ("no fault, another batch size", ["--max-num-seqs", "3"]),
    "bf16": ("no fault, bf16 instead of fp32", ["--dtype", "bfloat16"]),
}
"""Name of each row without a fault: what it is in words, and the flags of its server."""
TIMES_NOISE, ALPHA = 3.0, 0.05
CONCURRENCY = 8


def self_check(fault: str, model: str, device: str) -> str | None:
    """What the self-check of all layers says; None if it sees nothing."""
    settings = ModelSettings(device=torch.device(device), selfcheck="all")
    try:
        with ExitStack() as planted:
            if fault in FAULTS:
                planted.enter_context(FAULTS[fault][1]())
            build_model(bundled_models() / model, settings)
    except SelfCheckError as error:
        return str(error)
    return None


def served(name: str, args: argparse.Namespace, folder: Path, sound: Scores | None) -> tuple[Scores, Run]:
    """Scores and answers of a server with a fault, of `SOUND` or of `NOISE`; sequences are the sound server's own."""
    flags = ["--port", "0", "--model", args.model, "--device", args.device, "--selfcheck", "off"]
    flags += NOISE[name][1] if name in NOISE else []
    fault = name if name in FAULTS else ""
    command = [sys.executable, "-c", FAULTY, *flags]
    with serving(command, folder / f"{name}.log", {"PLANTED_FAULT": fault}) as url:
        client = Client(base_url=url, model=args.model)
        sequences = sound.sequences if sound else texts.from_questions(client, args.questions, CONCURRENCY)
        scores = score(client, sequences, CONCURRENCY)
        items = []
        for category, chosen in tiny.spread(tiny.load([], None), args.items).items():
            items += tiny.evaluate(client, category, chosen, {"temperature": 0, "max_tokens": 200}, CONCURRENCY)[0]
    return scores, Run(eval="tiny", settings={}, server={"fault": name}, items=items)


def row_of(name: str, args: argparse.Namespace, folder: Path, sound: tuple[Scores, Run]) -> dict[str, Any]:
    """Everything that was found about one fault, or one of the `NOISE`."""
    scores, run = served(name, args, folder, sound[0])
    found = difference(sound[0], scores)
    pairs = pairs_of(sound[1], run)
    result = paired([one.score for one, _ in pairs], [other.score for _, other in pairs])
    return {
        "what": (FAULTS | NOISE)[name][0],
        "self_check": self_check(name, args.model, args.device) if name in FAULTS else None,
        "top1_agreement": found["top1_agreement"], "kl_lower_bound": found["kl_lower_bound"],
        "right": sum(item.score == 1 for item in run.items), "right_sound": sum(one.score == 1 for one, _ in pairs),
        "items": len(run.items), "p": result.p, "same_answer": sum(one.answer == other.answer for one, other in pairs),
    }  # fmt: skip


def seen_by(row: dict[str, Any], rows: dict[str, Any]) -> dict[str, bool]:
    """Which checks see a fault; `KL again` and `KL bf16` are the same divergence above either noise."""
    divergence = row["kl_lower_bound"]["mean"]
    above = {f"KL {name}": divergence > TIMES_NOISE * rows[name]["kl_lower_bound"]["mean"] for name in NOISE}
    return {"self-check": row["self_check"] is not None, **above, "tiny evals": row["p"] < ALPHA}


def table(content: dict[str, Any]) -> str:
    """The rows as Markdown; what sees a fault is bold."""
    rows = content["rows"]
    lines = [
        "| fault | self-check | KL, mean | seen in fp32 | seen across dtypes | same best token | right answers, p |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        seen = {} if name in NOISE else seen_by(row, rows)
        place = re.search(r"expert \d+", row["self_check"] or "")
        cells = [
            (f"names {place[0]}" if place else "error" if row["self_check"] else "nothing", "self-check"),
            (f"{row['kl_lower_bound']['mean']:.2g}", ""),
            *((("yes" if seen[key] else "no") if seen else "noise", key) for key in ("KL again", "KL bf16")),
            (f"{100 * row['top1_agreement']:.1f} %", ""),
            (f"{row['right']} of {row['items']}, {row['p']:.2g}", "tiny evals"),
        ]
        marked = [f"**{text}**" if seen.get(key) else text for text, key in cells]
        lines.append(f"| {row['what']} | {' | '.join(marked)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 if every planted fault is seen by something, 1 if not, or if rows are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-gpt-oss")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--items", type=int, default=45, help="items of the tiny evals")
    parser.add_argument("--questions", type=int, default=30, help="bundled questions whose tokens are scored")
    parser.add_argument("--faults", type=lambda text: text.split(","), default=list(FAULTS), help=", ".join(FAULTS))
    parser.add_argument("--limit-minutes", type=float, default=60.0, help="begin no other fault after so long")
    parser.add_argument("--out", default="faults_cpu", help="name of the result file")
    parser.add_argument("--table", action="store_true", help="only print the table")
    args = parser.parse_args(argv)
    path = record.RESULTS / f"{args.out}.json"
    if args.table:
        print(table(json.loads(path.read_text())))
        return 0
    if unknown := set(args.faults) - FAULTS.keys():
        parser.error(f"--faults {','.join(sorted(unknown))}: known are {', '.join(FAULTS)}")
    settings = {"model": args.model, "device": args.device, "items": args.items, "questions": args.questions}
    content = json.loads(path.read_text()) if path.exists() else {"settings": settings, "rows": {}}
    if content["settings"] != settings:
        parser.error(f"{path} has rows of other settings, {content['settings']}: give another --out")
    end_s = time.monotonic() + 60 * args.limit_minutes
    missing = [name for name in (*NOISE, *args.faults) if name not in content["rows"]]
    if missing:
        with tempfile.TemporaryDirectory() as folder:
            sound = served(SOUND, args, Path(folder), None)
            for name in missing:
                if time.monotonic() > end_s:
                    break
                content["rows"][name] = row_of(name, args, Path(folder), sound)
                content["environment"] = record.environment()
                record.write(args.out, content)
                print(name, json.dumps(content["rows"][name]), flush=True)
    rows = content["rows"]
    print(table(content))
    unseen = [name for name in args.faults if name in rows and not any(seen_by(rows[name], rows).values())]
    left = [name for name in args.faults if name not in rows]
    print(json.dumps({"faults": len(args.faults), "unseen": unseen, "not_run": left}))
    return 0 if not unseen and not left else 1


if __name__ == "__main__":
    sys.exit(main())
