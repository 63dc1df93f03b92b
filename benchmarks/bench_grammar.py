"""CPU time that grammars cost: 8 streams of the bundled model with and without one, and the compilation of a schema.

    python -m benchmarks.bench_grammar [--rounds 5] [--tokens 64] [--out NAME]

One process, one thread, CPU time of the whole process, so other work on the machine counts little. The runs take turns;
the least time of each counts.

- plain: greedy, the stop tokens ignored.
- any tokens: the same with a grammar that allows every token, so the tokens are the same, and that is checked.
- schema: JSON of a schema, as many tokens; its masks are those of ordinary use.
- sampled, sampled schema: the same two at temperature 1.

A schema of 10 kB is compiled as in the engine: in the process that checks it first, then here. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from benchmarks import record
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.grammar_spec import Format, GrammarSpec, free_tokens, json_schema
from engine.types import EngineRequest, SamplingParams

MODEL = Path(__file__).parents[1] / "assets" / "tiny-gpt-oss"
NUM_STREAMS, NUM_PROMPT, NUM_CANDIDATES = 8, 64, 64
FIRST_CONTROL_ID = 4080
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "ratio": {"type": "number"},
    },
    "required": ["name", "kind", "count", "tags"],
    "additionalProperties": False,
}
SCHEMA = json_schema({"type": "array", "items": ITEM, "minItems": 50}, max_whitespace=2)
RUNS: dict[str, tuple[Format | None, float]] = {
    "plain": (None, 0.0),
    "any tokens": (free_tokens([]), 0.0),
    "schema": (SCHEMA, 0.0),
    "sampled": (None, 1.0),
    "sampled schema": (SCHEMA, 1.0),
}


def large_schema(num_bytes: int) -> dict[str, object]:
    """An object of so many different fields that its JSON has at least `num_bytes`."""
    properties: dict[str, object] = {}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    while len(json.dumps(schema)) < num_bytes:
        properties[f"field_{len(properties)}"] = ITEM | {"description": f"item number {len(properties)} of many"}
    return schema | {"required": list(properties)}


def requests(
    prompts: list[list[int]], format_: Format | None, temperature: float, num_tokens: int
) -> list[EngineRequest]:
    """A stream for each prompt. A grammar would end with a stop token, so the prompts must not lead to one."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=1, ignore_eos=True)
    spec = None if format_ is None else GrammarSpec.of(format_, param="grammar")
    return [
        EngineRequest(request_id=str(index), prompt_ids=prompt, sampling=sampling, grammar=spec)
        for index, prompt in enumerate(prompts)
    ]


def choose_prompts(core: EngineCore, num_tokens: int) -> list[list[int]]:
    """Prompts of ordinary token ids after which the model's best tokens are none that stop."""
    made = torch.randint(300, 3900, (NUM_CANDIDATES, NUM_PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    _, tokens = run(core, requests(made, None, 0.0, num_tokens))
    found = [prompt for prompt, its in zip(made, tokens.values(), strict=True) if max(its) < FIRST_CONTROL_ID]
    if len(found) < NUM_STREAMS:
        raise RuntimeError(f"only {len(found)} of {NUM_CANDIDATES} prompts lead to {num_tokens} tokens without an end")
    return found[:NUM_STREAMS]


def run(core: EngineCore, asked: list[EngineRequest]) -> tuple[float, dict[str, list[int]]]:
    """CPU seconds from the first step to the last token, and the tokens of each request."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in asked}
    start_s = time.process_time()
    for request in asked:
        core.add(request)
    while core.has_work:
        for output in core.step():
            tokens[output.request_id] += output.token_ids
    return time.process_time() - start_s, tokens


def compile_ms(core: EngineCore, num_bytes: int, rounds: int) -> float:
    """Median wall time from a schema's arrival to its first step, in ms; each round has a schema of its own."""
    taken = []
    for number in range(rounds):
        schema = large_schema(num_bytes) | {"title": str(number)}
        [request] = requests([[300]], json_schema(schema), 0.0, 1)
        core.add(request)
        start_s = time.perf_counter()
        while not core.stats().num_running and core.has_work:
            core.step()
            if not core.stats().num_waiting:
                break
        taken.append(1000 * (time.perf_counter() - start_s))
        while core.has_work:
            core.step()
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time that grammars cost")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--out", help="name of a file in benchmarks/results, without .json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    core = EngineCore(EngineConfig(model=MODEL, device="cpu", selfcheck="off", enable_prefix_caching=False))
    prompts = choose_prompts(core, args.tokens)
    texts = {name: requests(prompts, *how, args.tokens) for name, how in RUNS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in RUNS}
    for number in range(args.rounds + 1):  # the first warms up and compiles the grammars
        tokens = {}
        for name, asked in texts.items():
            cpu_s, tokens[name] = run(core, asked)
            if number:
                seconds[name].append(cpu_s)
        if tokens["plain"] != tokens["any tokens"]:
            raise RuntimeError("a grammar that allows all tokens changed the tokens")
        if any(len(its) != args.tokens for by_id in tokens.values() for its in by_id.values()):
            raise RuntimeError("an answer ended early, so the runs cannot be compared")
    num_tokens = NUM_STREAMS * args.tokens
    result = {
        "us_per_token": {name: round(1e6 * min(its) / num_tokens, 1) for name, its in seconds.items()},
        "over_plain": {
            name: round(min(seconds[name]) / min(seconds["sampled" if "sampled" in name else "plain"]), 3)
            for name in RUNS
        },
        "compile_10_kb_ms": round(compile_ms(core, 10_000, args.rounds), 1),
        "schema_bytes": len(json.dumps(large_schema(10_000))),
    }
    content = {**record.environment(), "streams": NUM_STREAMS, "tokens": args.tokens, **result}
    if args.out:
        record.write(args.out, content)
    print(json.dumps(content))


if __name__ == "__main__":
    main()
