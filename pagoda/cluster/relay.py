"""Relay: one request to one replica, and its answer back.

Nothing is sent to the client before the first byte of a stream, or the last of an answer in one piece, has arrived: up
to then another replica can be asked instead. A stream that breaks later ends with an error event of its API.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress

import httpx
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from pagoda.errors import RequestAborted
from pagoda.server.disconnect import until_disconnect
from pagoda.server.ids import OPENAI_HEADER, id_headers, new_id

logger = logging.getLogger(__name__)

MAX_WHOLE_BYTES = 32 << 20  # of an answer that is kept until its end
REPLICA_HEADER = "x-pagoda-replica"

# What concerns one connection and not the message, and what is said anew on the next.
_HOP_BY_HOP = frozenset(
    [
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
    ]
)
_REQUEST_DROPS = _HOP_BY_HOP | {"content-length"}
_ANSWER_DROPS = _HOP_BY_HOP | {"content-length", "date", "server"}


def request_headers(given: Mapping[str, str], instead: Mapping[str, str]) -> dict[str, str]:
    """The headers to send on: those given but hop-by-hop ones, with some replaced; an empty one is left out."""
    kept = {name: value for name, value in given.items() if name.lower() not in _REQUEST_DROPS}
    # What the client did not say it can read must not come back to it.
    return {name: value for name, value in {"accept-encoding": "identity", **kept, **instead}.items() if value}


class Relayed(Response):
    """A replica's answer that has begun. Closes it, whatever happens.

    Args:
        answer: with its status and headers read.
        pieces: of its body; the first is there.
        replica: its number, which the client is told.
        is_anthropic: whose error events to write.
        ended: told at the end whether it broke off.
    """

    def __init__(
        self,
        answer: httpx.Response,
        pieces: AsyncIterator[bytes],
        first: bytes,
        *,
        replica: int,
        is_anthropic: bool,
        ended: Callable[[bool], None],
    ) -> None:
        super().__init__(status_code=answer.status_code)
        self.raw_headers = [
            (name.lower(), value) for name, value in answer.headers.raw if name.decode().lower() not in _ANSWER_DROPS
        ]
        self.raw_headers.append((REPLICA_HEADER.encode(), str(replica).encode()))
        self._answer = answer
        self._pieces = pieces
        self._first = first
        self._is_anthropic = is_anthropic
        self._ended = ended
        self._is_broken = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer until its end or until the client leaves."""
        try:
            with suppress(RequestAborted):
                await until_disconnect(receive, self._send_all(send))
        finally:
            self._ended(self._is_broken)
            await self._answer.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = b""
        try:
            piece = self._first
            while piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await anext(self._pieces, b"")
        except httpx.HTTPError as error:
            logger.warning("an answer broke off: %s", error or type(error).__name__)
            self._is_broken = True
            last = broken_event(self._answer.headers.get(OPENAI_HEADER, ""), is_anthropic=self._is_anthropic)
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def begin(answer: httpx.Response) -> tuple[AsyncIterator[bytes], bytes]:
    """The body of an answer from which another replica could no longer take over: its pieces, and the first of them.

    Raises:
        httpx.HTTPError: it broke off before that.
    """
    pieces = answer.aiter_raw()
    first = await anext(pieces, b"")
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        return pieces, first
    whole = bytearray(first)
    while len(whole) < MAX_WHOLE_BYTES and (piece := await anext(pieces, b"")):
        whole += piece
    return pieces, bytes(whole)


def error_response(status: int, code: str, message: str, *, is_anthropic: bool) -> JSONResponse:
    """An error in the form of the API that was called; 503 asks to come back."""
    name = new_id("req")
    headers = id_headers(name, is_anthropic=is_anthropic) | ({"Retry-After": "1"} if status == 503 else {})
    return JSONResponse(_error_body(status, code, message, name, is_anthropic=is_anthropic), status, headers)


def _error_body(status: int, code: str, message: str, name: str, *, is_anthropic: bool) -> dict[str, object]:
    if is_anthropic:
        kinds = {400: "invalid_request_error", 401: "authentication_error", 413: "request_too_large"}
        error = {"type": kinds.get(status, "api_error"), "message": message}
        return {"type": "error", "error": error, "request_id": name}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def broken_event(name: str, *, is_anthropic: bool) -> bytes:
    """What ends the stream of the answer `name` when its replica went away."""
    message = "The replica that was answering went away; the answer is incomplete. Send the request again."
    data = json.dumps(_error_body(502, "replica_lost", message, name, is_anthropic=is_anthropic))
    kind = "event: error\n" if is_anthropic else ""
    return f"\n\n{kind}data: {data}\n\n".encode()
