"""Reader of Pagoda's own access log, which `pagoda serve --access-log` writes (server/access_log.py).

    {"pagoda_access_log": 1, "model": "smollm2", "block_tokens": 16}            once for each run of the server
    {"time": 1764439200.125, "prompt": 700, "output": 20, "hit": 512, "blocks": "c2l4dHktZm91cg=="}

`time` is the arrival in Unix seconds; `blocks` the base64 of one little-endian 64-bit id for each block of the prompt,
the last one possibly partly filled. Ids are keyed hashes, each over all before it and over whose the request is: they
tell which prompts share how much, and nothing else. Lines come in the order in which requests end, so the reader puts
those that are near one another back into the order of arrival.
"""

from __future__ import annotations

import base64
import heapq
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pagoda.plan.traces import Advance, TraceRequest, no_advance, read_lines

VERSION = 1
_MAX_WAITING = 1024  # requests that are held back until none can arrive before them


def read_access_log(path: str | Path, advance: Advance = no_advance) -> Iterator[TraceRequest]:
    """Requests of an access log, in Unix time. Memory is bounded: who ended much later than others counts as late."""
    block_tokens = 0

    def request(row: dict[str, Any]) -> TraceRequest | None:
        nonlocal block_tokens
        if "pagoda_access_log" in row:
            if row["pagoda_access_log"] != VERSION:
                raise ValueError(f"version {row['pagoda_access_log']} of the access log is not known here")
            block_tokens = int(row["block_tokens"])
            return None
        if not block_tokens:
            raise ValueError("a request comes before the first line that says how long blocks are")
        blocks = np.frombuffer(base64.b64decode(row["blocks"], validate=True), dtype="<i8").astype(np.int64)
        num_prompt = int(row["prompt"])
        if blocks.size != -(-num_prompt // block_tokens):
            raise ValueError(f"{num_prompt} tokens are not {blocks.size} blocks of {block_tokens}")
        return TraceRequest(float(row["time"]), blocks, block_tokens, num_prompt, int(row["output"]))

    return _in_order(read_lines(path, request, advance))


def logged_model(path: str | Path) -> str | None:
    """The model that an access log's first server had; None if the file is no access log."""
    with Path(path).open("rb") as lines:
        try:
            name = json.loads(next(lines, b"{}")).get("model")
        except (ValueError, AttributeError):
            return None
    return name if isinstance(name, str) else None


def _in_order(requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    waiting: list[tuple[float, int, TraceRequest]] = []
    now = float("-inf")

    def first() -> TraceRequest:
        nonlocal now
        _, _, earliest = heapq.heappop(waiting)
        now = max(now, earliest.time)
        return replace(earliest, time=now)

    for order, request in enumerate(requests):
        heapq.heappush(waiting, (request.time, order, request))
        if len(waiting) > _MAX_WAITING:
            yield first()
    while waiting:
        yield first()
