"""Helm, Kubernetes' schemas, systemd and Prometheus accept what is in deploy/, and the chart renders the manifests.

`make manifests` runs it; it needs systemd-analyze and promtool (Debian: systemd, prometheus).
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.settings import gather, make_parser
from tests.test_deploy import SETTINGS

pytestmark = [pytest.mark.manifests, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PYTHON = ROOT / ".venv-manifests" / "bin" / "python"
FULL = {
    "autoscaling": {"enabled": True},
    "args": ["--model=/models/a", "--max-num-seqs=8"],
    "gpus": 0,
    "resources": {"limits": {"memory": "8Gi"}, "requests": {"cpu": "2"}},
    "image": {"repository": "registry.example/moe-serve", "tag": "1", "pullPolicy": "Always", "pullSecrets": ["a"]},
    "env": [{"name": "HF_TOKEN", "value": "x"}],
    "preStopSeconds": 0,
    "drainSeconds": 90,
    "modelsClaim": "",
    "cacheClaim": "cache",
    "apiKeySecret": "",
    "disruptionBudget": False,
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
}


def ask(charts: list[dict[str, Any]], manifests: list[dict[str, Any]]) -> dict[str, Any]:
    if not PYTHON.exists():
        pytest.fail(".venv-manifests is missing: run `make manifests`, which makes it")
    command = [PYTHON, ROOT / "tests" / "manifests" / "render.py"]
    asked = json.dumps({"charts": charts, "manifests": manifests})
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def by_kind(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in found}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def program(name: str, package: str) -> str:
    found = shutil.which(name)
    return found or pytest.fail(f"{name} is missing: apt-get install {package}")


def test_the_chart_renders_the_manifests() -> None:
    answer = ask([{}, {"autoscaling": {"enabled": True}}], [])
    assert answer["lint"] == []
    plain, scaled = answer["charts"]
    assert by_kind(plain) == by_kind(documents("kubernetes/moe-serve.yaml"))
    assert [by_kind(scaled)["HorizontalPodAutoscaler"]] == documents("kubernetes/autoscaling.yaml")
    assert "replicas" not in by_kind(scaled)["Deployment"]["spec"], "an upgrade would undo the autoscaler's work"


def test_every_value_reaches_what_it_is_for() -> None:
    [full] = ask([FULL], [])["charts"]
    assert set(by_kind(full)) == {"Deployment", "Service", "HorizontalPodAutoscaler"}
    pod = by_kind(full)["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] == 100
    assert "lifecycle" not in container
    assert container["image"] == "registry.example/moe-serve:1"
    assert container["resources"] == FULL["resources"]
    assert container["env"] == FULL["env"]
    assert [each for each in pod["volumes"] if "persistentVolumeClaim" in each] == [
        {"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}
    ]
    for name in ("nodeSelector", "tolerations", "affinity"):
        assert pod[name] == FULL[name]
    values = gather(SETTINGS, vars(make_parser(SETTINGS, "moe-serve", "").parse_args(container["args"])), {})
    assert {name: f"{value}" for name, value in values.items()} == {
        "model": "/models/a", "max_num_seqs": "8", "drain_timeout": "90.0",
    }  # fmt: skip


@pytest.mark.parametrize(
    "values", [{"replica": 3}, {"args": ["--port=1"]}, {"drainSeconds": -1}, {"autoscaling": {"maxReplicas": "x"}}]
)
def test_a_wrong_value_is_refused_by_name(values: dict[str, Any]) -> None:
    [error] = ask([values], [])["charts"]
    assert next(iter(values)) in error


def test_kubernetes_accepts_every_manifest() -> None:
    charts = ask([FULL], [])["charts"]
    group, *rest = documents("leader-worker-set.yaml")  # no schemas of its own kind, but of the pods in it
    template = group["spec"]["leaderWorkerTemplate"]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template[name]["spec"]}
        for name in ("leaderTemplate", "workerTemplate")
    ]
    names = ("kubernetes/moe-serve.yaml", "kubernetes/autoscaling.yaml")
    manifests = [*charts[0], *pods, *rest, *(each for name in names for each in documents(name))]
    faults = ask([], manifests)["manifests"]
    assert faults == [None] * len(manifests)


def test_a_wrong_manifest_is_found() -> None:
    [manifest] = documents("kubernetes/autoscaling.yaml")
    manifest["spec"]["maxReplica"] = manifest["spec"].pop("maxReplicas")
    [fault] = ask([], [manifest])["manifests"]
    assert "maxReplica" in fault


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "moe-serve.service").read_text()
    service = "/opt/moe-serve/bin/moe-serve"  # systemd looks whether it is there
    assert service in text
    unit = tmp_path / "moe-serve.service"
    for line, is_right in ((text, True), (text.replace("KillMode=mixed", "KillMode=never"), False)):
        unit.write_text(line.replace(service, "/bin/true"))
        command = [program("systemd-analyze", "systemd"), "verify", unit]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = [each for each in done.stderr.splitlines() if unit.name in each]
        assert (said == []) is is_right, done.stderr


def test_prometheus_accepts_its_configuration() -> None:
    command = [program("promtool", "prometheus"), "check", "config", DEPLOY / "monitoring" / "prometheus.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
