"""What the KV cache's bookkeeping costs, without any KV: `python -m benchmarks.metadata`.

hit      a prompt that is known in full: match, acquire, reserve, release (target: 1 ms in total at 100,000 tokens)
digests  the chained BlockKeys of that prompt (target: 5 ms)
tree     a tree of many blocks: the same calls in it, bytes of memory per block with tokens (target: 150), evictions
decode   reserve and advance by one token, per running request
vllm     the calls of `hit` on vLLM's KVCacheManager (with --vllm PYTHON, one in which vLLM is installed)

Times are in microseconds. The pool is a fake that copies nothing, and torch is not loaded.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks import consoles
from pagoda.kv.cache import KVCache, TokenArray
from pagoda.kv.keys import KeyChain, Scope
from pagoda.kv.layout import KVLayout

BLOCK_SIZE = 16
SCOPE = Scope("tenant")
VOCABULARY = 128_000

# The shape of the tree: prompts of one service, conversations with a long common start, and where they part.
NUM_SYSTEM_PROMPTS = 64
SYSTEM_BLOCKS, CONVERSATION_BLOCKS, TURN_BLOCKS, TURNS_PER_CONVERSATION = 32, 100, 47, 40
CONVERSATION_TOTAL = CONVERSATION_BLOCKS + TURNS_PER_CONVERSATION * TURN_BLOCKS


class NoPool:
    """A pool without bytes."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def copy_block(self, source: int, target: int) -> None:
        """Nothing to copy."""


def new_cache(num_blocks: int) -> KVCache:
    layout = KVLayout.for_attention(num_layers=1, num_kv_heads=1, head_dim=8, block_size=BLOCK_SIZE, dtype="float16")
    return KVCache(layout, NoPool(num_blocks))


def random_tokens(rng: np.random.Generator, num_blocks: int) -> TokenArray:
    return rng.integers(0, VOCABULARY, num_blocks * BLOCK_SIZE, dtype=np.int32)


def compute(cache: KVCache, tokens: TokenArray) -> None:
    """A whole request: all that is not known is computed at once."""
    lease = cache.acquire(tokens, SCOPE)
    cache.reserve(lease, tokens.size - lease.num_computed_tokens)
    cache.advance(lease, tokens, tokens.size)
    cache.release(lease, tokens)


