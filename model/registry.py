"""Which architectures are known, and `build_model`, the one way from a folder to a loaded model."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from loaders.hf_config import HfConfig, read_config
from loaders.phases import StartPhases
from model.config import ModelError, ModelSettings, UnsupportedModelError

if TYPE_CHECKING:  # families register themselves here, so this module must not import them when it loads
    from torch.distributed import ProcessGroup

    from model.decoder import Model
    from model.families.base import Family

# Built-in families: imported on first use.
FAMILY_MODULES = {
    "GptOssForCausalLM": "model.families.gpt_oss",
    "DeepseekV3ForCausalLM": "model.families.deepseek_v3",
}
_families: dict[str, type["Family"]] = {}
_F = TypeVar("_F", bound="type[Family]")


def register_family(architecture: str) -> Callable[[_F], _F]:
    """Class decorator: makes a family known under the name that config.json gives in `architectures`."""

    def decorate(cls: _F) -> _F:
        if architecture in _families:
            raise ModelError(f"architecture {architecture} is registered twice")
        _families[architecture] = cls
        return cls

    return decorate


def make_family(config: HfConfig) -> "Family":
    """The family of a config, which checks the config.

    Raises:
        UnsupportedModelError: an unknown architecture (the known ones are listed), or a value that is not implemented.
    """
    architecture = config.architecture
    if architecture in FAMILY_MODULES:
        importlib.import_module(FAMILY_MODULES[architecture])
    if architecture not in _families:
        known = ", ".join(sorted({*FAMILY_MODULES, *_families}))
        raise UnsupportedModelError(f"{config.path}: architecture {architecture!r} is unknown; known: {known}")
    return _families[architecture](config)


def build_model(
    folder: Path, settings: ModelSettings, group: "ProcessGroup | None" = None, phases: StartPhases | None = None
) -> "Model":
    """Load this rank's part of the model in `folder`, ready to run.

    Order: config.json, headers, the path of every MoE layer, and only then weights, one layer at a time. `group` is
    torch's default process group, needed where `settings.layout` has several ranks; all of them call this together.
    `phases` is the record of the start that this is a part of.

    Raises:
        LoadError: (of the loaders) files or tensors that are missing, damaged, left over or of the wrong shape.
        ModelError: settings or config.json ask for something that is not implemented or contradicts the weights.
        MoeError: (of moe) no backend serves the experts, or the self-check failed.
    """
    from model.groups import make_groups
    from model.load import load_model

    family = make_family(read_config(folder))
    one_shot_on = settings.device if settings.one_shot_sums and settings.device.type == "cuda" else None
    return load_model(family, folder, settings, make_groups(settings.layout, group, one_shot_on), phases)
