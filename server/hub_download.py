"""The process that downloads one model from the Hugging Face hub into the hub's cache, and only the files it needs.

The library reads its own variables (HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE, HF_HUB_OFFLINE...) and resumes a download that
broke off. Small files come first, and a model that cannot be served is refused before its weights are downloaded.
Complete files are never downloaded again.
"""

import json
import logging
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from huggingface_hub import (
    HfApi,
    ResolvedRevision,
    constants,
    get_cached_repo_tree,
    get_session,
    snapshot_download,
)
from huggingface_hub.errors import CachedRepoTreeNotFoundError

from engine.logs import log_to_stderr
from loaders.progress import Progress
from loaders.weight_index import read_index
from server.errors import SettingError, StartError
from server.hub import Needs
from server.hub_errors import explain_failure
from server.hub_progress import QuietBar, make_byte_counter
from server.model_files import check_servable

_CONFIG = "config.json"
_CONFIG_FILES = (_CONFIG, "hf_quant_config.json")
_SMALL_FILES = (
    *_CONFIG_FILES,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
_WEIGHTS, _INDEX = ".safetensors", ".safetensors.index.json"
_REQUEST_TIMEOUT_S = 30.0  # without a byte; for some requests the library would wait forever
_log = logging.getLogger("server.hub_download")  # runs as __main__


def main() -> None:
    """Read an order from standard input, write the folder or error to standard output; exit when the input closes."""
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    log_to_stderr(order["log_level"], order["log_format"])
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs a line for every request
    try:
        folder = fetch(order["name"], order["revision"], needs=order["needs"])
        answer: dict[str, Any] = {"folder": str(folder)}
    except Exception as error:  # whatever it is, the service must be told in one line
        _log.debug("the download failed", exc_info=True)
        told = explain_failure(error, order["name"], order["revision"])
        answer = {"error": str(told), "is_setting": isinstance(told, SettingError)}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


def fetch(name: str, revision: str | None, *, needs: Needs = "weights") -> Path:
    """Download what is needed and return the snapshot.

    Raises the library's errors, the loaders', SettingError and StartError.
    """
    get_session().timeout = _REQUEST_TIMEOUT_S
    commit = HfApi().resolve_revision(name, revision=revision)
    small = [*_CONFIG_FILES] if needs == "config" else [*_SMALL_FILES, f"*{_INDEX}"]
    folder = _snapshot(name, commit, small)
    sizes = _sizes(name, commit)
    if _discard_damaged(folder, sizes):
        folder = _snapshot(name, commit, small)
    _require(name, folder, sizes, _CONFIG)
    if needs == "config":
        return folder
    _require(name, folder, sizes, "tokenizer.json")
    if sizes and needs == "weights":
        _fetch_weights(name, commit, folder, _weights(name, folder, sizes))
    return folder


def _snapshot(name: str, commit: ResolvedRevision, files: list[str], bar: type[QuietBar] = QuietBar) -> Path:
    folder = snapshot_download(
        name, revision=commit, allow_patterns=files, ignore_patterns=f"*/*{_INDEX}", tqdm_class=bar
    )
    return Path(folder)


def _sizes(name: str, commit: ResolvedRevision) -> dict[str, int]:
    """Bytes of each file at the top level and of the small ones, by path.

    Empty if there is no listing (offline, cache of an older library).
    """
    try:
        tree = get_cached_repo_tree(name, revision=commit)
    except CachedRepoTreeNotFoundError:
        return {}
    return {file.path: file.size for file in tree if "/" not in file.path or file.path in _SMALL_FILES}


def _require(name: str, folder: Path, sizes: dict[str, int], file: str) -> None:
    if (folder / file).is_file():
        return
    if not sizes:
        raise FileNotFoundError(f"{folder} has no {file}")
    raise SettingError(
        f"--model: {name} has no {file}, so it cannot be served from here; choose a repository with the files of "
        "transformers"
    )


def _weights(name: str, folder: Path, sizes: dict[str, int]) -> dict[str, int]:
    """Bytes of the weight files: those that the index names if there is one, else all safetensors."""
    files = {file: size for file, size in sizes.items() if file.endswith(_WEIGHTS)}
    indexes = [file for file in sizes if file.endswith(_INDEX)]
    if len(indexes) == 1:
        listed = set(read_index(folder / indexes[0]).values())
        if absent := sorted(listed - files.keys()):
            raise SettingError(
                f"--model: {name} is incomplete: {indexes[0]} names {absent[0]}; ask its maker to upload it"
            )
        files = {file: files[file] for file in files if file in listed}
    if not files:
        others = sorted({Path(file).suffix for file in sizes} & {".bin", ".pth", ".pt", ".gguf", ".npz"})
        found = f" but {' and '.join(others)} files" if others else ""
        raise SettingError(f"--model: {name} has no safetensors{found}; choose another upload of the model")
    return files


def _fetch_weights(name: str, commit: ResolvedRevision, folder: Path, files: dict[str, int]) -> None:
    missing = {file: size for file, size in files.items() if not (folder / file).is_file()}
    if not missing:
        return
    check_servable(folder)
    _remove_left_over(folder.parents[1])
    num_bytes = sum(missing.values())
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise StartError(
            f"--model: {name} needs {num_bytes / 1e9:.1f} GB more, but {free / 1e9:.1f} GB are free in "
            f"{constants.HF_HUB_CACHE}; free some, or set HF_HUB_CACHE to a folder on a larger disk"
        )
    _log.info(
        "downloading %s (commit %s): %d files, %.2f GB, to %s",
        name, commit.resolved, len(missing), num_bytes / 1e9, folder,
    )  # fmt: skip
    with Progress(f"downloading {name}", num_bytes) as progress:
        _snapshot(name, commit, list(files), make_byte_counter(progress))


def _discard_damaged(folder: Path, sizes: dict[str, int]) -> bool:
    """Remove cached files of the wrong size, so that they are downloaded again; True if there were any."""
    damaged = [folder / file for file, size in sizes.items() if _size(folder / file) not in (None, size)]
    for path in damaged:
        _log.warning("%s differs in size from the hub's listing: it is damaged and will be downloaded again", path)
        path.resolve().unlink()
    return bool(damaged)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _remove_left_over(repository: Path) -> None:
    """Remove what killed downloads of this model left behind; the library starts over under another name."""
    for part in (repository / "blobs").glob("*.incomplete"):
        blob = part.name.split(".")[0]
        lock = FileLock(repository.parent / ".locks" / repository.name / f"{blob}.lock", timeout=0)
        try:
            with lock:
                part.unlink(missing_ok=True)
        except Timeout:
            continue  # another process is downloading it now


if __name__ == "__main__":
    main()
