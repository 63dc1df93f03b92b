"""Writes `model/attention/measured.json`, which `moe-serve explain` reads, from the results of attention benchmarks.

    python -m benchmarks.attention_tables [RESULT.json ...]

By default from `results/attention_h200.json` (`bench_attention`: torch) and, if it is there,
`results/attention_rivals_h200.json` (`attention_rivals`: FlashInfer, its best kernel, with its store where it has one).
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import record
from model.attention import measured

_DEFAULTS = ("attention_h200.json", "attention_rivals_h200.json")
_CARDS = {"NVIDIA H100": "sm90", "NVIDIA H200": "sm90", "NVIDIA B200": "sm100"}
_TARGET = Path(measured.__file__).with_name(measured.TABLE)


def tables_of(result: dict[str, Any], source: str) -> list[dict[str, Any]]:
    """A table for each kind of layer and rival in one result; cases that failed on a side are left out.

    Raises:
        KeyError: a card whose architecture is not listed here.
    """
    card = result["card"]
    arch = next((arch for name, arch in _CARDS.items() if card.startswith(name)), None)
    if arch is None:
        raise KeyError(f"{source}: the architecture of {card} is not listed in _CARDS")
    shares: dict[tuple[str, str], dict[str, float]] = {}
    for row in result["rows"]:
        kind = "latent" if row["layer"].startswith("latent") else "heads"
        times = _times(row)
        for rival in times.keys() - {"triton"}:
            if "triton" in times:
                case = f"{row['layer']}, {row['case']}"
                shares.setdefault((kind, rival), {})[case] = round(times["triton"] / times[rival], 4)
    return [
        {"gpu": arch, "kind": kind, "rival": rival, "card": card, "source": source, "shares": cases}
        for (kind, rival), cases in sorted(shares.items())
    ]


def _times(row: dict[str, Any]) -> dict[str, float]:
    """Microseconds by implementation."""
    if "flashinfer" not in row:
        return {name: row[name]["us"] for name in ("triton", "torch") if "us" in row.get(name, {})}
    rivals = [kernel.get("with_store_us", kernel["us"]) for kernel in row["flashinfer"].values() if "us" in kernel]
    return {"triton": row["us"]} | ({"flashinfer": min(rivals)} if rivals else {})


def main() -> None:
    """Read the results, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path)
    args = parser.parse_args()
    files = args.results or [path for name in _DEFAULTS if (path := record.RESULTS / name).exists()]
    tables = [
        table for path in files for table in tables_of(json.loads(path.read_text()), f"benchmarks/results/{path.name}")
    ]
    _TARGET.write_text(json.dumps({"tables": tables}, indent=1) + "\n")
    print(json.dumps({"file": str(_TARGET), "tables": len(tables)}))


if __name__ == "__main__":
    main()
