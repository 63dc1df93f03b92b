"""Formats of the bundled model's turns, and schemas for its answers. No torch."""

from pathlib import Path

from engine.grammar_spec import free_tokens, json_schema, one_of, repeated, sequence, text, token
from loaders.tokenizer import load_tokenizer

FOLDER = Path(__file__).parents[2] / "assets" / "tiny-gpt-oss"
TOKENIZER = load_tokenizer(FOLDER)
CHANNEL, MESSAGE, START, END, RETURN, CALL, CONSTRAIN = (
    TOKENIZER.special_tokens[f"<|{name}|>"]
    for name in ("channel", "message", "start", "end", "return", "call", "constrain")
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "größe": {"enum": ["klein", "groß", None]},
        "friends": {"type": "array", "items": {"$ref": "#/$defs/friend"}, "maxItems": 2},
    },
    "required": ["name", "age", "größe", "friends"],
    "additionalProperties": False,
    "$defs": {
        "friend": {
            "type": "object",
            "properties": {"id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}},
            "required": ["id"],
            "additionalProperties": False,
        }
    },
}
EITHER = {
    "anyOf": [
        {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"], "additionalProperties": False},
        {"type": "array", "items": {"type": ["boolean", "null"]}, "minItems": 1, "maxItems": 4},
    ]
}
SCHEMAS = {"person": PERSON, "either": EITHER}


def message(channel, body, *ending):
    """A message in a channel, from the end of the prompt `<|start|>assistant`."""
    return sequence(token(CHANNEL), text(channel), token(MESSAGE), body, *ending)


def turn(schema):
    """Up to two messages of free reasoning, then an answer that a schema describes or a call of the tool `look_up`."""
    control_ids = TOKENIZER.special_tokens.values()
    free = free_tokens(control_ids) | {"max_tokens": 20}
    analysis = message("analysis", free, token(END), token(START), text("assistant"))
    body = json_schema(schema, max_whitespace=1)
    call = sequence(
        text(" to=functions.look_up"), token(CHANNEL), text("commentary "), token(CONSTRAIN), text("json"),
        token(MESSAGE), body, token(CALL),
    )  # fmt: skip
    return sequence(repeated(analysis, 0, 2), one_of(message("final", body, token(RETURN)), call))
