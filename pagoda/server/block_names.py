"""What a router asks before it chooses: which blocks a request is made of. The request itself is not run.

    the client's request + X-Pagoda-Block-Names: 1  ──>  {"block_size", "prompts": [{"num_tokens", "block_names"}]}

Whoever serves the request answers this too, so the names are exact whatever the API, template, tenant and adapter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import Request
from fastapi.responses import JSONResponse

from pagoda.server.backend import Backend, Scope
from pagoda.server.errors import HttpError

HEADER = "x-pagoda-block-names"


def wants_block_names(request: Request) -> bool:
    """Whether a request only asks which blocks it is made of."""
    return request.headers.get(HEADER, "0") not in ("", "0", "false")


async def block_names(
    engine: Backend, prompts: Sequence[Sequence[int]], scope: Scope, adapter: str | None
) -> JSONResponse:
    """The names of each prompt's whole blocks, as block events have them.

    Raises:
        HttpError: 404, this server tells no events.
    """

    def name_all() -> list[dict[str, object]] | None:
        answers: list[dict[str, object]] = []
        for prompt in prompts:
            names = engine.block_names(prompt, scope, adapter)
            if names is None:
                return None
            answers.append({"num_tokens": len(prompt), "block_names": list(names)})
        return answers

    answers = await asyncio.to_thread(name_all)
    if answers is None:
        raise HttpError(404, "no_block_events", "This server tells no block events: start it with --kv-events.")
    return JSONResponse({"block_size": engine.stats().block_size, "prompts": answers})
