"""Exceptions to OpenAI-shaped JSON: `{"error": {"message", "type", "param", "code"}}`, a status and an id."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from pagoda.errors import (
    ContextTooLong,
    InvalidRequest,
    MemoryPressure,
    ModelError,
    ModelNotFound,
    Overloaded,
    RequestAborted,
    RequestError,
)
from pagoda.server.faults import wanted
from pagoda.server.ids import answer_id, id_headers

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # nginx's status for an answer nobody waits for; it only reaches logs


class HttpError(RequestError):
    """A refusal with a status and code of its own."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.code = code


@contextmanager
def in_words_of(*, max_tokens: str = "max_tokens", prompt: str = "prompt") -> Iterator[None]:
    """Let refusals name what the client sent: fields that the engine calls `max_tokens` and `prompt`.

    Raises:
        RequestError: as it was raised within, in these words.
    """
    try:
        yield
    except (InvalidRequest, ContextTooLong) as error:
        param = {"max_tokens": max_tokens, "prompt": prompt}.get(error.param or "", error.param)
        raise type(error)(str(error).replace("max_tokens", max_tokens), param=param) from None


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """The HTTP status and JSON body of an exception. What is not the client's fault says nothing of our insides."""
    match error:
        case HttpError():
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            return error.status, _body(str(error), error.param, error.code, type_=kind)
        case ContextTooLong():
            return 400, _body(str(error), error.param, "context_length_exceeded")
        case ModelNotFound():
            return 404, _body(str(error), error.param or "model", "model_not_found")
        case RequestAborted():
            return 503, _body(str(error), None, "request_aborted", type_="server_error")
        case RequestError():
            return 400, _body(str(error), error.param, "invalid_value")
        case ModelError():
            return 500, _body(f"The model failed: {error}.", None, "model_error", type_="server_error")
        case RecursionError():  # a body that was read may still be too deep for what renders or writes it
            return 400, _body("The body is nested too deeply.", None, "invalid_json")
        case Overloaded():
            return 429, _body(str(error), None, error.reason, type_="rate_limit_error")
        case MemoryPressure():
            return 503, _body(
                f"Out of KV memory: {error}; try again shortly.", None, "overloaded", type_="server_error"
            )
        case _:
            return 500, _body("The server failed to answer; its log says why.", None, None, type_="server_error")


def error_response(error: Exception, request: Request) -> JSONResponse:
    """The answer to a request that failed. What is not its fault is logged by the answer's id."""
    status, body = describe(error)
    name = answer_id(request)
    if status == 500:
        logger.error("failed to answer %s, %s: %r", request.url.path, name, error)
    return JSONResponse(body, status, {**headers_of(error), **id_headers(name)})


def headers_of(error: Exception) -> dict[str, str]:
    """What an answer to a refused request says in its headers."""
    if isinstance(error, Overloaded):
        return {"Retry-After": str(math.ceil(error.retry_after_s))}
    return {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(describe(error)[0], {})


def install_handlers(app: FastAPI) -> None:
    """Make every failure of `app` leave in the one shape, unknown routes included. Mutates `app`."""

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(error, request)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{error.detail}: {request.method} {request.url.path}"
        headers = {**(error.headers or {}), **id_headers(answer_id(request))}
        return JSONResponse(_body(message, None, None), error.status_code, headers)

    async def on_bad_query(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        fault = error.errors()[0]
        name = str(fault["loc"][-1])
        return error_response(HttpError(400, "invalid_value", f"{name} {wanted(fault)}", param=name), request)

    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    app.add_exception_handler(RequestError, on_error)
    app.add_exception_handler(MemoryPressure, on_error)
    app.add_exception_handler(ModelError, on_error)
    app.add_exception_handler(RecursionError, on_error)
    app.add_exception_handler(Exception, on_error)
    app.add_exception_handler(RequestValidationError, on_bad_query)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ClientDisconnect, on_disconnect)


def _body(message: str, param: str | None, code: str | None, type_: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}
