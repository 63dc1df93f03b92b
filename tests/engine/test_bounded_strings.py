"""Strings of bounded length: exactly the JSON strings of so many characters, however tokens cut them."""

import itertools
import json

import xgrammar

from engine.grammar_compiler import compile_format
from engine.grammar_spec import json_schema, one_of, text
from tests.tables import rows

END = 0
TOKENS = [b"</s>", b'"', b"a", b"ab", b'b"', b"\xc3", b"\xa9", b"\xc3\xa9", b"\n", b"\x01", b"\\", b"\xed", b"\xa0"]
COMPILER = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(TOKENS, xgrammar.VocabType.RAW, stop_token_ids=[END]))


def accepted(format_, num_tokens):
    """Texts of at most so many tokens that a format allows."""
    compiled = compile_format(COMPILER, json.dumps(format_))
    found, matcher = set(), xgrammar.GrammarMatcher(compiled)

    def follow(so_far, left):
        if matcher.is_completed():
            found.add(so_far)
        for token_id, token in enumerate(TOKENS[1:] if left else (), start=1):
            if matcher.accept_token(token_id):
                follow(so_far + token, left - 1)
                matcher.rollback(1)

    follow(b"", num_tokens)
    return found


def is_string(data, low, high):
    """Whether it is a JSON string of so many characters, none of them escaped."""
    try:
        value = json.loads(data.decode())
    except ValueError:
        return False
    return isinstance(value, str) and low <= len(value) <= high and data.strip() == data and b"\\" not in data


ALL = {b"".join(tokens) for num in range(5) for tokens in itertools.product(TOKENS[1:], repeat=num)}


@rows("low, high", (0, 2), (2, 3), (0, 1), (1, 1), (0, 0), (2, None))
def test_exactly_the_strings_of_the_lengths_are_allowed(low, high):
    bounds = {"minLength": low} | ({} if high is None else {"maxLength": high})
    format_ = json_schema({"type": "string", **bounds}, max_whitespace=2)
    assert accepted(format_, 4) == {data for data in ALL if is_string(data, low, 9 if high is None else high)}


def test_a_property_may_have_the_name_of_a_keyword_and_other_formats_stay():
    name = '[^"\\\r\n]'  # reads like a class of the grammar
    schema = {"type": "object", "properties": {"maxLength": {"const": name}}, "required": ["maxLength"]}
    format_ = one_of(text("ab"), json_schema({"type": "string", "maxLength": 1}), json_schema(schema))
    assert accepted(format_, 3) == {b"ab", b'""', b'"a"', b'"b"', '"é"'.encode()}
    compiled = compile_format(COMPILER, json.dumps(format_))
    assert xgrammar.GrammarMatcher(compiled).accept_string(json.dumps({"maxLength": name}))


@rows("name", "größe", "ßffff", "日本a1", "\U0001f600f", "\x80a", "\\xdfe", "\\u00dfe", '"', "\0", "\n0")
def test_names_and_constants_are_what_they_were(name):
    schema = {
        "type": "object",
        "properties": {name: {"const": name}, "b": {"type": "string", "maxLength": 2}},
        "required": [name, "b"],
        "additionalProperties": False,
    }
    compiled = compile_format(COMPILER, json.dumps(json_schema(schema, max_whitespace=2)))
    answer = json.dumps({name: name, "b": "é"}, ensure_ascii=False)
    assert xgrammar.GrammarMatcher(compiled).accept_string(answer)
