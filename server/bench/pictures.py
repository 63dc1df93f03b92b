"""`moe-serve bench plot`: draws records that were measured before. Needs matplotlib, the extra `bench`.

It knows three kinds of record by their keys: runs of `moe-serve bench --json`, expert layers of
`benchmarks.bench_moe`, and a service beside another one (`benchmarks/results/service_vs_sglang_h200.json`). All files
of one picture are of one kind.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import msgspec

from server import streams
from server.bench.errors import BenchError
from server.bench.layers import draw_layers, rows_of
from server.bench.plot import check_matplotlib, check_suffix, save
from server.settings import Parser

_LATENCIES = {"ttft": "time to first token", "itl": "between tokens"}
_UNITS = {"decode_tok_s": "decode", "input_tok_s": "prefill", "ttft_ms": "first token"}


def make_parser(program: str) -> Parser:
    """The flags of `moe-serve bench plot`."""
    parser = Parser(prog=f"{program} bench plot", description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("records", type=Path, nargs="+", metavar="RECORD.json", help="files of one kind; later rows replace earlier")
    add("--out", type=Path, required=True, help="file for the picture: .png, .svg or .pdf")
    add("--title", help="heading of the picture [what the records say]")
    add("--routing", default="uniform", help="of expert layers: tokens routed evenly (uniform) or zipf [%(default)s]")
    return parser


def plot(argv: Sequence[str], program: str) -> int:
    """Draw; returns 0. Raises BenchError if a file cannot be read, drawn or written."""
    flags = make_parser(program).parse_args(argv)
    check_suffix("--out", flags.out)
    check_matplotlib("bench plot")
    records = {path: read(path) for path in flags.records}
    kinds = {kind_of(path, record).name for path, record in records.items()}
    if len(kinds) > 1:
        raise BenchError(f"the records are of different kinds ({', '.join(sorted(kinds))}): draw each kind by itself")
    kind = next(kind for kind in KINDS if kind.name in kinds)
    kind.draw(records, flags.out, flags.title, flags.routing)
    streams.say(f"{flags.out}\n")
    return 0


def read(path: Path) -> dict[str, Any]:
    """One record. Raises BenchError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise BenchError(f"{path} is no record: it must be a JSON object")
    return found


class _Settings(TypedDict):
    concurrency: float | None
    request_rate: float | None


class _Server(TypedDict):
    model: str
    version: str | None
    url: str


class _Latencies(TypedDict):
    ttft: dict[str, float] | None
    itl: dict[str, float] | None


class _Results(TypedDict):
    output_tokens_per_s: float
    latencies_ms: _Latencies


class _RunRecord(TypedDict):
    is_void: bool
    void_reasons: list[str]
    server: _Server
    settings: _Settings
    results: _Results


class _ServiceRow(TypedDict):
    unit: Literal["decode_tok_s", "input_tok_s", "ttft_ms"]
    streams: int
    prompt: int
    ratio_in_one_run: float


class _ServiceRecord(TypedDict):
    card: str
    rows: list[_ServiceRow]


class _LayerRow(TypedDict):
    model: str
    format: str
    routing: str
    backend: str
    tokens: int
    us: float
    floor_us: float
    card: NotRequired[str]


class _LayerRecord(TypedDict):
    rows: list[_LayerRow]


class Kind(NamedTuple):
    """A kind of record: how it is recognised, what a picture needs of it, and how it is drawn."""

    name: str
    fits: Callable[[dict[str, Any]], bool]
    needs: Any  # a TypedDict
    draw: Callable[[dict[Path, dict[str, Any]], Path, str | None, str], None]


def kind_of(path: Path, record: dict[str, Any]) -> Kind:
    """What a record holds. Raises BenchError if no picture of it is known, or it lacks what the picture needs."""
    for kind in KINDS:
        if kind.fits(record):
            try:
                msgspec.convert(record, kind.needs)
            except msgspec.ValidationError as error:
                raise BenchError(f"{path} is damaged: {error}") from error
            return kind
    raise BenchError(f"{path}: nothing is known to draw of it; known are {', '.join(kind.name for kind in KINDS)}")


def _has_row_with(record: dict[str, Any], *names: str) -> bool:
    rows = record.get("rows")
    return isinstance(rows, list) and bool(rows) and isinstance(rows[0], dict) and set(names) <= rows[0].keys()


