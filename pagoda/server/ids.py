"""Ids of answers: what a client that asks about an answer, and who reads the log, both call it.

A job's id is its answer's. Where none was made, as for most refusals, the answer has an id of its own. OpenAI's clients
read `x-request-id`, Anthropic's `request-id`, and the `request_id` in the bodies of errors.
"""

from __future__ import annotations

import uuid

from starlette.requests import Request

OPENAI_HEADER = "x-request-id"
ANTHROPIC_HEADER = "request-id"


def new_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}-{uuid.uuid4().hex}"


def name_answer(request: Request, job_id: str) -> None:
    """What answers this request is a job's, even if it is an error. Mutates the request's state."""
    request.state.answer_id = job_id


def answer_id(request: Request) -> str:
    """The id of the answer to a request: its job's, or a new one."""
    known: str | None = getattr(request.state, "answer_id", None)
    return known or new_id("req")


def id_headers(name: str, *, is_anthropic: bool = False) -> dict[str, str]:
    """The headers that tell an answer's id."""
    return {ANTHROPIC_HEADER: name, OPENAI_HEADER: name} if is_anthropic else {OPENAI_HEADER: name}
