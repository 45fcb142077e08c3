"""Agent sessions that need several times the pool, with and without tiers: `python -m benchmarks.working_set`.

Recorded sessions (`--traces FOLDER`) take turns: each asks its next prompt, which is its last one grown by a turn, when
all others had theirs, so that its blocks were evicted since. The pool holds a fifth of all blocks that are asked for.
Every variant serves the same requests with answers of the same lengths, one after the other in as many rounds as told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks import consoles
from benchmarks.peers.messages import Request
from benchmarks.peers.sessions import read_sessions
from pagoda import Engine, SamplingParams

VARIANTS: dict[str, tuple[str, ...]] = {
    "no tier": (),
    "dram": ("dram:{size}",),
    "disk": ("disk:{folder}/kv:{size}",),
    "dram, disk": ("dram:{half}", "disk:{folder}/kv:{size}"),
}
BLOCK = 16


def num_distinct_blocks(requests: Sequence[Request]) -> int:
    """Blocks of all prompts, those of a common prefix counted once."""
    prefixes = {hash(tuple(r.tokens[:end])) for r in requests for end in range(BLOCK, len(r.tokens) + 1, BLOCK)}
    return len(prefixes)


def in_turns(requests: Sequence[Request]) -> deque[deque[Request]]:
    """The sessions that the requests are of."""
    sessions: deque[deque[Request]] = deque()
    for request in requests:
        if request.after is None:
            sessions.append(deque())
        sessions[-1].append(request)
    return sessions


def serve(engine: Engine, requests: Sequence[Request], at_once: int) -> dict[str, float]:
    """Serve all sessions, so many requests at once."""
    sessions, core = in_turns(requests), engine.core
    waiting: dict[str, float] = {}
    running: dict[str, deque[Request]] = {}
    ttfts: list[float] = []
    num_hit_tokens = 0
    started = time.perf_counter()
    while sessions or running:
        while sessions and len(running) < at_once:
            session = sessions.popleft()
            request, name = session.popleft(), f"r{len(ttfts) + len(waiting)}"
            params = SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)
            core.add(name, request.tokens, params)
            waiting[name], running[name] = time.perf_counter(), session
        for output in core.step():
            name = output.request_id
            if name in waiting and any(delta.token_ids for delta in output.deltas):
                ttfts.append(time.perf_counter() - waiting.pop(name))
            if output.finished:
                num_hit_tokens += output.usage.num_hit_tokens
                if session := running.pop(name):
                    sessions.append(session)
    seconds = time.perf_counter() - started
    return {
        "requests/s": len(requests) / seconds,
        "TTFT p50, s": float(np.quantile(ttfts, 0.5)),
        "TTFT p95, s": float(np.quantile(ttfts, 0.95)),
        "hit share": num_hit_tokens / sum(len(request.tokens) for request in requests),
        "restored share": core.cache.stats.num_restored_tokens / sum(len(request.tokens) for request in requests),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="a folder of recorded sessions (*.jsonl)")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--turns", type=int, default=5, help="of each session (default 5)")
    parser.add_argument("--context", type=int, default=4096, help="longer prompts lose whole turns (default 4096)")
    parser.add_argument("--times", type=float, default=5.0, help="working set over pool (default 5)")
    parser.add_argument("--at-once", type=int, default=2, help="requests at once (default 2)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--folder", type=Path, help="on the disk to use (default: the temporary folder)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    probe = Engine(args.model, kv_memory="64MiB", progress=False)
    block_bytes = probe.core.cache.layout.pool_block_bytes
    requests = read_sessions(
        args.traces,
        lambda text: probe.tokenizer.encode(text, add_special_tokens=False),
        context=args.context,
        max_sessions=args.sessions,
        max_turns=args.turns,
        max_output=32,
    )
    probe.close()
    blocks = num_distinct_blocks(requests)
    needed = args.at_once * (max(len(r.tokens) + r.max_tokens for r in requests) // BLOCK + 2)
    pool_blocks = max(int(blocks / args.times), needed)
    about = (
        f"{len(requests)} requests of {args.sessions} sessions, {blocks * block_bytes / 1e9:.2f} GB of KV, "
        f"{blocks / pool_blocks:.1f} times the pool of {pool_blocks * BLOCK:,} tokens"
    )
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in args.variants}
    size = 2 * blocks * block_bytes + (64 << 20)
    for _ in range(args.rounds):
        for name in args.variants:
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                tiers = [spec.format(folder=folder, size=f"{size}B", half=f"{size // 4}B") for spec in VARIANTS[name]]
                engine = Engine(args.model, kv_memory=f"{pool_blocks * block_bytes}B", tiers=tiers, progress=False)
                engine.generate(["warm up the threads, not the cache"], SamplingParams(max_tokens=1))
                rounds[name].append(serve(engine, requests, args.at_once))
                engine.close()
            consoles.progress().print(f"{name}: {rounds[name][-1]}")
    rows = {
        name: {key: statistics.median(figures[key] for figures in all_rounds) for key in all_rounds[0]}
        for name, all_rounds in rounds.items()
    }
    if args.json:
        json.dump({"about": about, "variants": rows}, sys.stdout, indent=2)
        return
    table = Table("", *next(iter(rows.values())), title=about, title_justify="left")
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.3f}" for value in row.values()))
    consoles.results().print(table)


if __name__ == "__main__":
    main()
