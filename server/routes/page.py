"""The page at `/` and its files: read once, served with headers that let nothing from elsewhere run or be asked."""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).resolve().parents[1] / "page"
INDEX = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts, styles, images and calls come from this origin alone, and no script may turn text into markup.
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cache-Control": "no-cache",  # browsers ask each time, and an unchanged file gets a 304
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def page_routes() -> list[Route]:
    """A route for every file of the page, and `/`; no other path leads to a file."""
    files = [path for path in sorted(FOLDER.iterdir()) if path.suffix in _MEDIA_TYPES]
    return [_route("/" if path.name == INDEX else f"/page/{path.name}", path) for path in files]


def _route(url_path: str, file: Path) -> Route:
    content = file.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": etag}
    media_type = _MEDIA_TYPES[file.suffix]

    async def answer(request: Request) -> Response:
        known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if etag in known:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return Route(url_path, answer, methods=["GET"], include_in_schema=False)
