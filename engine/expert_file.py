"""Files of `moe-serve experts --record`: tokens by layer and expert, as JSON. No torch."""

from pathlib import Path

import msgspec

from engine.errors import EngineConfigError
from engine.types import ExpertLoad

FORMAT = "moe-serve expert load 1"


class RecordedLayer(msgspec.Struct, frozen=True):
    """Tokens of each expert in one MoE layer, which has this number in the model."""

    layer: int
    tokens: list[int]


class RecordedLoad(msgspec.Struct, frozen=True):
    """Content of a file."""

    format: str
    models: list[str]
    layers: list[RecordedLayer]


def record_of(load: ExpertLoad, models: list[str]) -> RecordedLoad:
    """What a file says of a service that serves a model under these names."""
    layers = [RecordedLayer(layer, row) for layer, row in zip(load.layers, load.rows(), strict=True)]
    return RecordedLoad(FORMAT, models, layers)


def read_load(path: Path) -> tuple[tuple[int, ...], ...]:
    """Tokens by layer and expert.

    Raises:
        EngineConfigError: there is no such file, or it is of another kind.
    """
    try:
        record = msgspec.json.decode(path.read_bytes(), type=RecordedLoad)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EngineConfigError(f"eplb_load is {str(path)!r}: it cannot be read as a recorded load: {error}") from error
    if record.format != FORMAT:
        raise EngineConfigError(f"eplb_load is {str(path)!r}: its format is {record.format!r}, not {FORMAT!r}")
    if any(count < 0 for layer in record.layers for count in layer.tokens):
        raise EngineConfigError(f"eplb_load is {str(path)!r}: a number of tokens is negative")
    return tuple(tuple(layer.tokens) for layer in record.layers)
