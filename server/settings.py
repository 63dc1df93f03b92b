"""Settings from flags, variables and a file to dataclasses. Reads no argv and no environment itself; it is given both.

Every field of the dataclasses is a setting, declared by `engine.setting.setting`: field `max_num_seqs` is the flag
`--max-num-seqs`, the variable `MOE_SERVE_MAX_NUM_SEQS` and the key `max_num_seqs`. A flag beats a variable, a variable
beats the file, the file beats the default.
"""

import argparse
import dataclasses
import difflib
import os
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from engine.setting import Group, SettingSpec, spec_of
from server import streams
from server.errors import SettingError
from server.foreign_flags import advice_on

PREFIX = "MOE_SERVE_"
_YAML_NULL = "tag:yaml.org,2002:null"
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One field of one dataclass. `default` is `dataclasses.MISSING` if the field has none."""

    name: str
    kind: Any  # str, int, float, bool, Path or tuple
    is_optional: bool
    choices: tuple[str, ...]
    default: Any
    spec: SettingSpec

    @property
    def flag(self) -> str:
        """Its command line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.name.upper()

    @property
    def default_text(self) -> str:
        """The default as help shows it."""
        if self.default in (None, (), dataclasses.MISSING):
            return self.spec.default_text
        return str(self.default).lower() if self.kind is bool else str(self.default)

    def parse(self, value: Any, source: str) -> Any:
        """The value in the field's type, from text or from YAML. Raises SettingError naming the source."""
        if value is None and (not self.is_optional or self.spec.is_secret):
            raise SettingError(f"{source} has no value: give one, or remove it")
        if self.is_optional and (value is None or (self.kind is not str and value == "none")):
            return None
        try:
            parsed = _parse(self.kind, value)
        except (TypeError, ValueError):
            words = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
            raise SettingError(f"{source}: {value!r} is not {words.get(self.kind, 'text')}") from None
        if self.choices and parsed not in self.choices:
            raise SettingError(f"{source}: {value!r} is not one of {', '.join(self.choices)}")
        return parsed


def settings_of(*classes: type) -> dict[str, Setting]:
    """All fields of the dataclasses by name, sorted by group.

    Raises:
        ValueError: two dataclasses share a field, or a field was not declared by `setting`.
    """
    settings: dict[str, Setting] = {}
    for cls in classes:
        hints = get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name in settings:
                raise ValueError(f"two dataclasses have a field {field.name}")
            settings[field.name] = _setting(field, hints[field.name])
    groups = get_args(Group)
    return dict(sorted(settings.items(), key=lambda item: groups.index(item[1].spec.group)))


def _setting(field: "dataclasses.Field[Any]", hint: Any) -> Setting:
    options = [part for part in get_args(hint) if part is not type(None)]
    is_optional = get_origin(hint) in (Union, types.UnionType) and len(options) < len(get_args(hint))
    kind = options[0] if is_optional else hint
    choices: tuple[str, ...] = ()
    if get_origin(kind) is Literal:
        kind, choices = str, get_args(kind)
    elif get_origin(kind) is tuple:
        kind = tuple
    return Setting(
        name=field.name,
        kind=kind,
        is_optional=is_optional,
        choices=choices,
        default=field.default,
        spec=spec_of(field),
    )


def _parse(kind: Any, value: Any) -> Any:
    if kind is bool:
        text = str(value).lower()
        if text not in _TRUE + _FALSE:
            raise ValueError
        return text in _TRUE
    if kind is tuple:
        parts = value if isinstance(value, list) else str(value).split(",")
        return tuple(str(part).strip() for part in parts)
    if isinstance(value, bool | list | dict):
        raise TypeError
    if kind is int and isinstance(value, float):
        raise TypeError
    if kind is Path and value == "":  # it would mean the current folder
        raise ValueError
    return kind(value)


class Parser(argparse.ArgumentParser):
    """Raises SettingError instead of printing usage, also if help cannot be printed. Guesses what was meant."""

    first_words: Sequence[str] = ()
    """Commands, which may stand before or instead of the flags; others deal with them."""

    taken_flags: Sequence[str] = ()
    """Flags that another parser has taken from the same command line."""

    def print_help(self, file: Any = None) -> None:
        """Argparse calls this for --help; its own method would swallow an error."""
        if file is None:
            streams.say(self.format_help())
        else:
            super().print_help(file)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse. Raises SettingError for anything unknown."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._advice(unknown)}")
        return found

    def _advice(self, unknown: Sequence[str]) -> str:
        """What may have been meant; else, for words that are no flags, what is taken."""
        first, known = unknown[0].partition("=")[0], [*self._option_string_actions, *self.taken_flags]
        if first.startswith("-"):
            foreign = advice_on(first) if "--max-num-seqs" in known else None  # a command may mean another thing by it
            return foreign or _nearest(first, known)
        if "://" in first and "--base-url" in known:
            return f"; did you mean --base-url {unknown[0]}?"
        if "://" in first and "--host" in known:
            return "; the address is given by --host and --port"
        model = next((word for word in unknown if "/" in word or os.path.isdir(word)), None)
        if model is not None and "--model" in known:
            return f"; did you mean --model {model}?"
        return self._advice_on_command(first)

    def _advice_on_command(self, word: str) -> str:
        if word in self.first_words:
            return f"; the command comes first: {self.prog} {word}"
        if near := difflib.get_close_matches(word, self.first_words, n=1):
            return f"; did you mean {self.prog} {near[0]}?"
        others = f", or a command first: {', '.join(self.first_words)}" if self.first_words else " only"
        return f"; {self.prog} takes flags{others}"

    def error(self, message: str) -> NoReturn:
        """What argparse calls for a wrong flag."""
        raise SettingError(f"{message}; --help lists all flags")


