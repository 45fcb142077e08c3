"""Two replicas behind a router: `python -m benchmarks.cluster --traces FOLDER`.

Recorded agent sessions (or, without a folder, conversations over Python's own sources) are replayed through `pagoda
route`: each session asks its next turn when the last is answered, and some sessions run at a time. For each policy the
replicas start cold. Reported are the share of prompt tokens that hit, time to first token, and requests per replica.
Then one replica is killed in mid-run: requests lost, retried, and streams that broke. `--router NAME=COMMAND` puts
another router before the same replicas: `{backends}` becomes their URLs, `{port}` the port to listen on, `{events[0]}`
and `{replays[0]}` URL=ENDPOINT of a replica's block events. Such routers are asked for the model `bench`:

    --router "sglang=sglang-router launch --policy cache_aware --host 127.0.0.1 --port {port} --worker-urls {backends}"
    --router "vllm=vllm-router --policy kv_aware --host 127.0.0.1 --port {port} --worker-urls {backends}
        --kv-event-source {events[0]} --kv-event-source {events[1]} --kv-event-replay-source {replays[0]}
        --kv-event-replay-source {replays[1]} --kv-event-block-size 16 --kv-event-model bench"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from benchmarks import consoles
from benchmarks.peers.sessions import split_turns
from benchmarks.texts import source_text
from pagoda.cluster.local import HOST, TOKEN_ENV, LocalReplicas
from pagoda.cluster.routing import ROUTING_POLICIES

console = consoles.progress()
START_S = 180.0
MODEL = "bench"

Session = list[str]  # the prompt of each turn


@dataclass
class Run:
    """What happened to the requests of one run."""

    router: str
    ttft_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_refused: int = 0  # as too long, by a replica
    num_lost: int = 0
    num_broken: int = 0
    by_replica: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def figures(self) -> dict[str, Any]:
        times = sorted(self.ttft_s)
        return {
            "router": self.router,
            "requests": len(times),
            "token_hit_rate": round(self.num_hit_tokens / max(1, self.num_prompt_tokens), 4),
            "ttft_p50_s": round(statistics.median(times), 3) if times else None,
            "ttft_mean_s": round(statistics.fmean(times), 3) if times else None,
            "ttft_p95_s": round(times[int(0.95 * (len(times) - 1))], 3) if times else None,
            "seconds": round(self.seconds, 1),
            "by_replica": self.by_replica,
            "refused": self.num_refused,
            "lost": self.num_lost,
            "broken": self.num_broken,
        }


def recorded(folder: Path, max_sessions: int, max_turns: int, max_chars: int) -> list[Session]:
    """The first turns of recorded sessions: the task and the latest whole turns that fit `max_chars`."""
    sessions = []
    for path in sorted(folder.glob("*.jsonl"))[:max_sessions]:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:max_turns]
        session = []
        for turns in split_turns([row["input"] for row in rows]):
            if sum(map(len, turns)) > max_chars:
                break  # what comes later fits still less, and cut turns would be another prompt
            session.append("".join(turns))
        if session:
            sessions.append(session)
    return sessions


def made_up(num_sessions: int, num_turns: int, max_chars: int) -> list[Session]:
    """Conversations that share a system prompt and grow by a piece of source text each turn."""
    text = source_text(max_chars * num_sessions + max_chars)
    system, step = text[: max_chars // 3], max_chars * 2 // 3 // num_turns
    sessions = []
    for number in range(num_sessions):
        own = text[max_chars * (number + 1) :]
        sessions.append([system + own[: step * (turn + 1)] for turn in range(num_turns)])
    return sessions


async def replay(url: str, sessions: Sequence[Session], concurrency: int, max_tokens: int, run: Run) -> None:
    """Each session in order, so many at a time."""
    waiting = list(reversed(sessions))
    started = time.perf_counter()

    async def client(http: httpx.AsyncClient) -> None:
        while waiting:
            for prompt in waiting.pop():
                await ask(http, prompt, max_tokens, run)

    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        await asyncio.gather(*(client(http) for _ in range(concurrency)))
    run.seconds = time.perf_counter() - started


@asynccontextmanager
async def completion(http: httpx.AsyncClient, prompt: str, max_tokens: int) -> AsyncIterator[httpx.Response]:
    """A completion of so many tokens that is streamed; raises httpx.HTTPStatusError if it is not given."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json={**body, **stream}) as answer:
        answer.raise_for_status()
        yield answer


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, as they come."""
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


async def ask(http: httpx.AsyncClient, prompt: str, max_tokens: int, run: Run) -> None:
    started = time.perf_counter()
    first: float | None = None
    usage = None
    try:
        async with completion(http, prompt, max_tokens) as answer:
            async for event in events(answer):
                first = time.perf_counter() - started if first is None else first
                usage = event.get("usage") or usage
            replica = answer.headers.get("x-pagoda-replica", "?")
    except httpx.HTTPStatusError as error:
        run.num_refused += error.response.status_code == 400
        run.num_lost += error.response.status_code != 400
        return
    except httpx.HTTPError:
        run.num_lost += first is None
        run.num_broken += first is not None
        return
    if usage is None:
        run.num_broken += 1
        return
    run.ttft_s.append(first or 0.0)
    run.num_prompt_tokens += usage["prompt_tokens"]
    run.num_hit_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    run.by_replica[replica] = run.by_replica.get(replica, 0) + 1


@asynccontextmanager
async def replicas(args: argparse.Namespace, *, token: str, more: Sequence[str] = ()) -> AsyncIterator[LocalReplicas]:
    """Two cold replicas, with block events and token ids in them. Without a token others' routers may ask them."""
    events = ["--kv-events", "tcp://127.0.0.1:*", "--kv-events-tokens"]
    memory = ["--kv-memory", args.kv_memory, "--max-model-len", str(args.context), "--log-level", "error"]
    command = [
        sys.executable,
        "-m",
        "pagoda.cli",
        "serve",
        args.model,
        "--served-model-name",
        MODEL,
        *events,
        *memory,
        *more,
    ]
    fleet = LocalReplicas(2, command, token=token)
    task = asyncio.create_task(fleet.run())
    try:
        headers = {"x-pagoda-token": token}
        await asyncio.gather(*(up(f"{url}/health", headers, task.done) for url in fleet.urls))
        yield fleet
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def up(url: str, headers: dict[str, str], is_gone: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    async with httpx.AsyncClient(trust_env=False, headers=headers) as http:
        while time.monotonic() < deadline and not is_gone():
            try:
                if (await http.get(url, timeout=2)).status_code < 500:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.2)
    raise SystemExit(f"nothing answers at {url}")


