"""What `--model` means, the name it is served under, and a start from the hub, end to end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from server import cli
from server.errors import SettingError
from server.model_source import HubModel, bundled_models, locate_model, served_name
from tests.server.conftest import ASSETS
from tests.server.fake_hub import Hub, Repository, commit_of, run_hub
from tests.tables import rows

ROOT = Path(__file__).resolve().parents[2]
NAME = "maker/tiny"


def test_an_existing_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tiny-gpt-oss", "openai/gpt-oss-20b", "one"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for text in ("tiny-gpt-oss", "openai/gpt-oss-20b", "one", "./one", str(tmp_path / "one")):
        assert locate_model(text) == Path(text)


def test_then_a_bundled_model_then_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate_model(None) == locate_model("tiny-gpt-oss") == bundled_models() / "tiny-gpt-oss" == ASSETS
    assert locate_model("openai/gpt-oss-20b") == HubModel("openai/gpt-oss-20b")
    assert locate_model("a_1/B.2-c", "v1") == HubModel("a_1/B.2-c", "v1")


@rows("text", "./x", "/x", "../x", "x", "x/y/z", "~/x", "x/", "/x/y", ".x/y", "x/.y", "a--b/c", "x/y z", "hf://x/y", "")
def test_what_looks_like_a_path_gets_the_error_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match=r"--model: '.*' does not exist; give the folder of a checkpoint, a name on"):
        locate_model(text)


@rows("model", None, "tiny-gpt-oss", str(ASSETS))
def test_a_folder_has_no_revision(model: str | None) -> None:
    with pytest.raises(SettingError, match=r"--revision: .* is a folder"):
        locate_model(model, "main")


def test_a_snapshot_of_the_cache_is_served_under_its_name_on_the_hub(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--openai--gpt-oss-20b" / "snapshots" / commit_of("main")
    snapshot.mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    plain = tmp_path / "snapshots" / "mine"
    plain.mkdir(parents=True)
    for model, name in (
        (snapshot, "openai/gpt-oss-20b"),
        (link, "openai/gpt-oss-20b"),
        (plain, "mine"),
        (HubModel("openai/gpt-oss-20b", "v1"), "openai/gpt-oss-20b"),
        (ASSETS, "tiny-gpt-oss"),
    ):
        assert served_name(model) == name


def test_the_name_in_the_api_is_the_one_asked_for_unless_another_is_given() -> None:
    def names(**values: object) -> tuple[str, ...]:
        return cli.make_configs(cli.all_settings(), values)[0].served_model_name

    assert names(model="openai/gpt-oss-20b") == ("openai/gpt-oss-20b",)
    assert names(model="openai/gpt-oss-20b", revision="v1") == ("openai/gpt-oss-20b",)
    assert names(model="openai/gpt-oss-20b", served_model_name=("mine",)) == ("mine",)
    assert names() == ("tiny-gpt-oss",)


def test_a_start_from_a_folder_does_not_import_the_library() -> None:
    probe = "import sys; from server import cli, service; print({'huggingface_hub', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "set()\n"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The bundled model on a hub that the variables of the library point to."""
    with run_hub() as hub:
        files = {path.name: path.read_bytes() for path in ASSETS.iterdir()}
        hub.repositories[NAME] = Repository({"main": files})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield hub


def start(*flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "server", "--port", "0", "--model", NAME, *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.processes
def test_the_service_downloads_the_model_and_serves_it_under_its_name(hub: Hub) -> None:
    with start() as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready, process.communicate()
            assert json.loads(ready)["models"] == [NAME]
            url = json.loads(ready)["url"]
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                assert client.models.retrieve(NAME).id == NAME
                answer = client.completions.create(model=NAME, prompt="Hello", max_tokens=1)
            assert answer.model == NAME
            assert [entry["id"] for entry in httpx2.get(f"{url}/models").json()["data"]] == [NAME]
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=30)
    assert f"downloading {NAME}: 100 %" in errors
    assert "README.md" not in hub.fetched()


def test_a_signal_ends_a_download_at_once(hub: Hub, tmp_path: Path) -> None:
    """The part that is left in the cache goes with the next download."""
    hub.stalls = True
    with start() as process:
        try:
            assert hub.stalled.wait(30), "the download did not begin"
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=10)
        finally:
            process.kill()
    assert hub.hung_up.wait(10), "the download goes on without the service"
    [part] = tmp_path.rglob("*.incomplete")
    hub.stalls = False
    assert cli.download(HubModel(NAME)).name == commit_of("main")
    assert not part.exists()


@rows("flags, needs", ([], "weights"), (["--load-format", "dummy"], "tokenizer"))
def test_the_engine_gets_the_folder_of_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], needs: str
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(cli, "download", lambda model, **options: seen.append((model, options["needs"])) or tmp_path)
    monkeypatch.setattr("server.service.run", lambda server, engine, listener: seen.append(engine.model) or 0)
    assert cli.main(["--port", "0", "--model", NAME, "--revision", "v1", *flags]) == 0
    assert seen == [(HubModel(NAME, "v1"), needs), tmp_path]


def test_a_failed_download_is_one_line(hub: Hub) -> None:
    with start("--revision", "v9", "--log-level", "error") as process:
        out, errors = process.communicate(timeout=30)
    assert (process.returncode, out) == (cli.USAGE_ERROR, "")
    assert errors == (
        f"moe-serve: --model: {NAME} has no revision 'v9'; give a branch, a tag or a commit of it with --revision\n"
    )


def test_explain_reads_the_config_from_the_hub_alone(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["explain", "--gpu", "cpu", "--format", "mxfp4", "--model", NAME]
    assert cli.main(flags) == 0
    assert capsys.readouterr().out.startswith(f"{NAME}: 8 experts of 288 x 288, top-2, as mxfp4 on cpu")
    assert hub.fetched() == ["config.json"]


def test_a_complete_model_in_the_cache_needs_no_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cli.download(HubModel(NAME))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.asked.clear()
    assert cli.download(HubModel(NAME)) == folder
    assert hub.asked == []
    assert json.loads((folder / "config.json").read_bytes())["architectures"] == ["GptOssForCausalLM"]
    assert os.fspath(folder).endswith(commit_of("main"))
