"""`create_app`: the HTTP application around an engine and a tokenizer. Starts and loads nothing."""

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from engine.version import service_version
from server.config import ServerConfig
from server.context import Gate, ServerContext
from server.convert import Converter, Tokenizer
from server.cors import Cors
from server.errors import ApiError, BadRequest, TooManyRequests
from server.key_limits import KeyLimits
from server.keys import Keyring
from server.lanes import Lanes
from server.metrics import Metrics
from server.middleware import MakeTrace, RequestMiddleware, error_response
from server.openapi import complete_document
from server.request_group import Engine
from server.request_log import RequestLog
from server.responses.store import open_store
from server.routes import chat, completions, messages, models, operations, orders, responses
from server.routes.page import page_routes
from server.sampling_defaults import SamplingDefaults
from server.stall import StallWatch
from server.tally import OwnTally, Sharing

DEFAULT_MODEL_NAME = "default"
_ROUTES = (chat, completions, responses, messages, models, operations, orders)


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    config: ServerConfig,
    defaults: SamplingDefaults | None = None,
    sharing: Sharing | None = None,
) -> FastAPI:
    """The application; `app.state.context` holds its parts.

    `defaults` are the checkpoint's sampling parameters, `sharing` is what several HTTP processes share.
    """
    tally = OwnTally() if sharing is None else sharing.tally
    app = FastAPI(title="moe-serve", version=service_version(), docs_url=None, redoc_url=None, redirect_slashes=False)
    names = config.served_model_name or (DEFAULT_MODEL_NAME,)
    stall = StallWatch(engine, config.stall_timeout, logs=sharing is None)
    vllm_model = names[0] if config.metrics_names == "vllm" else None
    page = page_routes() if config.page else []
    keyring = Keyring(config.api_keys, config.admin_key, open_paths={route.path for route in page})
    gate = Gate(tally, None if sharing is None else sharing.num_held_by_client)
    engine.on_call_off(gate.call_off)
    metrics = Metrics(lambda: engine.stats, lambda: engine.info, tally, stall, vllm_model, lambda: engine.expert_load)
    app.state.context = ServerContext(
        engine=engine,
        config=config,
        converter=Converter(tokenizer, config, defaults or SamplingDefaults()),
        metrics=metrics,
        gate=gate,
        lanes=Lanes(tally, None if sharing is None else sharing.turn),
        stall=stall,
        request_log=RequestLog(config, tokenizer),
        served_names=names,
        response_store=open_store(config),
        started_s=tally.started_s,
        key_limits=KeyLimits(config, None if sharing is None else sharing.key_memory),
        keyring=keyring,
    )
    for module in _ROUTES:  # as they are: `include_router` would make each anew when the first request comes
        app.router.routes.extend(module.router.routes)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.router.routes.extend(page)
    app.add_middleware(RequestMiddleware, metrics=metrics, keyring=keyring, make_trace=_trace_maker(config))
    if config.cors_origins:
        app.add_middleware(Cors, origins=config.cors_origins)  # what is added last is outermost
    complete_document(app, has_key=config.api_key is not None)
    return app


def _trace_maker(config: ServerConfig) -> MakeTrace | None:
    if config.otlp_endpoint is None:
        return None
    from server.tracing import trace_maker  # needs the extra otel; `server.service` has checked that it is there

    return trace_maker(config.otlp_endpoint)


async def _on_api_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    if isinstance(error, TooManyRequests):
        request.app.state.context.metrics.refused.inc(error.what)
    return error_response(error, request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The framework's own errors: no such path, or no such method."""
    if not isinstance(error, HTTPException):
        raise error
    known = {
        404: (f"there is no {request.url.path[:200]} here{_advice(request)}", "not_found"),
        405: (f"{request.method} is not allowed for {request.url.path[:200]}", "method_not_allowed"),
    }
    message, code = known.get(error.status_code, (str(error.detail), None))
    refusal = BadRequest(message, code=code)
    refusal.status = error.status_code
    response = error_response(refusal, request.scope)
    response.headers.update(error.headers or {})
    return response


def _advice(request: Request) -> str:
    """Suggests the route for a path that lacks /v1, repeats it, or ends in a slash."""
    path = request.url.path.rstrip("/")
    routes = [route.path for module in _ROUTES for route in module.router.routes if isinstance(route, APIRoute)]
    known = [route for route in routes if route.endswith(path) or path.endswith(route)]
    if not path or not known:
        return ""
    return f": did you mean {min(known, key=lambda route: abs(len(route) - len(path)))}?"
