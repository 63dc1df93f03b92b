"""Writes docs/settings.md from the declarations of the settings. Run it with `make pages` after changing one."""

from collections.abc import Collection
from pathlib import Path
from typing import get_args

from engine.setting import Group
from server.cli import all_settings
from server.settings import PREFIX, Setting

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
_HEAD = f"""# Settings

`make pages` writes this page from the declarations in `engine/config.py` and `server/config.py`.

Every flag is also an environment variable and a key of the file that `--config` names: `--max-num-seqs 8`,
`{PREFIX}MAX_NUM_SEQS=8` and `max_num_seqs: 8` mean the same. A flag beats a variable, a variable beats the file. An
empty variable counts as unset, but an empty key or password is refused. Where the values are true or false,
the flag is `--tune` or `--no-tune`. `none` unsets an optional number or path. Lists have commas between their entries.
"""
_KINDS = {int: "whole number", float: "number", bool: "true or false", Path: "path", tuple: "list", str: "text"}


def settings_page(settings: Collection[Setting]) -> str:
    """The page: a table for every group."""
    parts = [_HEAD]
    for group in get_args(Group):
        rows = [f"\n## {group}", "", "| flag | values | default | meaning |", "| --- | --- | --- | --- |"]
        for each in settings:
            if each.spec.group == group:
                rows.append(f"| `{each.flag}` | {_values(each)} | {each.default_text} | {each.spec.text} |")
        parts.append("\n".join(rows) + "\n")
    return "".join(parts)


def _values(setting: Setting) -> str:
    if setting.choices:
        return ", ".join(setting.choices)
    rule = setting.spec.rule()
    limits = rule.removeprefix("be ").removeprefix("lie ")
    return f"{_KINDS[setting.kind]} {limits}".strip()


if __name__ == "__main__":
    PAGE.write_text(settings_page(all_settings().values()))
