"""`moe-serve completion SHELL`: prints a script from which the shell knows all commands, flags and choices."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from server import experts, explain, health, plan, streams
from server.bench import command as bench
from server.chat import command as chat
from server.doctor import command as doctor
from server.settings import Parser, Setting
from server.settings import make_parser as make_service_parser

SHELLS = {
    "bash": "source <(moe-serve completion bash), in ~/.bashrc",
    "zsh": "source <(moe-serve completion zsh), in ~/.zshrc below compinit",
    "fish": "moe-serve completion fish | source, in ~/.config/fish/config.fish",
}
_TAKES_SERVICE_FLAGS = {"doctor": doctor, "experts": experts, "health": health, "plan": plan}


def make_parser(program: str) -> Parser:
    """The flags of `moe-serve completion`."""
    lines = "\n".join(f"  {line}" for line in SHELLS.values())
    parser = Parser(
        prog=f"{program} completion",
        description=f"Print a script for a shell. To have it in every shell:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=sorted(SHELLS), help="whose script to print")
    return parser


def completion(argv: Sequence[str], program: str, settings: Mapping[str, Setting], commands: Mapping[str, str]) -> int:
    """Print the script; returns 0. Raises SettingError for an unknown shell."""
    shell = make_parser(program).parse_args(argv).shell
    import shtab

    parser = whole_parser(program, settings, commands)
    for each in (parser, *parser_of_commands(parser).values()):
        _describe_values(each, settings, shtab.FILE)
    streams.say(shtab.complete(parser, shell) + "\n")
    return 0


def whole_parser(program: str, settings: Mapping[str, Setting], commands: Mapping[str, str]) -> argparse.ArgumentParser:
    """Everything that may stand on the command line in one parser, which the program itself never needs."""
    service = make_service_parser(settings, program, "")
    own = {
        "bench": bench.make_parser(program),
        "chat": chat.make_parser(program),
        "completion": make_parser(program),
        "explain": explain.make_parser(program, settings),
        **{name: module.make_parser(program) for name, module in _TAKES_SERVICE_FLAGS.items()},
    }
    whole = argparse.ArgumentParser(prog=program, parents=[service], add_help=False, conflict_handler="resolve")
    listed = whole.add_subparsers()
    for name, text in commands.items():
        parents = [own[name], service] if name in _TAKES_SERVICE_FLAGS else [own[name]]
        listed.add_parser(name, help=text, parents=parents, add_help=False, conflict_handler="resolve")
    return whole


def parser_of_commands(whole: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands' parsers by name."""
    actions = (action for action in whole._actions if isinstance(action, argparse._SubParsersAction))
    return dict(next(actions).choices)


def _describe_values(parser: argparse.ArgumentParser, settings: Mapping[str, Setting], file: object) -> None:
    """Tell which flags have choices, and which take files; parsing needs neither."""
    for action in parser._actions:
        setting = settings.get(action.dest)
        if setting is not None and setting.choices:
            action.choices = setting.choices
        if action.type is Path or action.dest == "config" or (setting is not None and setting.kind is Path):
            action.complete = file  # type: ignore[attr-defined]
