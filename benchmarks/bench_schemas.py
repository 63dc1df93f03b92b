"""What it costs to compile schemas of 10 kB for the 201,088 tokens of GPT-OSS.

    pip install bpe-openai    # has the vocabulary o200k
    python -m benchmarks.bench_schemas [--rounds 5] [--out NAME]

Each schema goes the way of a request: rewritten as in the HTTP process, checked in the process for that, and compiled
in the engine's. Times are CPU time of all of them and wall time, medians. "first" is a new service's first schema; its
processes run already. "another" follows another schema, whose common parts are kept. "bare" is xgrammar's own call for
the format, once, with all masks made anew. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import xgrammar

from benchmarks import record
from benchmarks.bench_grammar import large_schema
from engine.grammar_check import Vocabulary, token_bytes
from engine.grammar_compiler import GrammarCompiler, compile_format
from engine.grammar_spec import GrammarSpec, text
from server.structured.answers import schema_answer

NUM_TOKENS, END_ID = 201_088, 200_002
NUM_BYTES = 10_000
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def read_vocabulary() -> Vocabulary:
    """The tokens of o200k; the other ids are control tokens."""
    tokens = [b""] * NUM_TOKENS
    for token, token_id in import_module("bpe_openai").get_encoding("o200k_base")._mergeable_ranks.items():
        tokens[token_id] = token
    control_ids = frozenset(token_id for token_id, token in enumerate(tokens) if not token)
    return Vocabulary(source=tokens, size=NUM_TOKENS, eos_ids=frozenset({END_ID}), control_ids=control_ids)


def mixed_schema(num_bytes: int) -> dict[str, object]:
    """An object whose fields differ: free and bounded strings, numbers, enums, lists, patterns, dates, objects."""
    properties: dict[str, object] = {}
    schema: dict[str, object] = {"type": "object", "properties": properties, "additionalProperties": False}
    while len(json.dumps(schema)) < num_bytes:
        number = len(properties)
        kinds: list[dict[str, object]] = [
            {"type": "string", "description": f"number {number}"},
            {"type": "integer", "minimum": number, "maximum": 1000 * number + 7},
            {"enum": [f"red{number}", f"green{number}", "blue"]},
            {"type": "array", "items": {"type": "string", "minLength": 1 + number % 5, "maxLength": 20 + number}},
            {"type": "string", "pattern": f"^[A-Z]{{{number % 4 + 1}}}-[0-9]{{{number % 6 + 1}}}$"},
            {"type": "object", "properties": {f"x{number}": {"type": "number"}}, "additionalProperties": False},
            {"type": "string", "format": ["date", "uuid", "time", "date-time"][number % 4]},
            {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 200 + number}]},
        ]
        properties[f"field_{number}"] = kinds[number % len(kinds)]
    return schema | {"required": list(properties)[::2]}


SCHEMAS = {"repeated": large_schema, "mixed": mixed_schema}


def children_cpu_s() -> float:
    """CPU time of the processes that this one has started."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / CLOCK_TICKS


def format_of(schema: dict[str, object]) -> str:
    return GrammarSpec.of(schema_answer(schema, "schema"), param="schema").format_json


def compiled_ms(compiler: GrammarCompiler, schema: dict[str, object]) -> tuple[float, float]:
    """CPU and wall time from the client's schema to the compiled grammar, in ms."""
    start_s, cpu_s, children_s = time.perf_counter(), time.process_time(), children_cpu_s()
    compiler.compile(format_of(schema)).result()
    wall_s = time.perf_counter() - start_s
    return 1000 * (time.process_time() - cpu_s + children_cpu_s() - children_s), 1000 * wall_s


def bare_ms(vocabulary: Vocabulary, schema: dict[str, object], rounds: int) -> float:
    """CPU time of one call of xgrammar without anything kept, in ms, the median."""
    info = xgrammar.TokenizerInfo(
        token_bytes(vocabulary), xgrammar.VocabType.RAW, vocab_size=NUM_TOKENS, stop_token_ids=[END_ID]
    )
    bare, format_json, taken = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False), format_of(schema), []
    for _ in range(rounds):
        start_s = time.process_time()
        compile_format(bare, format_json)
        taken.append(1000 * (time.process_time() - start_s))
    return statistics.median(taken)


def measure(vocabulary: Vocabulary, kind: str, rounds: int) -> dict[str, Any]:
    """The times of one kind of schema. Each round has a new service's compiler, and two schemas that differ."""
    first, another = [], []
    for number in range(rounds):
        compiler = GrammarCompiler(vocabulary, timeout_s=60.0, cache_bytes=64 << 20)
        compiler.compile(GrammarSpec.of(text(f"warm {number}"), param="x").format_json).result()
        for size, taken in ((NUM_BYTES, first), (NUM_BYTES + 500, another)):
            taken.append(compiled_ms(compiler, SCHEMAS[kind](size)))
    named = {"first": first, "another": another}
    return {
        name: {
            "cpu_ms": round(statistics.median(c for c, _ in its)),
            "wall_ms": round(statistics.median(w for _, w in its)),
        }
        for name, its in named.items()
    } | {"bare_cpu_ms": round(bare_ms(vocabulary, SCHEMAS[kind](NUM_BYTES), rounds))}


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of compiling schemas of 10 kB for the tokens of GPT-OSS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="name of a file in benchmarks/results, without .json")
    args = parser.parse_args()
    vocabulary = read_vocabulary()
    result = {kind: measure(vocabulary, kind, args.rounds) for kind in SCHEMAS}
    content = {**record.environment(), "tokens": NUM_TOKENS, "schema_bytes": NUM_BYTES, **result}
    if args.out:
        record.write(args.out, content)
    print(json.dumps(content))


if __name__ == "__main__":
    main()
