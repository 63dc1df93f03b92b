"""Dockerfile and compose.yaml: what must hold for both images (G07, G61, G82); nothing is built."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from scripts.rehearse_image import Stage, read_stages
from server import cli
from tests.tables import rows

ROOT = Path(__file__).parents[1]
STAGES = read_stages(ROOT / "Dockerfile")


of_both_images = rows("stage", *STAGES.values())


def test_the_gpu_image_is_the_default_and_the_cpu_image_a_target() -> None:
    assert list(STAGES) == ["cpu", "gpu"]


@of_both_images
def test_g61_the_user_has_a_number_that_ubuntu_does_not_use(stage: Stage) -> None:
    (uid,) = {match for text, _, _ in stage.steps for match in re.findall(r"useradd --uid (\d+)", text)}
    assert stage.user == uid
    assert 10_000 <= int(uid) < 60_000  # Ubuntu hands out 1000 and up, and has 1000 in its image


@of_both_images
def test_g07_g82_process_1_is_an_init_and_the_container_ends_with_the_engine(stage: Stage) -> None:
    assert stage.entrypoint == ["tini", "--", "moe-serve"]
    assert any("tini" in text for text, _, _ in stage.steps if "apt-get install" in text)
    assert stage.environ["MOE_SERVE_EXIT_ON_ENGINE_DEATH"] == "true"


@of_both_images
def test_g61_the_health_check_is_the_command_that_knows_the_port(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stage.healthcheck == ["moe-serve", "health", "--of-pid", "1"]
    assert cli.main([*stage.healthcheck[1:], "--port", "1"]) == 1
    assert "no answer from" in capsys.readouterr().out


@of_both_images
def test_everything_that_is_written_goes_to_the_cache(stage: Stage) -> None:
    """So that a read-only root and any --user work; the folder itself is open to all."""
    assert any("mkdir -m 1777 /cache" in text for text, _, _ in stage.steps)
    assert stage.folder == "/cache"
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"):
        assert stage.environ[name].startswith("/cache")


def test_both_images_run_alike() -> None:
    cpu, gpu = STAGES["cpu"], STAGES["gpu"]
    assert (cpu.user, cpu.folder, cpu.labels) == (gpu.user, gpu.folder, gpu.labels)
    only_gpu = {"TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "FLASHINFER_CUDA_ARCH_LIST"}
    assert gpu.environ == cpu.environ | {name: gpu.environ[name] for name in only_gpu}


@of_both_images
def test_labels_name_the_version_and_the_licence_of_the_project(stage: Stage) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert stage.labels["org.opencontainers.image.version"] == project["version"]
    assert stage.labels["org.opencontainers.image.licenses"] == project["license"]


def test_compose_builds_both_images_as_the_dockerfile_names_them() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert {name: service["build"]["target"] for name, service in services.items()} == {"cpu": "cpu", "gpu": "gpu"}
    assert all(service["read_only"] and service["volumes"] == ["cache:/cache"] for service in services.values())


def test_the_reader_joins_lines_and_fills_variables(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        "FROM a AS one\nENV A=1 \\\n    # a comment between\n    B=$A/x\nRUN first \\\n  && second\n"
        f"ARG C=2\nRUN third\nENTRYPOINT {json.dumps(['x', 'y'])}\nFROM b AS two\nRUN fourth\n"
    )
    one, two = read_stages(tmp_path / "Dockerfile").values()
    assert [(" ".join(text.split()), environ.get("C")) for text, environ, _ in one.steps] == [
        ("first && second", None),
        ("third", "2"),
    ]
    assert one.environ["A"] == "1"
    assert one.entrypoint == ["x", "y"]
    assert [text for text, _, _ in two.steps] == ["fourth"]
