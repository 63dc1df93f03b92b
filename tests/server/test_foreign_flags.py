"""Flags of vLLM and SGLang get a hint that names a flag of ours, or say why none is needed."""

import re

import pytest

from server import cli
from server.errors import SettingError
from server.foreign_flags import ADVICE, INSTEAD
from server.settings import make_parser
from tests.tables import rows

PARSER = make_parser(cli.all_settings(), "moe-serve", "")


@rows(
    "flags, words",
    (["--tp", "2"], "unrecognized arguments: --tp 2; here it is --tensor-parallel-size; --help lists all flags"),
    (["--quantization=fp8"], "--quantization=fp8; how the weights are quantized is read from the checkpoint"),
    (["-tp", "2"], "-tp 2; here it is --tensor-parallel-size"),
    (["--max-total-tokens", "100000"], "counted in pages of --page-size tokens: --num-pages"),
    (["--trust-remote-code"], "no code of a checkpoint is ever run"),
)
def test_a_foreign_flag_gets_a_hint(flags: list[str], words: str) -> None:
    with pytest.raises(SettingError, match=re.escape(words)):
        PARSER.parse_args(flags)


def test_hints_name_flags_that_are_here() -> None:
    known = set(PARSER._option_string_actions)
    assert not known & (INSTEAD.keys() | ADVICE.keys())
    named = {*INSTEAD.values(), *re.findall(r"--[a-z-]+", " ".join(ADVICE.values()))}
    assert named <= known


def test_a_command_without_the_flags_of_the_service_gives_no_such_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--tokenizer", "x"]) == cli.USAGE_ERROR
    assert "read from the folder" not in capsys.readouterr().err
