"""The files in deploy/, compose.yaml and the Dockerfile start the service with settings that exist and fit together."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.datastructures import Headers

from engine.config import EngineConfig
from scripts.rehearse_image import read_stages
from server.cli import all_settings
from server.config import ServerConfig
from server.draining import LAST_CALL_S
from server.errors import Unauthorized
from server.keys import ClientKey, Keyring
from server.metrics import Metrics
from server.routes import operations
from server.settings import PREFIX, gather, make_parser
from server.tally import OwnTally

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
FILES = [*sorted(path for path in DEPLOY.rglob("*") if path.is_file()), ROOT / "compose.yaml"]
SETTINGS = all_settings()
LWS = {"$(LWS_GROUP_SIZE)": "2", "$(LWS_WORKER_INDEX)": "1", "$(LWS_LEADER_ADDRESS)": "moe-serve-0.moe-serve"}
FLAGS_OF_OTHERS = {"--help", "--profile", "--pdeathsig"}  # of all, docker compose, setpriv
SECONDS_TO_EXIT = 5
"""After the drain: the last call of connections, and the engine's end."""

Pod = dict[str, Any]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


@cache
def pods() -> dict[str, Pod]:
    """The specification of every pod that runs the service, by where it stands."""
    [deployment] = [each for each in documents("kubernetes/moe-serve.yaml") if each["kind"] == "Deployment"]
    [group] = [each for each in documents("leader-worker-set.yaml") if each["kind"] == "LeaderWorkerSet"]
    template = group["spec"]["leaderWorkerTemplate"]
    return {
        "deployment": deployment["spec"]["template"]["spec"],
        "leader": template["leaderTemplate"]["spec"],
        "worker": template["workerTemplate"]["spec"],
    }


def settings_of(pod: Pod) -> dict[str, Any]:
    """What its flags and variables set. Raises SettingError for one that does not exist."""
    [container] = pod["containers"]
    words = [re.sub(r"\$\(\w+\)", lambda match: LWS[match[0]], word) for word in container["args"]]
    environ = {each["name"]: each.get("value", "a-key") for each in container.get("env", [])}
    return gather(SETTINGS, vars(make_parser(SETTINGS, "moe-serve", "").parse_args(words)), environ)


def env_file() -> dict[str, str]:
    """Of the systemd unit, with what is commented out."""
    lines = (DEPLOY / "systemd" / "moe-serve.env").read_text().splitlines()
    return dict(line.lstrip("#").split("=", 1) for line in lines if re.match(r"#?[A-Z_]+=", line))


def drains() -> Iterator[tuple[str, float, float]]:
    """Who ends a service: seconds until it is killed, and those that it is given to drain."""
    default = ServerConfig().drain_timeout
    for name, pod in pods().items():
        hook = pod["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        drain_s = settings_of(pod).get("drain_timeout", default)
        yield name, pod["terminationGracePeriodSeconds"] - hook, drain_s
    for name, service in yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].items():
        yield f"compose {name}", float(service["stop_grace_period"].removesuffix("s")), default
    [stop_s] = re.findall(r"^TimeoutStopSec=(\d+)$", (DEPLOY / "systemd/moe-serve.service").read_text(), re.MULTILINE)
    yield "systemd", float(stop_s), float(env_file()["MOE_SERVE_DRAIN_TIMEOUT"])


