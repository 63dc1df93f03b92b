"""`moe-serve plan`: what of a model fits into a GPU, from config.json and headers alone. Reads no weights."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.units import size_text
from server import streams
from server.errors import SettingError
from server.hub import download
from server.model_source import locate_model, served_name
from server.settings import Parser, Setting, given_values

if TYPE_CHECKING:
    from engine.memory_plan import MemoryPlan

_DESCRIPTION = (
    "Weights, KV cache and steps of the service with these flags on a GPU that need not be here, and how many requests "
    "of which length fit. Activations, graphs and the CUDA context are estimates; the service measures them."
)
_EPILOG = "Exit status: 0 if the model fits, 1 if it does not, 2 for a wrong flag. All flags of the service are taken."


def make_parser(program: str) -> Parser:
    """The flags of `moe-serve plan` itself."""
    parser = Parser(
        prog=f"{program} plan",
        usage="%(prog)s [--gpu NAME] [--gpu-memory GiB] [--json] [flags of the service]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--gpu", default="h100", help="a100, h100, h200, b200, mi300x, or cpu for none [%(default)s]")
    parser.add_argument("--gpu-memory", type=float, metavar="GiB", help="memory of the GPU [what CUDA reports for it]")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def plan(argv: Sequence[str], program: str, settings: Mapping[str, Setting], environ: Mapping[str, str]) -> int:
    """Print the plan; returns the exit status. Raises SettingError for a wrong flag, variable or model."""
    parser = make_parser(program)
    own, flags = parser.parse_known_args(argv)
    values = given_values(settings, parser, flags, environ)
    model = locate_model(values.get("model"), values.get("revision"))
    folder = model if isinstance(model, Path) else download(model, needs="config")
    try:
        found, max_model_len, config = _plan(own.gpu, own.gpu_memory, folder, values)
    except ValueError as error:  # every package's error tree begins there
        raise SettingError(str(error)) from error
    is_dummy = values.get("load_format") == "dummy"
    from_headers = _has_weights(folder) and not is_dummy
    shown = document(served_name(model), own.gpu, found, max_model_len, config, from_headers=from_headers)
    streams.say(json.dumps(shown, indent=1) + "\n" if own.json else render(shown))
    return 0 if found.refusal is None else 1


def _plan(
    gpu_name: str, memory_gib: float | None, folder: Path, values: Mapping[str, Any]
) -> tuple["MemoryPlan", int, EngineConfig]:
    """The plan, the longest context that it allows, and what it is a plan of."""
    # Imports torch, which a wrong flag and --help need not wait for.
    import dataclasses

    from engine.plan import GPUS, plan_engine

    if gpu_name not in {*GPUS, "cpu"}:
        raise SettingError(f"--gpu: {gpu_name!r} is not one of {', '.join(GPUS)}, cpu")
    if memory_gib is not None and not 0 < memory_gib < 1e6:
        raise SettingError(f"--gpu-memory: {memory_gib} is no size in GiB")
    if gpu_name == "cpu" and memory_gib is not None:
        raise SettingError("--gpu-memory: is for GPUs; a plan for a CPU takes this machine's memory")
    device = values.get("device", "auto")
    if device != "auto" and (device == "cpu") != (gpu_name == "cpu"):
        raise SettingError(f"device is {device}: leave it out, since --gpu {gpu_name} says what is planned for")
    gpu = GPUS.get(gpu_name)
    if gpu is not None and memory_gib is not None:
        gpu = dataclasses.replace(gpu, memory_gib=memory_gib)
    names = {field.name for field in dataclasses.fields(EngineConfig)} & set(values)
    fields = {name: values[name] for name in names} | {"model": folder}
    if not _has_weights(folder):
        fields["load_format"] = "dummy"
    config = EngineConfig(**fields)
    return *plan_engine(config, gpu), config


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def document(
    name: str, gpu_name: str, found: "MemoryPlan", max_model_len: int, config: EngineConfig, *, from_headers: bool
) -> dict[str, Any]:
    """The plan as JSON; sizes in bytes, of one rank. Without `from_headers` the stored form is what the config says.

    Each data-parallel rank has requests of its own: `max_num_seqs` and `requests_by_context_length` are of one.
    """
    sizes = found.sizes
    windows = sorted({spec.window for spec in found.layout.specs if spec.window is not None})
    return {
        "model": name,
        "gpu": gpu_name,
        "gpu_bytes": found.total_bytes,
        "gpu_memory_utilization": found.utilization,
        "weights": {
            "from_headers": from_headers,
            "stored": sizes.stored_bytes,
            "processed": sizes.total_bytes,
            "embedding": sizes.embedding_bytes,
            "head": sizes.head_bytes,
            "dense": sizes.dense_bytes,
            "experts": [
                {
                    "format": path.format_name,
                    "backend": str(path.backend),
                    "layers": path.num_layers,
                    "stored": path.num_layers * path.stored_bytes,
                    "processed": path.num_layers * path.processed_bytes,
                }
                for path in sizes.experts
            ],
            "peak_while_loading": sizes.peak_bytes,
            "fits_while_loading": found.fits_while_loading,
        },
        "estimates": {
            "context": found.context_bytes,
            "activations": found.activation_bytes,
            "sampling": found.sampling_bytes,
            "graphs": found.graph_bytes,
            "graph_buffers": found.graph_buffer_bytes,
        },
        "kv_cache": {
            "dtype": str(found.layout.dtype).removeprefix("torch."),
            "bytes_per_token": found.layout.bytes_per_token,
            "bytes_per_token_full_layers": found.kv_bytes_per_token(sliding=False),
            "bytes_per_token_sliding_layers": found.kv_bytes_per_token(sliding=True),
            "windows": windows,
            "pages": found.num_pages,
            "tokens": found.num_kv_tokens,
            "bytes": found.num_pages * found.layout.bytes_per_page,
        },
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "data_parallel_size": config.data_parallel_size,
        "requests_by_context_length": {
            str(length): min(count, config.max_num_seqs) for length, count in found.table(max_model_len).items()
        },
        "refusal": found.refusal,
    }


def render(shown: Mapping[str, Any]) -> str:
    """The plan as text."""
    weights, estimates, cache = shown["weights"], shown["estimates"], shown["kv_cache"]
    where = f"{shown['model']} on {shown['gpu']}: {size_text(shown['gpu_bytes'])}"
    share = "" if shown["gpu"] == "cpu" else f", of which {shown['gpu_memory_utilization']:.0%} may be used"
    lines = [f"{where}{share}", ""]
    published = "" if weights["from_headers"] else ", as the config says: no weights are here"
    rows = [("weights", weights["processed"], f"{size_text(weights['stored'], 3)} in the files{published}")]
    for path in weights["experts"]:
        rows.append(("  experts", path["processed"], f"{path['layers']} layers, {path['format']} as {path['backend']}"))
    rows += [
        ("  dense", weights["dense"], "attention, norms, gates, dense and shared MLPs, rotary table"),
        ("  embedding", weights["embedding"], ""),
        ("  head", weights["head"], "" if weights["head"] else "the embedding"),
        ("peak while loading", weights["peak_while_loading"], "" if weights["fits_while_loading"] else "DOES NOT FIT"),
        ("context", estimates["context"], "estimate: CUDA, kernels, workspaces"),
        ("activations", estimates["activations"], "estimate of the largest step"),
        ("sampling", estimates["sampling"], ""),
        ("graphs", estimates["graphs"], "estimate: decode steps captured in CUDA graphs"),
        ("graph buffers", estimates["graph_buffers"], "ids, slots and page tables that the graphs read"),
        ("KV cache", cache["bytes"], f"{cache['tokens']} tokens fit, {cache['pages']} pages, {cache['dtype']}"),
    ]
    lines += [f"{name:<20}{size_text(size, 3):>13}  {text}".rstrip() for name, size, text in rows]
    full, sliding = cache["bytes_per_token_full_layers"], cache["bytes_per_token_sliding_layers"]
    text = f"a token of the KV cache takes {cache['bytes_per_token']} bytes"
    if sliding:
        windows = ", ".join(map(str, cache["windows"]))
        text += f": {full} in full layers, {sliding} in sliding ones (window {windows}), which keep only what they see"
    lines += ["", text]
    if shown["refusal"] is not None:
        return "\n".join([*lines, "", f"does not fit: {shown['refusal']}"]) + "\n"
    where = f" on each of {shown['data_parallel_size']} data-parallel ranks" if shown["data_parallel_size"] > 1 else ""
    most = f"requests at the same time{where}, at most {shown['max_num_seqs']} (--max-num-seqs)"
    lines += ["", f"{'context length':<20}{most}"]
    lines += [f"{length:<20}{count}" for length, count in shown["requests_by_context_length"].items()]
    return "\n".join(lines) + "\n"
