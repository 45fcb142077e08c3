"""Gatherer: asks every replica that is up, and answers for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagoda.cluster.fleet import Fleet
from pagoda.cluster.merge import Merge
from pagoda.cluster.placement import Placement
from pagoda.cluster.relay import REPLICA_HEADER
from pagoda.errors import NoReplica
from pagoda.server.errors import HttpError


class Gatherer:
    """Answers for all of a fleet.

    Args:
        failed: told of each replica that did not answer.
    """

    def __init__(self, fleet: Fleet, placement: Placement, failed: Callable[[int, httpx.HTTPError], None]) -> None:
        self._fleet = fleet
        self._placement = placement
        self._failed = failed

    async def answer(self, request: Request, body: bytes, merge: Merge) -> Response:
        """What all that are up answer, as one, and in `X-Pagoda-Replica` the numbers of those who are in it.

        If none does what it is asked, it is what the first says to that. Of what all are to do, `waiting_replicas` has
        those who did not; who has nothing to do it with (404) is none of them.

        Raises:
            NoReplica: none is up, or none answers.
            HttpError: 502, an answer is none of Pagoda's.
        """
        up = [number for number in range(len(self._fleet)) if self._placement.is_up(number)]
        found = await asyncio.gather(*(self._ask(number, request, body) for number in up))
        answers = {number: answer for number, answer in zip(up, found, strict=True) if answer is not None}
        if not answers:
            raise NoReplica
        good = {number: answer for number, answer in answers.items() if answer.is_success}
        if not good:
            number, first = next(iter(answers.items()))
            headers = {"content-type": first.headers.get("content-type", "text/plain"), REPLICA_HEADER: str(number)}
            return Response(first.content, first.status_code, headers)
        headers = {REPLICA_HEADER: ",".join(map(str, good)), "cache-control": "no-store"}
        try:
            told = {number: answer.json() for number, answer in good.items()}
            merged = merge(told)
            if request.method == "POST":
                done = {number for number, answer in answers.items() if answer.is_success or answer.status_code == 404}
                merged["waiting_replicas"] = {str(n): 1 for n in range(len(self._fleet)) if n not in done}
            return JSONResponse(merged, headers=headers)
        except (ValueError, KeyError, TypeError, AttributeError):
            message = f"Replicas answer {request.url.path} in forms that do not go together; {REPLICA_HEADER} asks one."
            raise HttpError(502, "no_merge", message) from None

    async def _ask(self, number: int, request: Request, body: bytes) -> httpx.Response | None:
        try:
            return await self._fleet.whole(number, request, body)
        except httpx.HTTPError as error:
            self._failed(number, error)
            return None
