"""How fast `pagoda replay` is: requests a minute on one core, peak memory, and microseconds of a routing decision.

    python -m benchmarks.replay                     # a made-up trace of conversations, 20,000 requests
    python -m benchmarks.replay conversation_trace.jsonl --policies lru reuse

Times are the process's own, so that others on the machine count for little.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from pagoda.cluster.routing import make_routing
from pagoda.plan.catalog import shape_of
from pagoda.plan.footprint import Footprint
from pagoda.plan.hardware import find_hardware, parse_tier_plan
from pagoda.plan.study import Setup, study, summarize
from pagoda.plan.trace_files import open_trace
from pagoda.plan.work import Machine

TIERS = ("dram:512GiB", "disk:4TB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--policies", nargs="+", default=["lru", "reuse"])
    parser.add_argument("--requests", type=int, default=20_000, help="of the made-up trace")
    parser.add_argument("--share", type=float, default=10.0, help="capacity of the device, %% of different blocks")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = open_trace([args.trace or made_up(Path(folder) / "trace.jsonl", args.requests)])
        start = time.process_time()
        summary = summarize(trace.requests())
        rate("reading", summary.num_requests, start)
        size = max(1, int(summary.num_different * args.share / 100))
        shape = shape_of("llama-3.1-8b")
        machine = Machine(shape, find_hardware("h100"), 2)
        tiers = tuple(parse_tier_plan(text, machine.hardware.host_link) for text in TIERS)
        for policy in args.policies:
            for name, below in (("device", ()), ("device, dram, disk", tiers)):
                start = time.process_time()
                setup = Setup(machine, Footprint(shape), below)
                study(trace.requests, setup, [size], [policy], summary.block_tokens)
                rate(f"{policy}, {name}", summary.num_requests, start)
    print(f"{'peak memory':28}{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:>12,.0f} MiB")
    route()


def rate(what: str, num_requests: int, start: float) -> None:
    print(f"{what:28}{60 * num_requests / (time.process_time() - start):>12,.0f} requests/min", flush=True)


def made_up(path: Path, num_requests: int) -> Path:
    """Conversations that grow by a few blocks a turn behind one of ten system prompts, in Mooncake's format."""
    chance = random.Random(0)
    next_id, talks = 1000, [list(range(10 * n, 10 * n + 4)) for n in range(10)]
    with path.open("w") as file:
        for number in range(num_requests):
            blocks = chance.choice(talks[:10] if chance.random() < 0.3 else talks[-500:])
            grown = blocks + list(range(next_id, next_id + chance.randint(1, 12)))
            next_id = grown[-1] + 1
            talks.append(grown)
            row = {"timestamp": 250 * number, "input_length": 512 * len(grown), "output_length": 200, "hash_ids": grown}
            file.write(json.dumps(row) + "\n")
    return path


def route(num_replicas: int = 1000, num_blocks: int = 600, rounds: int = 2000) -> None:
    chance = random.Random(0)
    loads = np.random.default_rng(0).uniform(0, 1e5, (64, num_replicas))
    policy = make_routing("prefix-aware", num_replicas, max_blocks=400_000)
    next_id, talks, seconds = 1000, [list(range(8))], 0.0
    for number in range(rounds):
        prompt = chance.choice(talks[-300:])[:num_blocks] + list(range(next_id, next_id + 40))
        next_id += 40
        talks.append(prompt)
        start = time.process_time()
        replica = policy.choose(prompt, 16, 16 * len(prompt), loads[number % 64])
        seconds += time.process_time() - start
        policy.on_computed(replica, prompt)
    print(f"{f'routing, {num_replicas:,} replicas':28}{1e6 * seconds / rounds:>12,.0f} us/decision")


if __name__ == "__main__":
    main()
