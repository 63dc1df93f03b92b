"""What /health/ready says while the model loads, and the metric of kernels compiled too late."""

import dataclasses
import re

import msgspec

from engine.types import EngineStats
from loaders.phases import PhaseTime, StartProgress

PROGRESS = StartProgress(
    phase="self-check",
    done=6,
    total=24,
    elapsed_s=8.25,
    phases=[
        PhaseTime(phase="starting", seconds=2.0),
        PhaseTime(phase="loading weights", seconds=1.5, done=7, total=24, num_bytes=3 * 2**30, hidden_s=0.5),
        PhaseTime(phase="self-check", seconds=0.75, done=6, total=24),
    ],
)


def test_a_loading_service_says_its_phase_its_steps_and_every_phases_seconds(service):
    service.engine.ready = False
    service.engine.start_progress = PROGRESS
    with service.http() as http:
        answer = http.get("/health/ready")
    assert answer.status_code == 503
    body = answer.json()
    assert {key: body[key] for key in ("phase", "done", "total", "elapsed_s")} == {
        "phase": "self-check", "done": 6, "total": 24, "elapsed_s": 8.25,
    }  # fmt: skip
    assert body["reason"] == "the model is still loading"
    assert body["phases"][1] == {
        "phase": "loading weights", "seconds": 1.5, "done": 7, "total": 24, "read_gib": 3.0, "read_gib_per_s": 1.5,
    }  # fmt: skip
    assert [each["phase"] for each in body["phases"]] == ["starting", "loading weights", "self-check"]


def test_a_host_that_waits_for_another_says_for_which(service):
    service.engine.ready = False
    service.engine.start_progress = dataclasses.replace(PROGRESS, phase="meeting ranks", waits_for="host 1 (rank 1)")
    with service.http() as http:
        body = http.get("/health/ready").json()
    assert (body["phase"], body["waits_for"]) == ("meeting ranks", "host 1 (rank 1)")


def test_before_the_first_message_and_once_ready_there_is_no_phase(service):
    with service.http() as http:
        for ready, status in ((False, 503), (True, 200)):
            service.engine.ready = ready
            answer = http.get("/health/ready")
            assert answer.status_code == status
            assert [answer.json()[key] for key in ("phase", "done", "total", "elapsed_s", "waits_for")] == [None] * 5
            assert answer.json()["phases"] == []


def test_progress_survives_the_socket():
    sent = msgspec.msgpack.encode(PROGRESS)
    assert msgspec.msgpack.decode(sent, type=StartProgress) == PROGRESS


def test_kernels_compiled_after_ready_are_a_metric(service, monkeypatch):
    stats = msgspec.structs.replace(service.engine.stats, num_kernels_compiled_after_ready=3)
    assert isinstance(stats, EngineStats)
    with service.http() as http:
        assert re.search(r"^moe_serve_kernels_compiled_after_ready_total 0\.0$", http.get("/metrics").text, re.M)
        monkeypatch.setattr(type(service.engine), "stats", property(lambda _self: stats))
        assert re.search(r"^moe_serve_kernels_compiled_after_ready_total 3\.0$", http.get("/metrics").text, re.M)
