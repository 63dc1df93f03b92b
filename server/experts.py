"""`moe-serve experts`: how evenly a running service uses its experts; `--record` writes their tokens to a file."""

import http.client
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from engine.expert_file import RecordedLayer, RecordedLoad
from server import streams
from server.config import ServerConfig
from server.errors import SettingError
from server.keys import keys_of
from server.own_service import OwnService
from server.settings import Parser, Setting, given_values

_TIMEOUT_S = 30.0
_MAX_SECONDS = 1_000_000
_NUM_BUSIEST = 4


def make_parser(program: str) -> Parser:
    """The flags of `moe-serve experts` itself."""
    parser = Parser(
        prog=f"{program} experts",
        usage="%(prog)s [--record FILE] [--seconds S] [flags of the service]",
        description="Show how evenly the experts of a running service are used, which counts with --expert-load or "
        "--enable-eplb.",
        allow_abbrev=False,
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the tokens by expert here, for --eplb-load")
    parser.add_argument("--seconds", type=float, default=0.0, help="count for so long, instead of since the start")
    return parser


def experts(argv: Sequence[str], program: str, settings: Mapping[str, Setting], environ: Mapping[str, str]) -> int:
    """Print a line for each MoE layer; returns 0, or 1 if the service does not answer.

    Raises:
        SettingError: a wrong flag or variable, or the service counts nothing.
    """
    parser = make_parser(program)
    own, flags = parser.parse_known_args(argv)
    if not 0 <= own.seconds <= _MAX_SECONDS:
        raise SettingError(f"--seconds is {own.seconds}: it must lie between 0 and {_MAX_SECONDS:,}")
    values = given_values(settings, parser, flags, environ)
    names = ("api_key", "admin_key")
    config = ServerConfig(**{name: values[name] for name in names if name in values} | keys_of(values))
    service = OwnService.of(values)
    try:
        load = _ask(service, config)
        if own.seconds > 0:
            time.sleep(own.seconds)
            load = since(_ask(service, config), load)
    except (OSError, http.client.HTTPException) as error:
        streams.write(sys.stderr, f"{program}: {service.no_answer(error)}\n")
        return 1
    if not load.layers:
        raise SettingError("the service counts no tokens by expert: start it with --expert-load")
    streams.say("".join(map(line_of, load.layers)))
    if own.record is not None:
        try:
            own.record.write_bytes(msgspec.json.format(msgspec.json.encode(load)) + b"\n")
        except OSError as error:
            raise SettingError(f"--record: {error}") from error
    return 0


def since(later: RecordedLoad, earlier: RecordedLoad) -> RecordedLoad:
    """What was counted between two answers of one service."""
    counted_before = {layer.layer: layer.tokens for layer in earlier.layers}
    layers = [
        RecordedLayer(
            each.layer,
            [
                now - before
                for now, before in zip(each.tokens, counted_before.get(each.layer, each.tokens), strict=True)
            ],
        )
        for each in later.layers
    ]
    return msgspec.structs.replace(later, layers=layers)


def line_of(layer: RecordedLayer) -> str:
    """The busiest experts of a layer, with their share of its tokens, and the busiest one over the mean."""
    total = sum(layer.tokens)
    if not total:
        return f"layer {layer.layer}: no tokens\n"
    ratio = max(layer.tokens) * len(layer.tokens) / total
    shares = ", ".join(f"{expert} ({layer.tokens[expert] / total:.1%})" for expert in busiest(layer.tokens))
    return f"layer {layer.layer}: busiest expert {ratio:.2f} x mean; {shares}\n"


def busiest(tokens: Sequence[int]) -> list[int]:
    """The few experts with most tokens, the busiest first."""
    return sorted(range(len(tokens)), key=lambda expert: (-tokens[expert], expert))[:_NUM_BUSIEST]


def _ask(service: OwnService, config: ServerConfig) -> RecordedLoad:
    keys = (*filter(None, (config.admin_key,)), *(key.text for key in config.api_keys))
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    status, body = service.get("/expert_load", timeout_s=_TIMEOUT_S, headers=headers)
    if status != http.client.OK:
        told = body[:200].decode(errors="replace")
        raise SettingError(f"the service answers /expert_load with status {status}: {told}")
    try:
        return msgspec.json.decode(body, type=RecordedLoad)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SettingError(
            f"{service.host} port {service.port} does not answer /expert_load as moe-serve does ({error}): is another "
            "server there? Give the --host and --port of the service"
        ) from error