class _Help(argparse.Action):
    """`--help` prints everything, `--help WORD` the commands or flags under the first heading that has the word."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        text: str = parser.format_help()
        if values is not None:
            parts = {heading: part for part in text.split("\n\n") if (heading := part.partition(":\n")[0]) != part}
            found = [part for heading, part in parts.items() if values.lower() in heading.lower()]
            if not found:
                parser.error(f"--help: no heading has {values!r}; the headings are {', '.join(parts)}")
            text = found[0] + "\n"
        streams.say(text)
        parser.exit()


def make_parser(
    settings: Mapping[str, Setting], program: str, description: str, commands: Mapping[str, str] | None = None
) -> Parser:
    """A parser with a flag for every setting, grouped; flags that are not given leave no trace in its result.

    Its help also lists `commands`, each with what it does.
    """
    parser = Parser(
        prog=program,
        usage="%(prog)s [flags], or %(prog)s COMMAND [flags]",
        description=description,
        epilog=f"Every flag is also a variable ({PREFIX}MAX_NUM_SEQS for --max-num-seqs) and a key of the --config "
        "file\n(max_num_seqs). A flag beats a variable, a variable beats the file.",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # else the list of commands would be one paragraph
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
    )
    if commands:
        lines = "\n".join(f"{name:<12}{text}" for name, text in commands.items())
        parser.add_argument_group("commands", f"{lines}\n\nEach takes --help, too.")
    parser.first_words = tuple(commands or ())
    parser.add_argument("-h", "--help", action=_Help, nargs="?", metavar="HEADING", help="print this help, or a part")
    parser.add_argument("--config", metavar="FILE.yaml", help="file with settings")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    groups: dict[str, Any] = {}
    for setting in settings.values():
        title = setting.spec.group
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        text = f"{setting.spec.text} [{setting.default_text}]".replace("%", "%%")
        if setting.kind is bool:
            group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            unit = setting.name.partition("_per_")[0].split("_")[-1].upper()
            metavar = "{" + ",".join(setting.choices) + "}" if setting.choices else unit
            takes = {} if setting.spec.bare is None else {"nargs": "?", "const": setting.spec.bare}
            group.add_argument(setting.flag, metavar=metavar, help=text, **takes)
    return parser


def given_values(
    settings: Mapping[str, Setting], own: Parser, argv: Sequence[str], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Values that the flags of the service and the environment give, by field name; for a command.

    `argv` is what the command's `own` parser has left. Raises SettingError as `gather` does.
    """
    parser = make_parser(settings, own.prog, "")
    parser.taken_flags = tuple(own._option_string_actions)
    return gather(settings, vars(parser.parse_args(argv)), environ)


def gather(settings: Mapping[str, Setting], flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Values that were given anywhere, by field name. Raises SettingError naming flag, variable or key.

    An empty variable counts as unset, and a variable that a flag overrides is not read. But an empty secret is refused,
    in a file too: whoever sets it wants one, and without it the service would be open.
    """
    variables = {name: text for name, text in environ.items() if name.startswith(PREFIX) and text}
    file = flags.get("config", variables.pop(f"{PREFIX}CONFIG", None))
    by_variable = {setting.variable: setting for setting in settings.values()}
    values = {} if file is None else _from_file(settings, Path(file))
    for setting in settings.values():
        if setting.spec.is_secret and environ.get(setting.variable) == "" and setting.name not in flags:
            raise SettingError(f"{setting.variable} is empty: give a key, or remove the variable to serve without one")
    for name, text in variables.items():
        if name not in by_variable:
            raise SettingError(f"{name}: there is no such setting{_nearest(name, list(by_variable))}")
        if by_variable[name].name not in flags:
            values[by_variable[name].name] = by_variable[name].parse(text, name)
    for name, value in flags.items():
        if name in settings:
            values[name] = settings[name].parse(value, settings[name].flag)
    return values


def _from_file(settings: Mapping[str, Setting], file: Path) -> dict[str, Any]:
    """Values are taken as they are written, as those of flags are: YAML alone would make 10 of the key 012."""
    import yaml  # most starts have no file

    try:
        node = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise SettingError(f"--config: {file} cannot be read: {reason}") from error
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise SettingError(f"--config: {file} must hold keys and values")
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        if key not in settings:
            raise SettingError(f"--config: {file}: there is no setting '{key}'{_nearest(key, list(settings))}")
        if key in values:
            raise SettingError(f"--config: {file} gives {key} twice: remove one of the lines")
        source = f"{file}: {key}"
        values[key] = settings[key].parse(_written(value_node, source), source)
    return values


def _written(node: Any, source: str) -> str | list[str] | None:
    """The text of a YAML value, None for null, or the texts of a list. Raises SettingError for anything else."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return None if node.tag == _YAML_NULL else str(node.value)
    parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if any(not isinstance(part, yaml.ScalarNode) or part.tag == _YAML_NULL for part in parts):
        raise SettingError(f"{source} must hold one value, or a list of values")
    return [str(part.value) for part in parts]


def _nearest(name: str, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""
