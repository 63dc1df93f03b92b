"""Answers of the routes other than generation: errors, models, tokenizer, health."""

from typing import Any, Literal

from typing_extensions import TypedDict


class ErrorDetails(TypedDict):
    """What went wrong; `param` is the request field to change."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """Body of every error."""

    error: ErrorDetails


class ModelEntry(TypedDict):
    """A name under which the model is served, with the keys that OpenAI's and Anthropic's clients declare."""

    id: str
    object: Literal["model"]
    type: Literal["model"]
    display_name: str
    created: int
    created_at: str
    lifecycle: Literal["active"]
    owned_by: str
    max_model_len: int | None


class ModelList(TypedDict):
    """All served names."""

    object: Literal["list"]
    data: list[ModelEntry]


class Tokens(TypedDict):
    """Token ids of a text; `max_model_len` is null while the model loads."""

    tokens: list[int]
    count: int
    max_model_len: int | None


class TokenizerInfo(TypedDict):
    """Control tokens and chat template, null where the model has none; `vocab_size` is the highest id plus one."""

    bos_token: str | None
    eos_token: str | None
    add_bos_token: bool
    vocab_size: int
    chat_template: str | None


class Text(TypedDict):
    """Text of token ids."""

    prompt: str


class Liveness(TypedDict):
    """`reason` is null while alive."""

    status: Literal["alive", "dead"]
    reason: str | None


class PhaseTime(TypedDict):
    """One phase of the start so far; `done` of `total` layers or graphs, 0 of 0 where there are none to count.

    `read_gib` were read in it, at `read_gib_per_s`.
    """

    phase: str
    seconds: float
    done: int
    total: int
    read_gib: float
    read_gib_per_s: float


class Readiness(TypedDict):
    """`reason` is null when ready; `engine` is null while the model loads.

    While it loads: `phase` is what the engine does now, `done` of `total` its steps, `elapsed_s` the seconds since the
    engine began, `waits_for` the hosts that are still missing, `phases` all phases that have begun. Null (`phases`:
    empty) before the engine's first message, and once it is ready.
    """

    status: Literal["ready", "not ready"]
    reason: str | None
    load_error: str | None
    models: list[str]
    engine: dict[str, Any] | None
    stats: dict[str, int] | None
    phase: str | None
    done: int | None
    total: int | None
    elapsed_s: float | None
    waits_for: str | None
    phases: list[PhaseTime]


class LayerTokens(TypedDict):
    """Tokens of each expert of the MoE layer with this number in the model."""

    layer: int
    tokens: list[int]


class ExpertTokens(TypedDict):
    """Tokens of every expert since the start; no layers if the service does not count them."""

    format: str
    models: list[str]
    layers: list[LayerTokens]


class Version(TypedDict):
    """Version of this service."""

    version: str
