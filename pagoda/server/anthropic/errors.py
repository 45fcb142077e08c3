"""Exceptions in Anthropic's shape: `{"type": "error", "error": {"type", "message"}}`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from pagoda.server.errors import describe, headers_of

logger = logging.getLogger(__name__)

OVERLOADED = 529
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}


def describe_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """The HTTP status and JSON body of an exception; what others call 503 is Anthropic's 529."""
    status, body = describe(error)
    status = OVERLOADED if status == 503 else status
    kind = _TYPES.get(status, "api_error")
    return status, {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


class AnthropicRoute(APIRoute):
    """A route whose every failure leaves in Anthropic's shape, a wrong key's included."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with its exceptions caught."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await handle(request)
            except ClientDisconnect:
                raise
            except Exception as error:
                status, body = describe_error(error)
                if status == 500:
                    logger.exception("failed to answer %s", request.url.path)
                return JSONResponse(body, status, headers_of(error))

        return handler
