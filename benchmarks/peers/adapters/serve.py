"""The adapters' common half: JSON lines in and out, and the loop that feeds requests to an engine when they are due.

-> {"op": "load", "settings": {...}}                  <- {"info": {...}}
-> {"op": "run", "round": {...}}                      <- {"results": [...]}
                                                      <- {"error": "type: message"} to either
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from benchmarks.peers.messages import Request, Result, Round


@dataclass(frozen=True, slots=True)
class Event:
    """New tokens of the request added as `key`."""

    key: int
    tokens: Sequence[int]
    time: float = field(default_factory=time.perf_counter)


class PeerEngine(Protocol):
    """What an adapter wraps its engine into."""

    def add(self, key: int, tokens: list[int], max_tokens: int) -> None:
        """Queue a request."""

    def step(self) -> Iterable[Event]:
        """Compute for a while; called only while requests are unfinished."""

    def reset(self) -> None:
        """Forget all cached prefixes; called only when idle."""

    def info(self) -> dict[str, Any]:
        """Versions and settings worth reporting."""


def serve(engine: PeerEngine, requests: Sequence[Request]) -> list[Result]:
    """Serve requests, each from when it is due; returns in their order."""
    started = time.perf_counter()
    due: dict[int, float] = {i: r.at for i, r in enumerate(requests) if r.after is None}
    followers: dict[int, list[int]] = {}
    for i, request in enumerate(requests):
        if request.after is not None:
            followers.setdefault(request.after, []).append(i)
    results: dict[int, Result] = {}
    running: set[int] = set()
    ended = 0
    while ended < len(requests):
        now = time.perf_counter() - started
        for i in [i for i, at in due.items() if at <= now]:
            results[i] = Result(due.pop(i), [], [])
            engine.add(i, requests[i].tokens, requests[i].max_tokens)
            running.add(i)
        if not running:
            time.sleep(max(0.0, min(due.values()) - now))
            continue
        for event in engine.step():
            result = results[event.key]
            result.tokens.extend(event.tokens)
            result.times.extend([event.time - started] * len(event.tokens))
            wanted = requests[event.key].max_tokens
            if len(result.tokens) > wanted:
                raise RuntimeError(f"the engine gave {len(result.tokens)} tokens, {wanted} were asked for")
            if len(result.tokens) == wanted:
                running.remove(event.key)
                ended += 1
                due.update(dict.fromkeys(followers.get(event.key, ()), result.end))
    return [results[i] for i in range(len(requests))]


def _die_with_parent() -> None:
    """Let the kernel kill this process when the harness ends: a stopped process sees no closed pipe."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main(load: Callable[[dict[str, Any]], PeerEngine]) -> None:
    """Answer commands until stdin ends. What the engine prints goes to stderr, so that stdout holds answers alone."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine: PeerEngine | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["op"] == "load":
                engine = load(command["settings"])
                answer: dict[str, Any] = {"info": engine.info()}
            else:
                assert engine is not None
                work = Round.from_json(command["round"])
                engine.reset()
                serve(engine, work.setup)
                answer = {"results": [asdict(result) for result in serve(engine, work.requests)]}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