def test_all_pods_of_the_set_start_the_same_layout() -> None:
    leader, worker = pods()["leader"], pods()["worker"]
    values = settings_of(leader)
    assert values == settings_of(worker)
    config = EngineConfig(**{name: value for name, value in values.items() if name != "host"})
    [group] = [each for each in documents("leader-worker-set.yaml") if each["kind"] == "LeaderWorkerSet"]
    assert config.nnodes == group["spec"]["leaderWorkerTemplate"]["size"]
    assert len(config.local_ranks) == int(leader["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_flag_variable_and_probe_exists(path: Path) -> None:
    text = path.read_text()
    flags = {setting.flag for setting in SETTINGS.values()} | FLAGS_OF_OTHERS
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= flags
    variables = {setting.variable for setting in SETTINGS.values()}
    assert set(re.findall(rf"\b{PREFIX}[A-Z_]+\b(?!\*)", text)) - {PREFIX} <= variables
    routes = {route.path for route in operations.router.routes}
    assert set(re.findall(r"/health\b[/\w]*|(?<=: )/metrics", text)) <= routes


def test_the_files_name_what_the_last_test_looks_for() -> None:
    text = "".join(path.read_text() for path in FILES)
    assert all(each in text for each in ("--drain-timeout", "--client-header", f"{PREFIX}API_KEY", "/health/ready"))


@pytest.mark.parametrize(("name", "kill_s", "drain_s"), list(drains()))
def test_nobody_kills_a_service_that_drains(name: str, kill_s: float, drain_s: float) -> None:
    assert kill_s >= drain_s + LAST_CALL_S + SECONDS_TO_EXIT


def test_ports_agree() -> None:
    port = ServerConfig().port
    for name in ("deployment", "leader"):
        [container] = pods()[name]["containers"]
        [own] = container["ports"]
        probes = [container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("readiness", "liveness")]
        assert own["containerPort"] == port
        assert set(probes) <= {port, own.get("name")}
    services = [each for name in ("kubernetes/moe-serve.yaml", "leader-worker-set.yaml") for each in documents(name)]
    assert [each["spec"]["ports"][0]["port"] for each in services if each["kind"] == "Service"] == [port, port]
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert {each for service in compose.values() for each in service["ports"]} == {f"{port}:{port}"}
    assert f"EXPOSE {port}\n" in (ROOT / "Dockerfile").read_text()
    assert env_file()["MOE_SERVE_PORT"] == f"{port}"
    [scrape] = yaml.safe_load((DEPLOY / "monitoring/prometheus.yaml").read_text())["scrape_configs"]
    [names] = scrape["dns_sd_configs"]
    assert (names["port"], set(names["names"])) == (port, set(compose))


def test_the_pod_runs_as_the_image_does() -> None:
    """The user, and the only folders that are written."""
    pod = pods()["deployment"]
    [container] = pod["containers"]
    image = read_stages(ROOT / "Dockerfile")["gpu"]
    assert f"{pod['securityContext']['runAsUser']}" == image.user
    written = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert written == {image.folder, "/tmp", "/dev/shm"}


def test_the_autoscaler_reads_a_metric_of_the_service() -> None:
    [autoscaler], [adapter] = documents("kubernetes/autoscaling.yaml"), documents("kubernetes/prometheus-adapter.yaml")
    [metric], [rule] = autoscaler["spec"]["metrics"], adapter["rules"]["custom"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    metrics = Metrics(lambda: None, lambda: None, OwnTally())
    metrics.queue_seconds.observe("model", value=1)
    exposed = set(re.findall(r"^(\w+)", metrics.text().decode(), re.MULTILINE))
    read = set(re.findall(r"moe_serve_\w+", rule["seriesQuery"] + rule["metricsQuery"]))
    assert len(read) == 2
    assert read <= exposed


def test_prometheus_has_a_key_for_services_that_have_keys() -> None:
    """The annotations of a pod carry none: with the Secret of docs/replicas.md each scrape got a 401."""
    path = "/metrics"
    with pytest.raises(Unauthorized):
        Keyring([ClientKey(text="key")], None).check(path, Headers())
    [values] = documents("kubernetes/prometheus.yaml")
    [mount], [job] = values["server"]["extraSecretMounts"], yaml.safe_load(values["extraScrapeConfigs"])
    assert job["metrics_path"] == path
    assert job["authorization"]["credentials_file"] == f"{mount['mountPath']}/api-key"
    [deployment] = [each for each in documents("kubernetes/moe-serve.yaml") if each["kind"] == "Deployment"]
    name = deployment["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]
    [container] = pods()["deployment"]["containers"]
    [port] = container["ports"]
    assert job["relabel_configs"][0]["regex"] == f"{name};{port['name']}"
    [adapter] = documents("kubernetes/prometheus-adapter.yaml")
    labels = {each.get("target_label") for each in job["relabel_configs"]}
    assert adapter["rules"]["custom"][0]["resources"]["overrides"].keys() <= labels


def test_grafana_finds_its_board_and_prometheus() -> None:
    monitoring = yaml.safe_load((DEPLOY / "monitoring/compose.yaml").read_text())["services"]
    mounts = dict(each.split(":")[:2] for service in monitoring.values() for each in service["volumes"])
    for source in mounts:
        assert not source.startswith(".") or (ROOT / source).exists(), source
    [provider] = yaml.safe_load((DEPLOY / "monitoring/grafana/dashboards/moe-serve.yaml").read_text())["providers"]
    assert Path(mounts["./deploy/grafana.json"]).parent == Path(provider["options"]["path"])
    [source] = yaml.safe_load((DEPLOY / "monitoring/grafana/datasources/prometheus.yaml").read_text())["datasources"]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert monitoring[host]["ports"] == [f"127.0.0.1:{port}:{port}"]
