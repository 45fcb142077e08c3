"""This machine's limits: how fast memory is read, and how fast matrices are multiplied.

    python -m benchmarks.machine

Every figure is the best of several rounds: a limit is what the machine can do, not what it did while others ran.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pagoda.memory import host_memory

READ_BYTES = 1 << 30  # more than a last-level cache, even a large one that many machines share
MATRIX = 2048
ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes and operations a second, by number of threads. A multiply-add is two operations."""

    read: dict[int, float]
    bf16: dict[int, float]
    fp32: dict[int, float]

    def to_json(self) -> dict[str, Any]:
        """In 10^9 a second."""
        return {
            f"{name}_{unit}": {threads: round(value / 1e9, 1) for threads, value in values.items()}
            for (name, values), unit in zip(asdict(self).items(), ("gb_s", "gflop_s", "gflop_s"), strict=True)
        }


def cpu_name() -> str:
    """What /proc/cpuinfo calls the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def best_s(call: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest of `rounds` calls, after one that is not counted."""
    call()
    fastest = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


def measure(rounds: int = ROUNDS, read_bytes: int = READ_BYTES, matrix: int = MATRIX) -> Limits:
    """Measure on one thread and on all cores."""
    counts = sorted({1, os.cpu_count() or 1})
    # As weights and KV lie: in ordinary pages this reads a third less.
    buffer = torch.from_numpy(host_memory(read_bytes)).view(torch.float32).fill_(1)
    limits = Limits({}, {}, {})
    for count in counts:
        with threads(count):
            # Which reduction is nearest to memory's speed depends on how torch was built.
            reductions = (buffer.sum, buffer.max, lambda: torch.dot(buffer, buffer))
            limits.read[count] = read_bytes / min(best_s(reduce, rounds) for reduce in reductions)
            limits.bf16[count] = _matrix_rate(torch.bfloat16, matrix, rounds)
            limits.fp32[count] = _matrix_rate(torch.float32, matrix, rounds)
    return limits


def _matrix_rate(dtype: torch.dtype, size: int, rounds: int) -> float:
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / best_s(lambda: a @ b, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    print(json.dumps({"cpu": cpu_name(), "cores": os.cpu_count(), **measure(args.rounds).to_json()}, indent=2))


if __name__ == "__main__":
    main()
