"""Downloads from the hub: only what is needed, resumed where it broke, and one line for all that can go wrong."""

import errno
import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from filelock import FileLock
from huggingface_hub import _tree_cache, close_session, constants
from huggingface_hub.errors import HFValidationError

from server import hub_download
from server.errors import SettingError, StartError
from server.hub_errors import explain_failure
from tests.server.conftest import ASSETS
from tests.server.fake_hub import TOKEN, Hub, Repository, commit_of, run_hub
from tests.tables import rows

NAME = "maker/small"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
DEEPSEEK = json.loads((ASSETS.parent / "tiny-deepseek-v3" / "config.json").read_bytes())
CONFIG = json.loads((ASSETS / "config.json").read_bytes())
FILES = {
    **{name: (ASSETS / name).read_bytes() for name in ("config.json", "tokenizer.json", "tokenizer_config.json")},
    "generation_config.json": b'{"top_k": 5}',
    "chat_template.jinja": b"{{ messages }}",
    TOOL_TEMPLATE: b"{{ tools }}{{ messages }}",
    "model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode(),
    SHARDS[0]: b"first" * 4000,
    SHARDS[1]: b"second" * 4000,
}
UNNEEDED = {
    "README.md": b"# A model",
    "picture.png": b"png",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"not in the index",
    "original/model.safetensors": b"another layout",
    "original/tokenizer.json": b"{}",
    "original/config.json": b"{}",
    "original/model.safetensors.index.json": b"{}",
    "metal/model.bin": b"metal",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with one model; the library, which read its variables when it was imported, is pointed to it."""
    with run_hub() as hub:
        hub.repositories[NAME] = Repository({"main": FILES | UNNEEDED})
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub
        close_session()


def refusal(name: str = NAME, revision: str | None = None) -> str:
    """What the user reads when the download fails."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 the words are what is tested
        hub_download.fetch(name, revision)
    line = str(explain_failure(caught.value, name, revision))
    assert "\n" not in line
    assert line.startswith("--model: ")
    return line


def may_pass(name: str = NAME) -> bool:
    """Whether the download fails in a way that need not stay."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 its kind is what is tested
        hub_download.fetch(name, None)
    return isinstance(explain_failure(caught.value, name, None), StartError)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_only_what_is_needed_is_downloaded_and_only_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub_download.fetch(NAME, None)
    assert contents(folder) == FILES
    assert hub.fetched() == sorted(Path(name).name for name in FILES)
    hub.asked.clear()
    assert hub_download.fetch(NAME, None) == folder
    assert hub.fetched() == []
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_download.fetch(NAME, None) == folder
    assert hub.asked == []


def test_without_an_index_every_weight_file_counts(hub: Hub) -> None:
    hub.repositories[NAME] = Repository(
        {"main": {name: data for name, data in FILES.items() if not name.endswith("index.json")}}
    )
    assert set(SHARDS) <= set(contents(hub_download.fetch(NAME, None)))


def test_explain_and_plan_need_the_config_and_its_quantization_alone(hub: Hub) -> None:
    folder = hub_download.fetch(NAME, None, needs="config")
    assert contents(folder) == {"config.json": FILES["config.json"]}
    hub.repositories[NAME].revisions["v2"] = FILES | {"hf_quant_config.json": b"{}"}
    hub.asked.clear()
    assert sorted(contents(hub_download.fetch(NAME, "v2", needs="config"))) == ["config.json", "hf_quant_config.json"]
    assert hub.fetched() == ["hf_quant_config.json"]


def test_dummy_weights_are_not_downloaded(hub: Hub) -> None:
    folder = hub_download.fetch(NAME, None, needs="tokenizer")
    assert contents(folder) == {name: data for name, data in FILES.items() if name not in SHARDS}


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub) -> None:
    other = FILES | {"config.json": json.dumps(CONFIG | {"eos_token_id": 7}).encode()}
    hub.repositories[NAME].revisions["v2"] = other
    for revision in ("v2", commit_of("v2")):
        folder = hub_download.fetch(NAME, revision)
        assert folder.name == commit_of("v2")
        assert contents(folder) == other
    assert contents(hub_download.fetch(NAME, None)) == FILES


def test_a_broken_connection_is_taken_up_where_it_broke(hub: Hub) -> None:
    hub.faults[SHARDS[1]] = [FILES[SHARDS[1]][:7500]]
    assert contents(hub_download.fetch(NAME, None)) == FILES
    ranges = [wanted for method, path, wanted in hub.asked if method == "GET" and path.endswith(SHARDS[1])]
    assert ranges == [None, "bytes=7000-"]


def test_what_is_complete_is_kept_when_the_hub_fails(hub: Hub) -> None:
    hub.faults[SHARDS[1]] = [503]
    assert refusal() == f"--model: the hub at {hub.url} fails (status 503); start again later, complete files are kept"
    hub.asked.clear()
    assert contents(hub_download.fetch(NAME, None)) == FILES
    assert hub.fetched() == [SHARDS[1]]


def test_parts_that_a_killed_download_left_are_removed(hub: Hub, tmp_path: Path) -> None:
    hub_download.fetch(NAME, None, needs="config")
    repository = tmp_path / "cache" / "models--maker--small"
    dead, alive = (repository / "blobs" / f"{etag}.12345678.incomplete" for etag in ("dead", "alive"))
    dead.write_bytes(b"part")
    alive.write_bytes(b"part")
    lock = tmp_path / "cache" / ".locks" / repository.name / "alive.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        hub_download.fetch(NAME, None)
    assert not dead.exists()
    assert alive.exists()


def test_a_damaged_cache_is_mended(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    folder = hub_download.fetch(NAME, None)
    (folder / SHARDS[0]).resolve().write_bytes(b"fir")
    (folder / "config.json").resolve().write_bytes(b"")
    (folder / TOOL_TEMPLATE).resolve().write_bytes(b"{{ to")
    (folder / SHARDS[1]).resolve().unlink()
    hub.asked.clear()
    assert contents(hub_download.fetch(NAME, None)) == FILES
    assert hub.fetched() == sorted(["config.json", "tool_use.jinja", *SHARDS])
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [message.split(" differs in size")[0] for message in warned] == [
        str(folder / "config.json"),
        str(folder / TOOL_TEMPLATE),
        str(folder / SHARDS[0]),
    ]


def test_a_damaged_cache_cannot_be_mended_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub_download.fetch(NAME, None)
    (folder / SHARDS[0]).resolve().write_bytes(b"fir")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal().startswith(f"--model: HF_HUB_OFFLINE is set, and {NAME} is not, or not completely, in ")


@rows("token", None, "hf_wrong", TOKEN)
def test_a_gated_model_needs_a_token_that_has_access(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    hub.repositories[NAME].access = "gated"
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    if token == TOKEN:
        assert contents(hub_download.fetch(NAME, None)) == FILES
    else:
        assert refusal() == (
            f"--model: {NAME} is gated; accept its terms at {hub.url}/{NAME}, then set HF_TOKEN to a token of that "
            "account"
        )


def test_a_model_that_does_not_exist_or_is_private(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    line = refusal("maker/typo")
    assert line.startswith(f"--model: there is no folder maker/typo here and no such model at {hub.url}")
    hub.repositories[NAME].access = "private"
    assert "for a private model set HF_TOKEN" in refusal()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert contents(hub_download.fetch(NAME, None)) == FILES


def test_a_revision_that_does_not_exist(hub: Hub) -> None:
    assert refusal(revision="v9") == (
        f"--model: {NAME} has no revision 'v9'; give a branch, a tag or a commit of it with --revision"
    )
    assert "has no revision 'ffff" in refusal(revision="f" * 40)


@rows(
    "status, words, passes",
    (403, "refuses access to maker/small (status 403); check HF_TOKEN", False),
    (429, "no more requests", True),
    (500, "fails", True),
)
def test_a_hub_that_refuses_or_fails(hub: Hub, status: int, words: str, passes: bool) -> None:
    hub.status = status
    assert words in refusal()
    assert may_pass() is passes


def test_a_failing_hub_is_not_needed_once_the_model_is_here(hub: Hub) -> None:
    folder = hub_download.fetch(NAME, None)
    hub.status = 503
    assert hub_download.fetch(NAME, None) == folder


def test_a_hub_that_cannot_be_reached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    line = refusal()
    assert line.startswith(f"--model: the hub at {nowhere} cannot be reached (")
    assert f"{NAME} is not, or not completely, in {constants.HF_HUB_CACHE}; start again" in line
    assert may_pass()


def test_offline_with_nothing_or_a_part_of_the_model(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    words = f"--model: HF_HUB_OFFLINE is set, and {NAME} is not, or not completely, in {constants.HF_HUB_CACHE}; unset"
    assert refusal().startswith(words)
    assert not may_pass()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.faults[SHARDS[0]] = [500]
    assert "complete files are kept" in refusal()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal().startswith(words)


def test_offline_with_a_cache_of_an_older_library(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept no listing of the repository, so what is there is taken, if it can be a model."""
    folder = hub_download.fetch(NAME, None)
    [listing] = (folder.parents[1] / "trees").iterdir()
    listing.unlink()
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_download.fetch(NAME, None) == folder
    (folder / "tokenizer.json").unlink()
    assert f"({folder} has no tokenizer.json), and {NAME} is not, or not completely, in " in refusal()


def test_a_disk_without_room_is_seen_before_the_download(hub: Hub) -> None:
    hub.repositories[NAME].listed_sizes[SHARDS[0]] = 10**18
    line = refusal()
    assert line.startswith(f"--model: {NAME} needs 1000000000.0 GB more, but ")
    assert line.endswith("set HF_HUB_CACHE to a folder on a larger disk")
    assert may_pass()
    assert not set(SHARDS) & set(hub.fetched())


@rows(
    "error, kind, words",
    (OSError(errno.ENOSPC, "No space left"), StartError, "no space is left in .*set HF_HUB_CACHE to a folder on a"),
    (OSError(errno.EDQUOT, "Quota exceeded"), StartError, "no space is left"),
    (
        PermissionError(errno.EACCES, "Permission denied", "/c"),
        SettingError,
        r"/c cannot be written \(Permission denied\); set HF_",
    ),
    (OSError(errno.EROFS, "Read-only file system", "/c"), SettingError, "/c cannot be written"),
    (ValueError("two\nlines"), StartError, r"the download of maker/small failed \(two\); start again"),
    (HFValidationError("no name"), SettingError, r"maker/small cannot be the name of a model.*\(no name\)"),
    (httpx2.UnsupportedProtocol("no scheme"), SettingError, r"HF_ENDPOINT is .*\(no scheme\); give one with https"),
)
def test_errors_without_an_answer_of_the_hub(error: Exception, kind: type[Exception], words: str) -> None:
    told = explain_failure(error, NAME, None)
    assert type(told) is kind
    line = str(told)
    assert "\n" not in line
    assert re.search(words, line), line


@rows(
    "files, words",
    (
        {"config.json": json.dumps(CONFIG | {"quantization_config": {"quant_method": "awq", "bits": 4}}).encode()},
        "quantized as awq with 4 bits",
    ),
    ({"config.json": b"{}"}, "config.json: key 'architectures' is missing"),
    ({"config.json": b'{"architectures": ["Qwen3MoeForCausalLM"]}'}, "architecture 'Qwen3MoeForCausalLM' is unknown"),
    ({"config.json": json.dumps(DEEPSEEK | {"scoring_func": "softmax"}).encode()}, "scoring_func"),
    (
        {"config.json": json.dumps(CONFIG | {"rope_scaling": {"type": "x", "factor": 2}}).encode()},
        "type 'x' is not supported",
    ),
    (
        {"config.json": json.dumps(CONFIG | {"quantization_config": {"quant_method": "modelopt"}}).encode()},
        "the experts of this GPT-OSS model are in nvfp4, and only mxfp4 and bf16 can be read",
    ),
    ({"tokenizer.json": b"{"}, "tokenizer.json: cannot be read"),
    ({"chat_template.jinja": b"{% if %}"}, "line 1 of the chat template cannot be compiled"),
    ({TOOL_TEMPLATE: b"{% if %}"}, "tool_use.jinja: line 1 of the chat template"),
    ({"generation_config.json": b'{"temperature": -1}'}, "temperature is -1"),
    ({"config.json": b"{"}, "config.json: cannot be read as JSON"),
    (
        {"model.safetensors.index.json": b"[]"},
        "model.safetensors.index.json: not a safetensors index",
    ),
    (
        {"model.safetensors.index.json": b'{"weight_map": {"a": null}}'},
        "the entry of tensor 'a' is None, which names no file",
    ),
    ({SHARDS[1]: None}, f"maker/small is incomplete: model.safetensors.index.json names {SHARDS[1]}"),
    ({"config.json": None}, "maker/small has no config.json, so it cannot be served"),
    ({"tokenizer.json": None}, "maker/small has no tokenizer.json"),
    (
        {name: None for name in [*FILES, *UNNEEDED] if "safetensors" in name},
        "maker/small has no safetensors but .bin files",
    ),
)
def test_what_cannot_be_served_is_refused_before_its_weights_come(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes | None], words: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()
    hub.asked.clear()
    changed = FILES | UNNEEDED | files
    hub.repositories[NAME].revisions["main"] = {name: data for name, data in changed.items() if data is not None}
    assert words in refusal()
    assert not set(SHARDS) & set(hub.fetched())


def test_progress_is_logged_every_five_per_cent(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        hub_download.fetch(NAME, None)
    lines = [record.message.split(" (")[0] for record in caplog.records if record.name == "loaders.progress"]
    assert lines[-1] == f"downloading {NAME}: 100 %"
    assert 10 < len(lines) <= 20
    [begin] = [record.message for record in caplog.records if record.name == "server.hub_download"]
    assert begin.startswith(f"downloading {NAME} (commit {commit_of('main')}): 2 files, 0.00 GB, to ")