async def endpoints(url: str) -> tuple[str, str]:
    """Where a replica publishes and replays block events, as URL=ENDPOINT."""
    async with httpx.AsyncClient(trust_env=False) as http:
        ports = (await http.get(f"{url}/health")).json()["kv_events"]
    return f"{url}=tcp://{HOST}:{ports['port']}", f"{url}=tcp://{HOST}:{ports['replay_port']}"


@asynccontextmanager
async def router(name: str, urls: Sequence[str], token: str, commands: dict[str, str]) -> AsyncIterator[str]:
    """A router of a policy, or another's by its command, as a process of its own."""
    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    if name in commands:
        events, replays = zip(*[await endpoints(url) for url in urls], strict=True)
        words = {"backends": " ".join(urls), "events": events, "replays": replays, "port": port}
        command = shlex.split(commands[name].format(**words))
    else:
        backends = [part for url in urls for part in ("--backend", url)]
        options = ["--port", str(port), "--routing", name, "--log-level", "error"]
        command = [sys.executable, "-m", "pagoda.cli", "route", *backends, *options]
    process = subprocess.Popen(command, env={**os.environ, TOKEN_ENV: token}, stdout=subprocess.DEVNULL)
    try:
        await up(f"http://{HOST}:{port}/health", {}, lambda: process.poll() is not None)
        await asyncio.sleep(3.0)  # until it knows its replicas
        yield f"http://{HOST}:{port}"
    finally:
        process.terminate()
        process.wait()


async def measure(args: argparse.Namespace, name: str, sessions: Sequence[Session], *, kill: bool = False) -> Run:
    # Other routers know no token.
    token = "" if name in args.router else "benchmark"
    run = Run(name + (", one killed" if kill else ""))
    async with replicas(args, token=token) as fleet, router(name, fleet.urls, token, args.router) as url:
        work = asyncio.create_task(replay(url, sessions, args.concurrency, args.max_tokens, run))
        if kill:
            while len(run.ttft_s) < sum(map(len, sessions)) // 3 and not work.done():
                await asyncio.sleep(0.05)
            os.kill(fleet.pids[0], signal.SIGKILL)
        await work
    return run


def print_runs(runs: Sequence[Run]) -> None:
    table = Table(
        "router",
        "requests",
        "tokens hit",
        "TTFT p50",
        "mean",
        "p95",
        "seconds",
        "by replica",
        "refused",
        "lost",
        "broken",
    )
    for run in runs:
        f = run.figures()
        table.add_row(
            f["router"],
            str(f["requests"]),
            f"{f['token_hit_rate']:.1%}",
            *(f"{f[key]}" for key in ("ttft_p50_s", "ttft_mean_s", "ttft_p95_s", "seconds")),
            " ".join(str(count) for _, count in sorted(f["by_replica"].items())),
            *(str(f[key]) for key in ("refused", "lost")),
            str(f["broken"]),
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--traces", type=Path, help="a folder of recorded sessions (*.jsonl)")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--chars", type=int, default=16_000, help="longest prompt")
    parser.add_argument("--concurrency", type=int, default=4, help="sessions at a time")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--kv-memory", default="512MiB", help="of each replica")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--policies", nargs="*", default=list(reversed(ROUTING_POLICIES)))
    parser.add_argument("--router", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--no-kill", action="store_true", help="leave out the run with a death")
    parser.add_argument("--out", type=Path, help="figures as JSON")
    args = parser.parse_args()
    args.router = dict(each.split("=", 1) for each in args.router)
    if args.traces is not None:
        sessions = recorded(args.traces, args.sessions, args.turns, args.chars)
    else:
        sessions = made_up(args.sessions, args.turns, args.chars)
    if not sessions:
        raise SystemExit(f"no session begins with a prompt of at most {args.chars} characters")
    console.print(f"{len(sessions)} sessions, {sum(map(len, sessions))} requests")
    runs = []
    for name in [*args.policies, *args.router]:
        runs.append(asyncio.run(measure(args, name, sessions)))
        print_runs(runs[-1:])
    if not args.no_kill:
        runs.append(asyncio.run(measure(args, "prefix-aware", sessions, kill=True)))
    print_runs(runs)
    if args.out is not None:
        args.out.write_text(json.dumps([{**run.figures(), "ttft_s": run.ttft_s} for run in runs], indent=1))


if __name__ == "__main__":
    main()
