"""A run as one HTML page: scores with their intervals, then every transcript. It loads nothing from elsewhere."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from evals.results import Item, Run

_STYLE = """body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse}td,th{padding:.2rem .8rem;text-align:left;border-bottom:1px solid #ccc}
pre{white-space:pre-wrap;background:#f6f6f6;padding:.6rem;margin:.2rem 0 .8rem}
summary{cursor:pointer}
.right summary::before{content:"\\2713 ";color:#080}
.wrong summary::before{content:"\\2717 ";color:#b00}
.part summary::before{content:"\\00bd ";color:#860}"""


def write_report(run: Run, path: Path) -> None:
    """Write the page."""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{row['items']}</td><td>{row['percent']:.2f}</td>"
        f"<td>{row['interval'][0]:.2f} to {row['interval'][1]:.2f}</td></tr>"
        for name, row in run.summary().items()
    )
    facts = {"settings": run.settings, "server": run.server} | {
        name: value for name, value in run.notes.items() if name != "lm_eval_results"
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(run.eval)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(run.eval)}</h1><table><tr><th>category<th>items<th>per cent<th>95 % interval</tr>{rows}</table>"
        f"<pre>{escape(json.dumps(facts, indent=1, ensure_ascii=False))}</pre>"
        f"{''.join(map(_transcript, run.items))}</html>\n",
        encoding="utf-8",
    )


def _transcript(item: Item) -> str:
    kind = {1.0: "right", 0.0: "wrong"}.get(float(item.score), "part")
    parts = {
        "prompt": item.prompt, "reasoning": str(item.details.get("reasoning", "")), "answer": item.answer,
        "expected": item.expected,
    }  # fmt: skip
    others = {name: value for name, value in item.details.items() if name != "reasoning"}
    if others:
        parts["details"] = json.dumps(others, ensure_ascii=False, default=str)
    shown = "".join(f"{name}<pre>{escape(text)}</pre>" for name, text in parts.items() if text)
    return f"<details class={kind}><summary>{escape(item.id)}, score {item.score:g}</summary>{shown}</details>"
