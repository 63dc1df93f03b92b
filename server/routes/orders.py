"""What operators and routers ask: /abort_request, /reset_prefix_cache, /start_profile, /stop_profile, /load."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import OrderError
from engine.types import CallOff, OrderKind
from server.asker import owner_of
from server.body import read_body
from server.context import ServerContext
from server.errors import BadRequest, Unavailable
from server.openapi import describe
from server.respond import json_response
from server.schema.orders import AbortRequest, Load, OrderAnswer

router = APIRouter()
_ORDERED = (400, 401, 403, 500, 503)


@router.post(
    "/abort_request",
    **describe(OrderAnswer, errors=(400, 401, 408, 413, 429, 500), body=AbortRequest),
)
async def abort_request(request: Request) -> Response:
    """End requests by X-Request-Id or the id of the answer: those of the same key, or with the admin key anybody's."""
    context: ServerContext = request.app.state.context
    wire, _ = await read_body(request, AbortRequest, context)
    owner = None if context.keyring.is_admin(request.headers) else owner_of(request)
    context.engine.call_off(CallOff(names=wire.names, owner=owner))
    return json_response({"status": "accepted"})


@router.post("/reset_prefix_cache", **describe(OrderAnswer, errors=_ORDERED))
async def reset_prefix_cache(request: Request) -> Response:
    """Forget the prompts so far. Requests that run keep their pages."""
    return await _order(request, "reset_prefix_cache")


@router.post("/start_profile", **describe(OrderAnswer, errors=_ORDERED))
async def start_profile(request: Request) -> Response:
    """Record the engine's steps with torch's profiler (--profile-dir)."""
    return await _order(request, "start_profile")


@router.post("/stop_profile", **describe(OrderAnswer, errors=_ORDERED))
async def stop_profile(request: Request) -> Response:
    """Write what was recorded."""
    return await _order(request, "stop_profile")


@router.get("/load", **describe(Load))
async def load(request: Request) -> Response:
    """How busy the service is, for routers in front of several."""
    context: ServerContext = request.app.state.context
    info, stats = context.engine.info, context.engine.stats
    num_used, num_pages = (0, 0) if stats is None else (stats.num_pages_used, stats.num_pages_total)
    content: Load = {
        "running": 0 if stats is None else stats.num_running,
        "waiting": 0 if stats is None else stats.num_waiting,
        "max_requests": 0 if info is None else info.max_requests,
        "kv_usage": num_used / num_pages if num_pages else 0.0,
        "kv_pages_used": num_used,
        "kv_pages": num_pages,
        "server_load": context.gate.num_inflight_everywhere,
    }
    return json_response(content)


async def _order(request: Request, kind: OrderKind) -> Response:
    context: ServerContext = request.app.state.context
    if not context.engine.ready:
        raise Unavailable(context.why_not_alive() or "the model is still loading")
    try:
        await context.engine.order(kind)
    except OrderError as error:
        raise BadRequest(str(error), code="order_refused") from error
    return json_response({"status": "done"})
