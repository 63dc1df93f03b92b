"""The small files of a model, checked before its weights are downloaded or loaded."""

import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loaders.end_tokens import stated_vocab_size
from loaders.hf_config import read_config
from loaders.tokenizer import Tokenizer, load_tokenizer
from server.errors import BadRequest, SettingError
from server.parsers import needed_markers
from server.prompt import ChatTemplate
from server.sampling_defaults import SamplingDefaults, read_sampling_defaults

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What an HTTP process needs of a model's folder."""

    tokenizer: Tokenizer
    defaults: SamplingDefaults


def read_model_files(folder: Path) -> ModelFiles:
    """The tokenizer, whose chat templates can be compiled, and the sampling defaults; imports no torch.

    Raises:
        SettingError: a file is missing or damaged, or the model lacks tokens that it cannot be served without; names
            the file.
    """
    defaults = read_sampling_defaults(folder)
    try:
        tokenizer = load_tokenizer(folder)
        vocab_size = stated_vocab_size(read_config(folder).raw)
    except ValueError as error:
        raise SettingError(f"--model: {error}") from error
    template = ChatTemplate(tokenizer)
    variables = template.variables(has_tools=False) | template.variables(has_tools=True)
    if "bos_token" in variables and "bos_token" not in tokenizer.named_tokens:
        log.warning("%s: the chat template reads bos_token, but no file names one: prompts begin without it", folder)
    if vocab_size is not None:
        _check_ids(tokenizer, template, folder, vocab_size)
    return ModelFiles(tokenizer, defaults)


def _check_ids(tokenizer: Tokenizer, template: ChatTemplate, folder: Path, vocab_size: int) -> None:
    """Raise SettingError if the model lacks a marker that its parser needs, or a token of every prompt.

    It may lack others.
    """
    ids = tokenizer.special_tokens
    needed = [(folder / "tokenizer.json", ids[name]) for name in sorted(needed_markers(tokenizer) & ids.keys())]
    if tokenizer.adds_bos:
        needed.append((folder / "tokenizer.json", ids[tokenizer.named_tokens["bos_token"]]))
    if tokenizer.chat_template is not None:
        with suppress(BadRequest):  # the template wants another conversation
            chat = template.render([{"role": "user", "content": "a"}], [], {})
            needed += [(Path(tokenizer.chat_template.file), token_id) for token_id in chat]
    for file, token_id in needed:
        if token_id >= vocab_size:
            name = tokenizer.decode([token_id])
            raise SettingError(
                f"--model: {file}: it needs the token '{name}', whose id is {token_id}, but by vocab_size of "
                f"config.json the model has ids 0 to {vocab_size - 1}; take tokenizer files that belong to this model"
            )


def check_servable(folder: Path) -> None:
    """Refuse a model that cannot be served whatever its weights are. Imports torch.

    Raises:
        SettingError: a small file is missing or damaged, or config.json asks for what is not supported.
    """
    from model.registry import make_family

    try:
        family = make_family(read_config(folder))
        for layer in range(family.num_layers):
            list(family.layer_specs(layer, None))
    except ValueError as error:  # the error trees of the loaders and of the model begin there
        raise SettingError(f"--model: {error}") from error
    read_model_files(folder)
