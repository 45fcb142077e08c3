"""Readers of request traces: each yields TraceRequests in the order of the file and keeps one request in memory.

Block ids are prefix ids: two requests have equal ids in the same places exactly as far as their tokens are equal.
A reader raises ConfigError with the file and the line for what it cannot read, and calls `advance` with the bytes of
each line that it took.
"""

from __future__ import annotations

import csv
import heapq
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.errors import ConfigError

Advance = Callable[[int], object]
Reader = Callable[[Path, Advance], Iterator["TraceRequest"]]

TEXT_BYTES_PER_TOKEN = 4
TEXT_BLOCK_TOKENS = 16


def no_advance(num_bytes: int) -> None:
    """Shows nothing."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        time: arrival, in seconds since the trace's start.
        blocks: int64 ids of the prompt's blocks; the last block may be partly filled.
        block_tokens: tokens in a full block.
        num_prompt_tokens: at most `len(blocks) * block_tokens`.
        num_output_tokens: what was generated.
    """

    time: float
    blocks: npt.NDArray[np.int64]
    block_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int


def read_mooncake(path: str | Path, advance: Advance = no_advance) -> Iterator[TraceRequest]:
    """Requests of a Mooncake trace (Qin et al., FAST 2025): JSON lines, milliseconds, 512 tokens in a block."""
    return read_lines(path, lambda row: _hashed(row, seconds=1e-3, block_tokens=512), advance)


def read_bailian(path: str | Path, advance: Advance = no_advance) -> Iterator[TraceRequest]:
    """Requests of a Qwen-Bailian usage trace (Wang et al., ATC 2025): JSON lines, seconds, 16 tokens in a block."""
    return read_lines(path, lambda row: _hashed(row, seconds=1.0, block_tokens=16), advance)


def read_session(path: str | Path, advance: Advance = no_advance) -> Iterator[TraceRequest]:
    """Requests of a session recorded with full text: JSON lines with `timestamp` in microseconds, `input` and `output`.

    Four bytes of UTF-8 count as a token, which is near what tokenizers make of English and of code, and needs no model.
    A block is 16 of them; its id is a 64-bit hash chained over the blocks before it.
    """
    start: list[float] = []

    def request(row: dict[str, Any]) -> TraceRequest:
        now = float(row["timestamp"]) * 1e-6
        if not start:
            start.append(now)
        text = _string(row, "input").encode()
        num_output = -(-len(_string(row, "output").encode()) // TEXT_BYTES_PER_TOKEN)
        num_prompt = -(-len(text) // TEXT_BYTES_PER_TOKEN)
        return TraceRequest(now - start[0], chain(text), TEXT_BLOCK_TOKENS, num_prompt, num_output)

    return read_lines(path, request, advance)


def read_lengths(path: str | Path, advance: Advance = no_advance) -> Iterator[TraceRequest]:
    """Requests of an Azure LLM inference trace (Patel et al., ISCA 2024): a CSV of arrival times and lengths.

    It does not say which prompts share a prefix, so no block is ever seen twice.
    """
    first: datetime | None = None
    next_id = 0
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(_counted(file, advance))
        for row in rows:
            try:
                now = datetime.fromisoformat(row["TIMESTAMP"][:26])
                num_prompt, num_output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
                if min(num_prompt, num_output) < 0:
                    raise ValueError("a length is negative")
            except (KeyError, TypeError, ValueError) as error:
                raise _unreadable(path, rows.line_num, error) from error
            first = first or now
            num_blocks = -(-num_prompt // TEXT_BLOCK_TOKENS)
            blocks = np.arange(next_id, next_id + num_blocks, dtype=np.int64)
            next_id += num_blocks
            yield TraceRequest((now - first).total_seconds(), blocks, TEXT_BLOCK_TOKENS, num_prompt, num_output)


def overlap(sessions: Iterable[Iterable[TraceRequest]], interval: float) -> Iterator[TraceRequest]:
    """Sessions as one stream: each starts `interval` seconds after the one before and keeps its own pace.

    Memory is bounded by one request of each session. Where a session's clock goes back, its order counts.
    """
    shifted = [_delayed(session, interval * index) for index, session in enumerate(sessions)]
    return heapq.merge(*shifted, key=lambda request: request.time)


def chain(text: bytes) -> npt.NDArray[np.int64]:
    """Prefix ids of a text's blocks, the last one possibly partly filled: 64-bit hashes, each over all before it."""
    size = TEXT_BLOCK_TOKENS * TEXT_BYTES_PER_TOKEN
    digest = b""
    ids = []
    for at in range(0, len(text), size):
        digest = blake2b(digest + text[at : at + size], digest_size=8).digest()
        ids.append(digest)
    return np.frombuffer(b"".join(ids), dtype=np.int64)


def _delayed(session: Iterable[TraceRequest], delay: float) -> Iterator[TraceRequest]:
    now = delay
    for request in session:
        now = max(now, request.time + delay)
        yield replace(request, time=now)


def _hashed(row: dict[str, Any], *, seconds: float, block_tokens: int) -> TraceRequest:
    blocks = np.array(row["hash_ids"], dtype=np.int64)
    num_prompt = int(row["input_length"])
    if blocks.ndim != 1 or not 0 <= num_prompt <= blocks.size * block_tokens:
        raise ValueError(f"{num_prompt} tokens do not fit in {blocks.size} blocks of {block_tokens}")
    time = float(row["timestamp"]) * seconds
    return TraceRequest(time, blocks, block_tokens, num_prompt, int(row["output_length"]))


def _string(row: dict[str, Any], name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is not a string")
    return value


def read_lines(
    path: str | Path, request: Callable[[dict[str, Any]], TraceRequest | None], advance: Advance
) -> Iterator[TraceRequest]:
    """What `request` makes of each JSON object of a file, a line each; None is skipped, as blank lines are."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            advance(len(line))
            if not line.strip():
                continue
            try:
                made = request(json.loads(line))
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise _unreadable(path, number, error) from error
            if made is not None:
                yield made


def _counted(lines: Iterable[str], advance: Advance) -> Iterator[str]:
    for line in lines:
        advance(len(line))
        yield line


def _unreadable(path: str | Path, line: int, error: Exception) -> ConfigError:
    what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
    return ConfigError(f"{path}, line {line}: {what}")
