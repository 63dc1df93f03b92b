"""The texts of a model's chat templates, and the files they stand in. Compiles and renders none.

A model may have several by name: "default", and "tool_use" for conversations with tools. As in transformers,
chat_template.jinja replaces the templates of tokenizer_config.json, and additional_chat_templates/ holds more by name.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loaders.errors import TokenizerError
from loaders.optional_file import is_there

DEFAULT, TOOL_USE = "default", "tool_use"
_MARKER = re.compile(r"<.+>|\[.+\]")


@dataclass(frozen=True, slots=True)
class TemplateText:
    """One template, and the file that it comes from, for messages."""

    text: str
    file: str


def read_chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, TemplateText]:
    """All templates by name; `settings` is tokenizer_config.json. Empty, or with one called "default".

    Raises:
        TokenizerError: a template is not text, or there are some and none is the default.
    """
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if is_there(folder / "chat_template.jinja", TokenizerError):
        files[DEFAULT] = folder / "chat_template.jinja"
    config = folder / "tokenizer_config.json"
    texts = {} if DEFAULT in files else _from_config(settings.get("chat_template"), config)
    templates = {name: TemplateText(text, str(config)) for name, text in texts.items()}
    templates |= {name: TemplateText(_read(path), str(path)) for name, path in files.items()}
    if templates and DEFAULT not in templates:
        raise TokenizerError(
            f"{config}: no chat template is called '{DEFAULT}', only {', '.join(sorted(templates))}; name the one to "
            f"use '{DEFAULT}'"
        )
    return templates


def written_markers(templates: Mapping[str, TemplateText], tokens: Iterable[str]) -> frozenset[str]:
    """Those of some tokens that a template writes and that look like markers: `<|im_start|>`, `[INST]`.

    No user may write them. A token such as "=" is a word, though the code of a template holds it.
    """
    texts = [template.text for template in templates.values()]
    return frozenset(each for each in tokens if _MARKER.fullmatch(each) and any(each in text for text in texts))


def _from_config(value: Any, config: Path) -> dict[str, str]:
    """The templates of tokenizer_config.json: one text, or a list of objects with names."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    if not isinstance(value, list):
        raise TokenizerError(f"{config}: chat_template must be text or a list of named templates")
    for index, entry in enumerate(value):
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            raise TokenizerError(f"{config}: chat_template[{index}] must be an object with a name and a template")
    return {entry["name"]: entry["template"] for entry in value}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: is not UTF-8: {error}") from error
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from error
