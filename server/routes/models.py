"""GET /v1/models and /v1/models/{id}."""

from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.context import ServerContext
from server.openapi import describe
from server.respond import json_response
from server.schema.operations import ModelEntry, ModelList

router = APIRouter()


@router.get("/v1/models/", include_in_schema=False)
@router.get("/v1/models", **describe(ModelList))
async def list_models(request: Request) -> Response:
    """All names under which the model is served."""
    context: ServerContext = request.app.state.context
    return json_response({"object": "list", "data": [_entry(context, name) for name in context.served_names]})


@router.get("/v1/models/{name:path}", **describe(ModelEntry, errors=(400, 401, 404, 500)))
async def show_model(request: Request, name: str) -> Response:
    """One of them; a name may hold slashes."""
    context: ServerContext = request.app.state.context
    return json_response(_entry(context, context.model_name(name)))


def _entry(context: ServerContext, name: str) -> ModelEntry:
    info, created_s = context.engine.info, int(context.started_s)
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": created_s,
        "created_at": datetime.fromtimestamp(created_s, UTC).isoformat(),
        "lifecycle": "active",
        "owned_by": "moe-serve",
        "max_model_len": None if info is None else info.max_model_len,
    }
