"""What `--model` means: a folder, a bundled model, or one on the Hugging Face hub; and the name to serve it under."""

import re
from dataclasses import dataclass
from pathlib import Path

from server.errors import SettingError

BUNDLED_MODELS = ("tiny-gpt-oss", "tiny-deepseek-v3", "tiny-deepseek-v3-nvfp4")
"""The one list of the bundled models, folders in `assets`; the first one is served where --model is left out."""
_HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SNAPSHOT = re.compile(r"models--(?P<name>[^/]+)/snapshots/[^/]+")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub; `revision` is a branch, a tag or a commit, None for the main branch."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name} at revision {self.revision}"


def locate_model(text: str | None, revision: str | None = None) -> Path | HubModel:
    """The folder or hub model that `--model` means; None means the first bundled one. Looks at names only.

    An existing folder comes first, then a bundled model, then OWNER/NAME on the hub.

    Raises:
        SettingError: the text means none of them, or `revision` is given for a folder.
    """
    place = _locate(BUNDLED_MODELS[0] if text is None else text)
    if isinstance(place, HubModel):
        return HubModel(place.name, revision)
    if revision is not None:
        raise SettingError(
            f"--revision: {place} is a folder, which has no revisions; give --model OWNER/NAME, or leave it out"
        )
    return place


def _locate(text: str) -> Path | HubModel:
    folder = Path(text)
    if text and folder.exists():
        return folder
    if text in BUNDLED_MODELS:
        return bundled_models() / text
    if _HUB_NAME.fullmatch(text) and "--" not in text and ".." not in text:
        return HubModel(text)
    raise SettingError(
        f"--model: '{text}' does not exist; give the folder of a checkpoint, a name on the Hugging Face hub such as "
        f"openai/gpt-oss-20b, or one of the bundled models: {', '.join(BUNDLED_MODELS)} (the first is the default)"
    )


def bundled_models() -> Path:
    """The folder of the bundled models: `assets` of a checkout, a folder of this package when installed."""
    package = Path(__file__).resolve().parent
    checkout = package.parent / "assets"
    return checkout if checkout.is_dir() else package / "bundled"


def served_name(model: Path | HubModel) -> str:
    """The name in the API: the hub's name (also for a snapshot in the hub's cache), else the folder's."""
    if isinstance(model, HubModel):
        return model.name
    folder = model.resolve()
    snapshot = _SNAPSHOT.fullmatch("/".join(folder.parts[-3:]))
    return folder.name if snapshot is None else snapshot["name"].replace("--", "/")


def check_model_folder(folder: Path) -> None:
    """Raise SettingError unless the folder looks like a checkpoint; the loader checks the contents."""
    if not folder.is_dir():
        raise SettingError(f"--model: {folder} is a file; give the folder that holds config.json and the weights")
    if not (folder / "config.json").is_file():
        raise SettingError(f"--model: {folder} is not a checkpoint: it has no config.json; give a folder that has one")
