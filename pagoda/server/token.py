"""TokenGuard: a server that only holders of the cluster token can talk to, such as a replica behind a router."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from pagoda.server.errors import HttpError, error_response

HEADER = "x-pagoda-token"


class TokenGuard:
    """ASGI middleware that refuses every request without the token, whatever its route."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            given = Headers(scope=scope).get(HEADER, "")
            if not hmac.compare_digest(given.encode("latin-1"), self._token):
                refusal = HttpError(401, "cluster_token_required", "This replica answers its router only.")
                return await error_response(refusal, Request(scope))(scope, receive, send)
        await self._app(scope, receive, send)
