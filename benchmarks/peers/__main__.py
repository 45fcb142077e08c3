"""Pagoda beside other engines on this machine, on the same weights and prompts.

a   cold prefill                     d   batch without sharing
b   first token after a warm prefix  e   batch behind a warm prefix; e2: a long one
c   decode of one stream             f   replay of agent sessions (--traces)
g   open loop at rising rates

Engines get a virtual environment each, stay loaded together, and take turns round by round. Results go to --out: a JSON
file, plots, and what each engine printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from benchmarks import consoles
from benchmarks.machine import Limits, cpu_name, measure
from benchmarks.peers.engines import ENGINES, KV_GIB, EngineSpec
from benchmarks.peers.plots import draw
from benchmarks.peers.process import PeerError, PeerProcess
from benchmarks.peers.report import summary, tables
from benchmarks.peers.rounds import Contest
from benchmarks.peers.sessions import read_sessions
from benchmarks.peers.venvs import InstallError, python_of
from benchmarks.peers.weights import Weights, export
from benchmarks.peers.workloads import FULL, QUICK, Workload, workloads
from benchmarks.texts import source_text

OURS = "pagoda"
WORKLOADS = ("a", "b", "c", "d", "e", "e2", "f", "g")
CONTEXT = 8192
MAX_SEQS = 64
console = consoles.progress()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="workloads (default: all)"
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it all work? Figures mean nothing")
    parser.add_argument("--traces", type=Path, help="folder of recorded sessions (*.jsonl) for workload f")
    parser.add_argument("--sessions", type=int, default=8, help="sessions to replay at once (default 8)")
    parser.add_argument("--turns", type=int, default=6, help="turns of each session (default 6)")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--venvs", type=Path, default=Path.home() / ".cache" / "pagoda" / "peers")
    parser.add_argument("--out", type=Path, default=Path("results") / "peers")
    parser.add_argument("--slow-factor", type=float, default=4.0, help="slower than the best by this: one round only")
    parser.add_argument("--overload-ms", type=float, default=5000.0, help="p99 TTFT that ends an engine's rising rates")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one engine's round (default 900)")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    return args


def chosen_workloads(args: argparse.Namespace, weights: Weights) -> list[Workload]:
    tokenizer = Tokenizer.from_file(str(weights.folder / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    replay = None
    if args.traces and "f" in args.only:
        replay = read_sessions(
            args.traces,
            encode,
            context=CONTEXT,
            max_sessions=2 if args.quick else args.sessions,
            max_turns=2 if args.quick else args.turns,
            max_output=8 if args.quick else 128,
        )
    elif "f" in args.only:
        console.print("(f) is left out: it needs --traces")
    every = workloads(encode(source_text(400_000)), QUICK if args.quick else FULL, replay)
    return [workload for workload in every if workload.name in args.only]


def settings(spec: EngineSpec, weights: Weights) -> dict[str, Any]:
    model = getattr(weights, spec.weights)
    if model is None:
        raise PeerError("needs a model that comes as a GGUF file")
    config = json.loads((weights.folder / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    bytes_per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 2
    return {
        "model": str(model),
        "context": CONTEXT,
        "kv_bytes": KV_GIB << 30,
        "kv_tokens": (KV_GIB << 30) // bytes_per_token,
        "max_seqs": MAX_SEQS,
        "threads": os.cpu_count(),
        "options": dict(spec.options),
    }


def start(args: argparse.Namespace, weights: Weights, warm_up: Sequence[Workload]) -> Iterator[tuple[str, Any, Any]]:
    """Start, load and warm up each engine: (name, process, what it says of itself), or (name, None, error)."""
    for name in args.engines:
        spec = ENGINES[name]
        peer = None
        try:
            python = python_of(spec.environment, args.venvs, console.print)
            console.print(f"{name}: loading")
            peer = PeerProcess(spec, python, args.out / f"{name}.log", args.timeout)
            info = peer.load(settings(spec, weights))
            for workload in warm_up:
                peer.run(workload.make(-1))
            info["idle_cpus"] = round(peer.idle_cpus(), 2)
            peer.pause()
            yield name, peer, info
        except (InstallError, PeerError) as error:
            console.print(f"[red]{name}: {error}", highlight=False)
            if peer:
                peer.close()
            yield name, None, {"error": str(error)}


@contextmanager
def progress(total: int) -> Iterator[Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def machine_report(*, quick: bool) -> dict[str, Any]:
    console.print("measuring the machine's limits")
    limits: Limits = measure(rounds=1, read_bytes=64 << 20, matrix=512) if quick else measure()
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "python": platform.python_version(), **limits.to_json()}


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    weights = export(args.model, args.venvs, console.print)
    chosen = chosen_workloads(args, weights)
    report: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "quick": args.quick,
        "machine": machine_report(quick=args.quick),
    }
    tokens = chosen[0].make(0).requests[0].tokens * 2
    warm_up = [w for w in workloads(tokens * 8, QUICK, None) if w.name in ("b", "d")]
    peers: dict[str, PeerProcess] = {}
    report["engines"] = {}
    try:
        for name, peer, info in start(args, weights, warm_up):
            report["engines"][name] = info
            if peer:
                peers[name] = peer
        contest = Contest(peers, chosen, OURS, args.slow_factor, args.overload_ms)
        with progress(args.rounds * len(chosen) * len(peers)) as tell:
            contest.run(args.rounds, tell)
    finally:
        for peer in peers.values():
            peer.close()
    report |= summary(chosen, list(peers), contest.outcomes, OURS)
    target = args.out / "peers.json"
    target.write_text(json.dumps(report, indent=1))
    for table in tables(report, list(peers), OURS):
        consoles.results().print(table)
    for path in (target, *draw(report, list(peers), OURS, args.out)):
        console.print(f"written: {path}")


if __name__ == "__main__":
    main()