class Stopwatch:
    """Collects the times of named calls."""

    def __init__(self, times: dict[str, list[float]] | None = None) -> None:
        self.times = {} if times is None else times

    def __call__(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        result = call(*args)
        self.times.setdefault(name, []).append(1e6 * (time.perf_counter() - started))
        return result

    def summary(self) -> dict[str, dict[str, float]]:
        """Spread per call, and of their sum per round."""
        rounds = [sum(calls) for calls in zip(*self.times.values(), strict=True)]
        return {name: spread(values) for name, values in [*self.times.items(), ("total", rounds)]}


def spread(values: list[float]) -> dict[str, float]:
    p99 = sorted(values)[int(0.99 * (len(values) - 1))]
    return {"median": statistics.median(values), "min": min(values), "p99": p99, "max": max(values)}


def request(watch: Stopwatch, cache: KVCache, tokens: TokenArray) -> int:
    """The calls that a request needs before its first step, and the last; returns the tokens it found."""
    watch("lookup", cache.lookup, tokens, SCOPE)
    lease = watch("acquire", cache.acquire, tokens, SCOPE)
    watch("reserve", cache.reserve, lease, tokens.size - lease.num_computed_tokens)
    watch("release", cache.release, lease, tokens)
    return lease.num_hit_tokens


def hit(args: argparse.Namespace) -> dict[str, Any]:
    cache = new_cache(args.tokens // BLOCK_SIZE + 8)
    prompt = random_tokens(np.random.default_rng(0), -(-args.tokens // BLOCK_SIZE))[: args.tokens]
    compute(cache, prompt)
    watch = Stopwatch()
    found = [request(watch, cache, prompt.copy()) for _ in range(args.rounds)]
    return {"num_prompt_tokens": args.tokens, "num_hit_tokens": statistics.median(found), "us": watch.summary()}


def digests(args: argparse.Namespace) -> dict[str, Any]:
    chain = KeyChain(bytes(32), b"secret")
    num_blocks = args.tokens // BLOCK_SIZE
    prompt = random_tokens(np.random.default_rng(0), num_blocks)
    watch = Stopwatch()
    for _ in range(args.rounds):
        watch("chain", chain.chain, chain.root(SCOPE), prompt, BLOCK_SIZE)
    return {"num_keys": num_blocks, "us": watch.summary()["chain"]}


def prompts(num_blocks: int) -> Iterator[TokenArray]:
    """Prompts that make a tree of about `num_blocks` blocks, in the order they arrive."""
    rng = np.random.default_rng(0)
    systems = [random_tokens(rng, SYSTEM_BLOCKS) for _ in range(NUM_SYSTEM_PROMPTS)]
    for index in range(num_blocks // CONVERSATION_TOTAL):
        start = np.concatenate([systems[index % NUM_SYSTEM_PROMPTS], random_tokens(rng, CONVERSATION_BLOCKS)])
        for _ in range(TURNS_PER_CONVERSATION):
            yield np.concatenate([start, random_tokens(rng, TURN_BLOCKS)])


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def tree(args: argparse.Namespace) -> dict[str, Any]:
    gc.collect()
    before = resident_bytes()
    cache = new_cache(args.blocks)
    every = max(1, args.blocks // CONVERSATION_TOTAL * TURNS_PER_CONVERSATION // args.rounds)
    sample, num_leaves = [], 0
    started = time.perf_counter()
    for num_leaves, prompt in enumerate(prompts(args.blocks), start=1):
        compute(cache, prompt)
        if num_leaves % every == 0:
            sample.append(prompt)
    built = time.perf_counter() - started
    gc.collect()
    memory = resident_bytes() - before - sum(prompt.nbytes for prompt in sample)
    num_blocks = cache.num_cached_blocks
    watch = Stopwatch()
    for prompt in sample:
        request(watch, cache, prompt)
    return {
        "num_blocks": num_blocks,
        "num_leaves": num_leaves,
        "build_s": built,
        "bytes_per_block": memory / num_blocks,
        "us": watch.summary(),
        "evictions_per_s": {f"{size} at a time": eviction_rate(cache, size) for size in (1, 16, 256)},
    }


def eviction_rate(cache: KVCache, size: int) -> float:
    """Blocks evicted in a second when a caller needs `size` at a time."""
    calls = min(2000, cache.num_cached_blocks // (4 * size))
    started = time.perf_counter()
    freed = sum(cache.evict(size) for _ in range(calls))
    return freed / (time.perf_counter() - started)


def decode(args: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    prompt_blocks, steps = 128, 20 * BLOCK_SIZE
    cache = new_cache(args.running * (prompt_blocks + steps // BLOCK_SIZE + 1))
    sequences = [random_tokens(rng, prompt_blocks + steps // BLOCK_SIZE) for _ in range(args.running)]
    leases = [cache.acquire(tokens[: prompt_blocks * BLOCK_SIZE], SCOPE) for tokens in sequences]
    for lease, tokens in zip(leases, sequences, strict=True):
        cache.reserve(lease, lease.prompt.size)
        cache.advance(lease, tokens, lease.prompt.size)
    watch = Stopwatch()

    def step(end: int) -> None:
        for lease, tokens in zip(leases, sequences, strict=True):
            cache.reserve(lease, 1)
            cache.advance(lease, tokens[:end], end)

    for end in range(prompt_blocks * BLOCK_SIZE + 1, prompt_blocks * BLOCK_SIZE + 1 + steps):
        watch({0: "block filled", 1: "block begun"}.get(end % BLOCK_SIZE, "inside a block"), step, end)
    times = {name: [t / args.running for t in values] for name, values in watch.times.items()}
    mean = statistics.fmean([t for values in times.values() for t in values])
    return {"running": args.running, "mean_us": mean, "us": {name: spread(values) for name, values in times.items()}}


def vllm(args: argparse.Namespace) -> dict[str, Any]:
    script = Path(__file__).parent / "peers" / "vllm_metadata.py"
    command = [args.vllm, str(script), str(args.tokens), str(min(args.rounds, 30))]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    return {"us": Stopwatch(json.loads(output.splitlines()[-1])).summary()}


SECTIONS = {"hit": hit, "digests": digests, "tree": tree, "decode": decode, "vllm": vllm}


def table(name: str, result: dict[str, Any]) -> Table:
    shown = Table(title=name, title_justify="left", show_header=False)
    for key, value in result.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        for label, row in rows:
            cells = row.items() if isinstance(row, dict) else [("", row)]
            text = ", ".join(f"{cell} {number:,.1f}".strip() for cell, number in cells)
            shown.add_row(f"{key} {label}".strip(), text)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="prompt of `hit` and `digests`")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="size of `tree`")
    parser.add_argument("--running", type=int, default=64, help="requests of `decode`")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--vllm", metavar="PYTHON", help="also measure the vLLM that this interpreter imports")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="default: all that can run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args()
    if "vllm" in (args.only or []) and not args.vllm:
        parser.error("section vllm needs --vllm PYTHON")
    results = {}
    for name in args.only or [name for name in SECTIONS if name != "vllm" or args.vllm]:
        results[name] = SECTIONS[name](args)
        if not args.json:
            consoles.results().print(table(name, results[name]))
    if args.json:
        json.dump(results, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
