"""A request's bytes to a JSON object, with everything wrong about them refused."""

from __future__ import annotations

import json
import math
from email.message import Message
from typing import Any, NoReturn

from fastapi import Request

from pagoda.server.errors import HttpError


async def read_body(request: Request, limit: int) -> bytes:
    """The body, at most `limit` bytes of it.

    Raises:
        HttpError: 413 if it is longer (before reading it where its length is declared), 415 if it is not JSON in UTF-8.
    """
    _check_content_type(request.headers.get("content-type", ""))
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        _refuse_size(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            _refuse_size(limit)
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Its strings are valid Unicode and its numbers are JSON's and finite: no NaN, no 1e999.

    Raises:
        HttpError: 400 with what is wrong and where.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _bad_json(f"it is not UTF-8 (byte {error.start})") from None
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_refuse_constant)
        if "\\u" in text:
            # An escaped lone surrogate is legal JSON that no tokenizer can take.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _bad_json("a string holds half of a surrogate pair") from None
    except RecursionError:
        raise _bad_json("it is nested too deeply") from None
    except ValueError as error:
        raise _bad_json(str(error)) from None
    if not isinstance(value, dict):
        raise HttpError(400, "invalid_json", f"The body must be a JSON object, not {_json_type(value)}.")
    return value


def _check_content_type(header: str) -> None:
    message = Message()
    message["content-type"] = header
    kind, charset = message.get_content_type(), message.get_content_charset("utf-8")
    if not header or not (kind == "application/json" or kind.endswith("+json")) or charset not in ("utf-8", "utf8"):
        shown = header or "none"
        raise HttpError(415, "unsupported_media_type", f"Content-Type must be application/json in UTF-8, got {shown}.")


def _refuse_size(limit: int) -> NoReturn:
    raise HttpError(413, "request_too_large", f"The request body is longer than {limit} bytes.")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _bad_json(why: str) -> HttpError:
    return HttpError(400, "invalid_json", f"The body could not be parsed as JSON: {why}.")


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
