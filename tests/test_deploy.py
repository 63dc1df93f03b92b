"""The manifests in deploy/ start the service with settings that exist and make sense."""

from pathlib import Path

import yaml

from engine.config import EngineConfig
from server.cli import all_settings
from server.settings import gather, make_parser

DEPLOY = Path(__file__).parents[1] / "deploy"
LWS = {"$(LWS_GROUP_SIZE)": "2", "$(LWS_WORKER_INDEX)": "1", "$(LWS_LEADER_ADDRESS)": "moe-serve-0.moe-serve"}


def test_all_pods_of_the_set_start_the_same_layout():
    documents = list(yaml.safe_load_all((DEPLOY / "leader-worker-set.yaml").read_text()))
    [template] = [each["spec"]["leaderWorkerTemplate"] for each in documents if each["kind"] == "LeaderWorkerSet"]
    settings = all_settings()
    values = []
    for name in ("leaderTemplate", "workerTemplate"):
        [container] = template[name]["spec"]["containers"]
        words = [LWS.get(word.split("=")[1], word.split("=")[1]) for word in container["args"]]
        argv = [f"{arg.split('=')[0]}={word}" for arg, word in zip(container["args"], words, strict=True)]
        values.append(gather(settings, vars(make_parser(settings, "moe-serve", "").parse_args(argv)), {}))
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert values[0] == values[1]
    config = EngineConfig(**{name: value for name, value in values[0].items() if name != "host"})
    assert config.nnodes == template["size"]
    assert len(config.local_ranks) == gpus
