"""Recorded agent sessions as Requests: prompts that grow turn by turn, each asked when the one before is answered.

A session's file has one JSON object a line, with the whole prompt (`input`) and the answer (`output`). Prompts are cut
into turns where they grew, so that a prompt too long for the context loses whole turns, never part of a text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers.messages import Request

Encode = Callable[[str], list[int]]


def split_turns(prompts: Sequence[str]) -> list[tuple[str, ...]]:
    """Each prompt as its turns; the pieces of one are pieces of the next as far as the texts agree."""
    turns: list[str] = []
    split = []
    for prompt in prompts:
        while not prompt.startswith("".join(turns)):
            turns.pop()
        rest = prompt[len("".join(turns)) :]
        if rest:
            turns.append(rest)
        split.append(tuple(turns))
    return split


def fit(turns: Sequence[list[int]], room: int) -> list[int] | None:
    """At most `room` tokens: the first turn (the task), and the latest others that fit; None if none does."""
    first, *others = turns
    kept: list[list[int]] = []
    left = room - len(first)
    for turn in reversed(others):
        if len(turn) > left:
            break
        left -= len(turn)
        kept.insert(0, turn)
    if left < 0 or (others and not kept):
        return None
    return [token for turn in (first, *kept) for token in turn]


def session_requests(
    path: Path, encode: Encode, *, context: int, max_turns: int, max_output: int, index: int
) -> list[Request]:
    """The first turns of a session; the first request waits for nobody, and `index` is its place in the workload.

    A request whose latest turn does not fit the context next to the task is left out.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:max_turns]
    encoded = functools.cache(encode)
    requests: list[Request] = []
    for row, turns in zip(rows, split_turns([row["input"] for row in rows]), strict=True):
        max_tokens = max(1, min(max_output, len(encode(row["output"]))))
        prompt = fit([encoded(turn) for turn in turns], context - max_tokens)
        if prompt is not None:
            after = index + len(requests) - 1 if requests else None
            requests.append(Request(prompt, max_tokens, after=after))
    return requests


def read_sessions(
    folder: Path, encode: Encode, *, context: int, max_sessions: int, max_turns: int, max_output: int
) -> list[Request]:
    """Sessions of a folder in the order of their names, all starting at once.

    Raises:
        FileNotFoundError: the folder has no `*.jsonl` file.
    """
    paths = sorted(folder.glob("*.jsonl"))[:max_sessions]
    if not paths:
        raise FileNotFoundError(f"{folder} has no session (*.jsonl)")
    requests: list[Request] = []
    for path in paths:
        requests += session_requests(
            path, encode, context=context, max_turns=max_turns, max_output=max_output, index=len(requests)
        )
    return requests