class Run(NamedTuple):
    """A run of `moe-serve bench` as a point: of which server, at which load."""

    server: str
    load: float
    results: dict[str, Any]


def runs_of(records: dict[Path, dict[str, Any]]) -> tuple[str, dict[str, list[Run]]]:
    """What the load counts, and the runs of each server by rising load. Raises BenchError for a void run."""
    loads = {"concurrency": "streams", "request_rate": "requests a second"}
    used = {name for record in records.values() for name in loads if record["settings"][name] is not None}
    if len(used) > 1:
        raise BenchError("some runs have --concurrency and some --request-rate: draw each by itself")
    if not used:
        raise BenchError("the runs have neither --concurrency nor --request-rate, so they have no load to draw over")
    name = used.pop()
    servers: dict[str, list[Run]] = {}
    for path, record in records.items():
        if record["is_void"]:
            raise BenchError(f"{path} is void: {'; '.join(record['void_reasons'])}")
        server = f"{record['server']['model']}, {record['server']['version'] or record['server']['url']}"
        servers.setdefault(server, []).append(Run(server, record["settings"][name], record["results"]))
    return loads[name], {server: sorted(runs, key=lambda run: run.load) for server, runs in servers.items()}


def _draw_runs(records: dict[Path, dict[str, Any]], out: Path, title: str | None, _routing: str) -> None:
    from matplotlib import pyplot

    load, servers = runs_of(records)
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    for index, (server, runs) in enumerate(servers.items()):
        at = [run.load for run in runs]
        rates = [run.results["output_tokens_per_s"] for run in runs]
        axes[0].plot(at, rates, marker="o", color=f"C{index}", label=server)
        for axis, name in zip(axes[1:], _LATENCIES, strict=True):
            for percentile, style in (("p50", "-"), ("p99", ":")):
                latencies = [run.results["latencies_ms"][name] or {} for run in runs]
                values = [latency.get(percentile, float("nan")) for latency in latencies]
                axis.plot(at, values, style, marker="o", color=f"C{index}", label=f"{server}, {percentile}")
    headings = ("output tokens a second", *(f"{text}, ms" for text in _LATENCIES.values()))
    for axis, heading in zip(axes, headings, strict=True):
        axis.set_title(heading, fontsize=10)
        axis.set_xlabel(load)
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, linewidth=0.3)
        axis.legend(fontsize=7)
    figure.suptitle(title or "moe-serve bench")
    save(figure, out)


def case_text(row: dict[str, Any]) -> str:
    """A case in words: what is measured, with how many streams and tokens in each prompt."""
    streams_text = "1 stream" if row["streams"] == 1 else f"{row['streams']} streams"
    return f"{_UNITS[row['unit']]}, {streams_text}, prompts of {row['prompt']:,}"


def _draw_services(records: dict[Path, dict[str, Any]], out: Path, title: str | None, _routing: str) -> None:
    from matplotlib import pyplot

    record = list(records.values())[-1]
    rows = record["rows"][::-1]
    ratios = [row["ratio_in_one_run"] for row in rows]
    figure, axis = pyplot.subplots(figsize=(9.6, 0.55 * len(rows) + 1.4), layout="constrained")
    bars = axis.barh([case_text(row) for row in rows], ratios, color="C0", height=0.6)
    axis.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=4, fontsize=9)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xlim(0, max(ratios) * 1.12)
    axis.set_xlabel("times as good as SGLang: tokens a second, or its time over ours")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.suptitle(title or f"moe-serve and SGLang in one run, GPT-OSS-20B's shape, {record['card']}")
    save(figure, out)


def _draw_layers(records: dict[Path, dict[str, Any]], out: Path, title: str | None, routing: str) -> None:
    draw_layers(rows_of(records.values()), routing, out, title)


_SERVICE_KEYS = ("unit", "streams", "prompt", "ratio_in_one_run")
_LAYER_KEYS = ("tokens", "backend", "us", "floor_us")
KINDS = (
    Kind(
        "runs of moe-serve bench",
        lambda record: "results" in record and "settings" in record,
        _RunRecord,
        _draw_runs,
    ),
    Kind(
        "two services",
        lambda record: _has_row_with(record, *_SERVICE_KEYS),
        _ServiceRecord,
        _draw_services,
    ),
    Kind("expert layers", lambda record: _has_row_with(record, *_LAYER_KEYS), _LayerRecord, _draw_layers),
)
