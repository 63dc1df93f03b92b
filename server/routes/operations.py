"""For operators: /health/live, /health/ready (alias /health), /metrics, /expert_load, /version."""

from typing import Any

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from engine.expert_file import FORMAT, record_of
from engine.types import EngineStats
from engine.version import service_version
from loaders.phases import StartProgress
from server.context import ServerContext
from server.openapi import FOR_OPERATORS, describe, describe_health, describe_text
from server.respond import json_response
from server.schema.operations import ExpertTokens, Liveness, Readiness, Version

_GIB = 2**30

router = APIRouter()


@router.get("/health/live", **describe_health(Liveness))
async def live(request: Request) -> Response:
    """200 while the engine's process exists and its step loop beats; a 503 means: restart it."""
    context: ServerContext = request.app.state.context
    reason = context.why_not_alive()
    return json_response({"status": "dead" if reason else "alive", "reason": reason}, 503 if reason else 200)


@router.get("/health", **describe_health(Readiness))
@router.get("/health/ready", **describe_health(Readiness))
async def ready(request: Request) -> Response:
    """200 while new work is taken: loaded, checked, alive and not draining. `load_error` is for the operator's eyes."""
    context: ServerContext = request.app.state.context
    reason = context.why_not_ready()
    info, stats = context.engine.info, context.engine.stats
    details: dict[str, Any] = {
        "status": "not ready" if reason else "ready",
        "reason": reason,
        "load_error": context.engine.failure if info is None else None,
        "models": context.served_names,
        "engine": None if info is None else msgspec.to_builtins(info),
        "stats": None if stats is None else _numbers(stats),
        **_start(context.engine.start_progress),
    }
    return json_response(details, 503 if reason else 200)


def _numbers(stats: EngineStats) -> dict[str, int]:
    """All but the histogram of step sizes, which `/metrics` shows."""
    return {name: value for name, value in msgspec.to_builtins(stats).items() if name != "step_sizes"}


def _start(progress: StartProgress | None) -> dict[str, Any]:
    """How far a start is, as `Readiness` says."""
    if progress is None:
        return {"phase": None, "done": None, "total": None, "elapsed_s": None, "waits_for": None, "phases": []}
    phases = [
        {
            "phase": each.phase,
            "seconds": round(each.seconds, 3),
            "done": each.done,
            "total": each.total,
            "read_gib": round(each.num_bytes / _GIB, 3),
            "read_gib_per_s": round(each.bytes_per_s / _GIB, 3),
        }
        for each in progress.phases
    ]
    elapsed_s = round(progress.elapsed_s, 3)
    return {
        "phase": progress.phase, "done": progress.done, "total": progress.total, "elapsed_s": elapsed_s,
        "waits_for": progress.waits_for, "phases": phases,
    }  # fmt: skip


@router.get("/metrics", **describe_text("text/plain"))
async def metrics(request: Request) -> Response:
    """Prometheus exposition."""
    context: ServerContext = request.app.state.context
    return Response(context.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/expert_load", **describe(ExpertTokens, errors=FOR_OPERATORS))
async def expert_load(request: Request) -> Response:
    """Tokens of every expert since the start, no layers if they are not counted; what --eplb-load reads."""
    context: ServerContext = request.app.state.context
    load = context.engine.expert_load
    if load is None:
        return json_response({"format": FORMAT, "models": context.served_names, "layers": []})
    return json_response(msgspec.to_builtins(record_of(load, list(context.served_names))))


@router.get("/version", **describe(Version))
async def version() -> Response:
    """Version of this service."""
    return json_response({"version": service_version()})
