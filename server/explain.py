"""`moe-serve explain`: which backends could serve a model's experts and attention on a GPU, and why the others cannot.

Reads no weights.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from server import streams
from server.errors import SettingError
from server.hub import download
from server.model_source import locate_model, served_name
from server.settings import Parser, Setting, gather


def make_parser(program: str, settings: Mapping[str, Setting]) -> Parser:
    """The flags of `moe-serve explain`."""
    parser = Parser(
        prog=f"{program} explain",
        description="Every backend for a GPU, a number format of the experts and a transport: usable, or why not; "
        "the same for attention. Needs neither the GPU nor weights.",
        allow_abbrev=False,
    )
    parser.add_argument("--gpu", required=True, help="sm90, sm100, gfx950..., a card that plan knows (h100), or cpu")
    parser.add_argument("--format", required=True, help="bf16, fp8_block, fp8_tensor, mxfp4 or nvfp4")
    parser.add_argument("--a2a", default="none", choices=settings["moe_a2a_backend"].choices, help="transport [none]")
    parser.add_argument(
        "--deepep-mode",
        default="auto",
        choices=settings["deepep_mode"].choices,
        help=f"{settings['deepep_mode'].spec.text} [auto]",
    )
    parser.add_argument("--model", help=f"{settings['model'].spec.text}; only config.json is read [the bundled model]")
    parser.add_argument("--revision", help=f"{settings['revision'].spec.text} [the main branch]")
    return parser


def explain(argv: Sequence[str], program: str, settings: Mapping[str, Setting], environ: Mapping[str, str]) -> int:
    """Print the table for the flags in `argv`; returns the exit code. Raises SettingError for a wrong flag or model.

    Model and revision may come from the service's variables, as for `plan` and `doctor`.
    """
    flags = make_parser(program, settings).parse_args(argv)
    given = {name: text for name in ("model", "revision") if (text := getattr(flags, name)) is not None}
    values = gather(settings, given, environ)
    model = locate_model(values.get("model"), values.get("revision"))
    folder = model if isinstance(model, Path) else download(model, needs="config")
    try:
        table = _table(flags.gpu, flags.format, flags.a2a, flags.deepep_mode, folder)
        streams.say(f"{served_name(model)}: {table}")
    except ValueError as error:  # every package's error tree begins there
        raise SettingError(str(error)) from error
    return 0


def _table(gpu: str, format_name: str, a2a_name: str, mode_name: str, folder: Path) -> str:
    # Imports torch, which a wrong flag and --help need not wait for.
    from engine.plan import GPUS
    from loaders.hf_config import read_config
    from model.attention.explain import explain as explain_attention
    from model.parallel import ParallelLayout
    from model.registry import make_family
    from moe import MoeA2ABackend
    from moe.choose import explain as table
    from moe.dispatch.deepep_settings import DeepepMode
    from moe.dispatch.transport import dispatch_formats

    card = GPUS.get(gpu)
    arch, where = (gpu, gpu) if card is None else (card.arch, f"{gpu} ({card.arch})")
    if arch not in table.ARCHS:
        raise SettingError(f"--gpu {gpu} is not known; known: {', '.join(table.ARCHS)}, {', '.join(GPUS)}")
    family = make_family(read_config(folder))
    config, a2a = family.moe, MoeA2ABackend(a2a_name)
    rows = table.explain(arch, format_name, a2a, config, dispatch_formats(a2a, DeepepMode(mode_name)))
    place = ParallelLayout().dense_place
    attention = explain_attention([family.attention_part(layer, place) for layer in range(family.num_layers)], arch)
    return (
        f"{config.num_experts} experts of {config.hidden_size} x {config.intermediate_size}, "
        f"top-{config.top_k}, as {format_name} on {where}, transport {a2a}\n{table.render(rows)}\n\n{attention}\n"
    )
