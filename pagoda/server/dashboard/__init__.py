"""The dashboard: one page of files that this package holds, fed by one JSON route.

    browser ── GET /dashboard, /dashboard/{style.css,main.js,...} ──> page/        no build step, nothing from elsewhere
            ── GET /v1/kv/overview, every two seconds ────────────> overview.py  the pool, the tree, tiers, figures
    engine's thread ── on_finished ───────────────────────────────> recent.py    what only a memory of requests can say

The page itself says nothing of the server and needs no key. The route shows everything to who has the admin key, and to
others their own prefixes and no texts.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

from pagoda.server.dashboard.overview import overview_router
from pagoda.server.dashboard.recent import Recent

__all__ = ["Recent", "overview_router", "page_router"]

_FOLDER = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_router() -> APIRouter:
    """GET /dashboard and the files it consists of."""
    router = APIRouter(prefix="/dashboard")

    def add(path: str, file: Path) -> None:
        content = file.read_bytes()

        @router.get(path)
        async def serve() -> Response:
            return Response(content, media_type=_TYPES[file.suffix], headers=_HEADERS)

    for file in sorted(_FOLDER.iterdir()):
        add("" if file.name == "index.html" else f"/{file.name}", file)
    return router
