"""The small files of a model, checked before its weights are downloaded or loaded."""

import logging
from dataclasses import dataclass
from pathlib import Path

from loaders.tokenizer import Tokenizer, load_tokenizer
from server.errors import SettingError
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
        SettingError: a file is missing or damaged; names the file.
    """
    defaults = read_sampling_defaults(folder)
    try:
        tokenizer = load_tokenizer(folder)
    except ValueError as error:
        raise SettingError(f"--model: {error}") from error
    template = ChatTemplate(tokenizer)
    variables = template.variables(has_tools=False) | template.variables(has_tools=True)
    if "bos_token" in variables and "bos_token" not in tokenizer.named_tokens:
        log.warning("%s: the chat template reads bos_token, but no file names one: prompts begin without it", folder)
    return ModelFiles(tokenizer, defaults)


def check_servable(folder: Path) -> None:
    """Refuse a model that cannot be served whatever its weights are. Imports torch.

    Raises:
        SettingError: a small file is missing or damaged, or config.json asks for what is not supported.
    """
    from loaders.hf_config import read_config
    from model.registry import make_family

    read_model_files(folder)
    try:
        family = make_family(read_config(folder))
        for layer in range(family.num_layers):
            list(family.layer_specs(layer, None))
    except ValueError as error:  # the error trees of the loaders and of the model begin there
        raise SettingError(f"--model: {error}") from error
