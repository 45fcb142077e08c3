"""Exceptions in Anthropic's shape: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from pagoda.server.errors import describe, headers_of
from pagoda.server.ids import ANTHROPIC_HEADER, answer_id, id_headers

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


def describe_error(error: Exception, name: str) -> tuple[int, dict[str, Any]]:
    """The HTTP status and JSON body of the answer `name` to an exception; others' 503 is Anthropic's 529."""
    status, body = describe(error)
    status = OVERLOADED if status == 503 else status
    kind = _TYPES.get(status, "api_error")
    return status, {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}, "request_id": name}


class AnthropicRoute(APIRoute):
    """A route whose every failure leaves in Anthropic's shape, a wrong key's included, and whose answers have ids."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with its exceptions caught."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                response = await handle(request)
            except ClientDisconnect:
                raise
            except Exception as error:
                name = answer_id(request)
                status, body = describe_error(error, name)
                if status == 500:
                    logger.exception("failed to answer %s, %s", request.url.path, name)
                return JSONResponse(body, status, {**headers_of(error), **id_headers(name, is_anthropic=True)})
            if ANTHROPIC_HEADER not in response.headers:  # token counts are no jobs
                response.headers.update(id_headers(answer_id(request), is_anthropic=True))
            return response

        return handler
