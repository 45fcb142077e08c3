"""The same vLLM alone, with LMCache and with Pagoda: `python -m benchmarks.vllm --out FOLDER`.

    TTFT     cold, after a reset of vLLM's prefix cache, after a restart of everything; median and 95th percentile
    slow     with Pagoda, over a tier slower than computing: prompts it has against prompts nobody has
    damage   a byte of every 256 KiB of what is on disk is changed, everything restarted: answers that differ
    disk     bytes that are occupied, and the bound that was given

An answer is right if vLLM alone gives it, cold or from its own cache: in BF16 the two differ where logits are near a
tie, since a known prefix cuts the prompt elsewhere. Each engine runs alone, in eager mode, which starts faster.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import ENGINES
from benchmarks.peers.venvs import python_of
from benchmarks.vllm_lmcache import LMCacheServer, lmcache_python
from benchmarks.vllm_process import VllmProcess, pagoda_connector, vllm_python

BLOCK = 128
CAPACITY = 1 << 30
PEERS = Path.home() / ".cache" / "pagoda" / "peers"


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Run:
    """What is run, and how."""

    python: Path
    model: Path
    prompts: list[list[int]]
    fresh: list[list[int]]
    answer_tokens: int
    log: Path
    right: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def start(self, connector: dict[str, Any] | None, python: Path | None = None, **env: str) -> VllmProcess:
        return VllmProcess(python or self.python, self.model, connector, self.log, env=env)

    def ttft(self, engine: VllmProcess, prompts: list[list[int]]) -> dict[str, Any]:
        told = [engine.run(prompt) for prompt in prompts]
        seconds = [one["seconds"] for one in told]
        return {
            "median_s": statistics.median(seconds),
            "p95_s": sorted(seconds)[-1 - len(seconds) // 20],
            "cached_tokens": statistics.median(one["cached"] for one in told),
        }

    def wrong(self, engine: VllmProcess) -> int:
        """How many prompts are answered otherwise than by vLLM alone, cold or from its own cache."""
        return sum(one not in right for one, right in zip(self.answers(engine), self.right, strict=True))

    def answers(self, engine: VllmProcess) -> list[list[int]]:
        return [engine.run(prompt, self.answer_tokens)["tokens"] for prompt in self.prompts]


def warm_up(engine: VllmProcess) -> None:
    for seed in (90, 91):
        engine.run(numbers(seed, 500))


def alone(run: Run) -> dict[str, Any]:
    with run.start(None) as engine:
        warm_up(engine)
        cold = run.ttft(engine, run.prompts)
        local = run.ttft(engine, run.prompts)
        engine.reset()
        run.right = list(zip(run.answers(engine), run.answers(engine), strict=True))  # the second time they are known
        engine.end()
    differ = sum(cold != warm for cold, warm in run.right)
    return {"cold": cold, "in_vllms_own_cache": local, "differ_cold_and_cached": differ}


@contextmanager
def memory(name: str, run: Run, folder: Path) -> Iterator[tuple[dict[str, Any], Path | None]]:
    """A contestant's connector, and the Python it needs; ends whatever serves it."""
    with ExitStack() as stack:
        if name == "pagoda":
            yield pagoda_connector(f"disk:{folder}:{CAPACITY}"), None
        else:
            python = lmcache_python(run.python, PEERS / "vllm-lmcache", tell)
            server = stack.enter_context(LMCacheServer(python, folder, BLOCK, run.log))
            yield server.connector, python


def contestant(name: str, run: Run, folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}
    folder.mkdir(parents=True, exist_ok=True)
    with memory(name, run, folder) as (connector, python), run.start(connector, python) as engine:
        warm_up(engine)
        result["cold"] = run.ttft(engine, run.prompts)
        engine.reset()
        result["reset"] = run.ttft(engine, run.prompts)
        engine.reset()
        result["wrong_after_reset"] = run.wrong(engine)
        result["processes_left"] = len(engine.end())
    result["disk_bytes"] = used_bytes(folder)
    with memory(name, run, folder) as (connector, python), run.start(connector, python) as engine:
        warm_up(engine)
        result["restart"] = run.ttft(engine, run.prompts)
        engine.reset()
        result["wrong_after_restart"] = run.wrong(engine)
        engine.end()
    damage(folder)
    with memory(name, run, folder) as (connector, python), run.start(connector, python) as engine:
        result["wrong_after_damage"] = run.wrong(engine)
        engine.end()
    return result


def slow(run: Run, folder: Path) -> dict[str, Any]:
    """Prompts that a tier has, whose loading takes three times as long as computing, against prompts it has not."""
    connector = pagoda_connector(f"disk:{folder}:{CAPACITY}")
    with run.start(connector) as engine:
        warm_up(engine)
        cold = run.ttft(engine, run.prompts)
        engine.end()
    num_bytes = used_bytes(folder) / len(run.prompts)
    connector["kv_connector_module_path"] = "benchmarks.vllm_slow"
    rate = num_bytes / (3 * cold["median_s"])
    with run.start(connector, VLLM_SLOW_TIER=str(rate)) as engine:
        warm_up(engine)
        pairs = []
        for known, unknown in zip(run.prompts, run.fresh, strict=True):
            pairs.append((engine.run(known)["seconds"], engine.run(unknown)["seconds"]))
        engine.end()
    ratios = [known / unknown for known, unknown in pairs]
    return {"tier_bytes_per_s": rate, "known_against_unknown": statistics.median(ratios), "worst": max(ratios)}


def damage(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > 256 << 10:
            with path.open("r+b") as file:
                for at in range(128 << 10, path.stat().st_size, 256 << 10):
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 0x55]))


def used_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def numbers(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40_000), k=count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="store_true", help="make vLLM's environment, print its Python and stop")
    parser.add_argument(
        "--only", nargs="+", choices=["pagoda", "lmcache", "slow"], default=["lmcache", "pagoda", "slow"]
    )
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--out", type=Path, help="a folder for the JSON and vLLM's log")
    args = parser.parse_args()
    python = vllm_python() or python_of(ENGINES["vllm"].environment, PEERS, tell)
    if args.python:
        print(python)
        return
    from benchmarks.peers.weights import export

    with tempfile.TemporaryDirectory(dir=os.environ.get("PAGODA_BENCH_FOLDER")) as scratch:
        out = args.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        model = export("smollm2", PEERS, tell).folder
        run = Run(
            python, model,
            [numbers(seed, args.prompt_tokens) for seed in range(args.prompts)],
            [numbers(1000 + seed, args.prompt_tokens) for seed in range(args.prompts)],
            args.answer_tokens, out / "vllm.log",
        )  # fmt: skip
        tell("vLLM alone")
        results: dict[str, Any] = {"alone": alone(run), "capacity_bytes": CAPACITY}
        for name in args.only:
            tell(name)
            folder = Path(scratch) / name
            try:
                results[name] = slow(run, folder) if name == "slow" else contestant(name, run, folder)
            except Exception as error:  # a contestant that does not start must not take the others' figures with it
                results[name] = {"failed": str(error)}
                tell(f"{name}: {error}")
        text = json.dumps(results, indent=2)
        if args.out:
            (args.out / "vllm.json").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
