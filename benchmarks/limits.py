"""Pagoda alone against the limits of this machine in the same run: how much of its bandwidth and matrix rate steps use.

    python -m benchmarks.limits --help

    floor   max(bytes that must be read / read bandwidth, operations / matrix rate). Bytes: every weight once, every
            distinct KV byte once. Operations: two for each multiply-add of a matrix product; attention's are counted.
    share   floor / measured time, of the fastest round

Rounds of the cases of a table take turns, so that a noisy minute hurts all alike. `busy` is processor time over (wall
time x threads): where it is far below 1, something else was using the machine and the wall time says little.

A decode step is timed as generation has it, behind steps like it: a turn is several of them. The first one, behind what
the case before did, is shown apart (`first`): it finds neither weights nor Python's own code in any cache.

Decode attention is that of a decoder which does next to nothing else. It is shown on contiguous keys and values and on
a pool whose blocks are in ascending order, in the order in which an allocator gives them out when requests have come
and gone for long, and in random order.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.machine import best_s, cpu_name, measure
from benchmarks.thin import attention_decoder, step_batch
from pagoda.engine.runner import layout_for
from pagoda.kernels import KVView, backend_name, linear
from pagoda.kv.allocator import Allocator, BlockIds
from pagoda.kv.pool import BlockPool
from pagoda.memory import host_memory
from pagoda.model.decoder import Decoder
from pagoda.model.loader import load_model

BLOCK = 16
CONTEXTS = (4096, 32775)  # tokens that decode attention reads
STEPS = 5  # decode steps of a turn
COLD_BYTES = 600 << 20  # data that a step finds cold is cycled through more than this


@dataclass(slots=True)
class Case:
    """One thing to time, and what it must read and compute."""

    name: str
    call: Callable[[], object]
    num_bytes: float
    operations: float
    steps: int = 1  # calls of a turn
    first: list[float] = field(default_factory=list)  # of several calls
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def run(self) -> None:
        for step in range(self.steps):
            wall, cpu = time.perf_counter(), time.process_time()
            self.call()
            wall = time.perf_counter() - wall
            if step == 0 and self.steps > 1:
                self.first.append(wall)
            else:
                self.wall.append(wall)
                self.cpu.append(time.process_time() - cpu)

    def forget(self) -> None:
        """What was measured so far was a warm-up."""
        for times in (self.first, self.wall, self.cpu):
            times.clear()


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds, 10^9 a second, and fractions."""

    name: str
    first_ms: float | None  # the median; None: calls are not told apart
    min_ms: float
    median_ms: float
    gb_s: float
    gflop_s: float
    floor_ms: float
    share: float
    busy: float


class Model:
    """A decoder over a pool, with the bytes and operations of its steps."""

    def __init__(self, decoder: Decoder, num_blocks: int) -> None:
        self.decoder = decoder
        spec = decoder.spec
        pool = BlockPool(layout_for(spec, BLOCK, decoder.dtype), num_blocks)
        self.views = [KVView(pool.view(layer, "keys"), pool.view(layer, "values")) for layer in range(spec.num_layers)]
        self.groups = pool.layout.group_of_layer
        layers = decoder.weights.layers
        matrices = [m for layer in layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        self.in_layers = sum(m.shape.numel() for m in matrices)
        self.in_head = decoder.weights.lm_head.shape.numel()
        self.weight_bytes = sum(m.nbytes for m in (*matrices, decoder.weights.lm_head))
        self.kv_token_bytes = spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * decoder.dtype.itemsize

    def case(self, name: str, tables: torch.Tensor, start: int, new: int, distinct_tokens: int) -> Case:
        """Every request computes `new` tokens after `start`; one row of each gets logits."""
        spec, requests = self.decoder.spec, len(tables)
        batch = step_batch(tables, BLOCK, start, new, spec.vocab_size, max(self.groups) + 1)
        pairs = requests * sum(range(start + 1, start + new + 1))
        attention = 4 * pairs * spec.num_heads * spec.head_dim * spec.num_layers
        return Case(
            name,
            lambda: self.decoder.forward(batch, self.views, self.groups),
            self.weight_bytes + distinct_tokens * self.kv_token_bytes,
            2 * requests * (new * self.in_layers + self.in_head) + attention,
            STEPS if new == 1 else 1,
        )


def step_cases(decoder: Decoder) -> list[Case]:
    """Decode steps and prefill chunks of the whole model."""
    blocks = decoder.spec.max_context // BLOCK
    model = Model(decoder, 2 * blocks)
    ids = torch.randperm(2 * blocks).to(torch.int32)
    one, sixteen = ids[None, :blocks], ids[:256].view(16, 16)
    shared = 7000 // BLOCK
    together = torch.cat((ids[:shared].repeat(32, 1), ids[shared : shared + 32 * 8].view(32, 8)), dim=1)
    return [
        model.case("decode, 1 x 128 tokens", one, 127, 1, 128),
        model.case("decode, 1 x 2,064 tokens", one, 2063, 1, 2064),
        model.case("decode, 1 x 8,000 tokens", one, 7999, 1, 8000),
        model.case("decode, 16 x 192 tokens", sixteen, 191, 1, 16 * 192),
        model.case("decode, 32 on 7,000 shared", together, shared * BLOCK + 63, 1, shared * BLOCK + 32 * 64),
        model.case("prefill, 512 tokens at 0", one, 0, 512, 0),
        model.case("prefill, 512 tokens at 1,536", one, 1536, 512, 1536),
        model.case("prefill, 2,064 tokens", one, 0, 2064, 0),
    ]


def attention_cases(num_kv_heads: int, group: int, head_dim: int, context: int) -> list[Case]:
    """Decode attention of one request, layer after layer: on contiguous keys and values, and in a pool."""
    num_bytes = context * num_kv_heads * head_dim * 2 * 2
    layers, blocks = max(1, COLD_BYTES // num_bytes), -(-context // BLOCK)
    decoder = attention_decoder(num_kv_heads, group, head_dim, layers, context)
    layout = layout_for(decoder.spec, BLOCK, torch.bfloat16)
    pool = BlockPool(layout, 2 * blocks)
    paged = [KVView(pool.view(layer, "keys"), pool.view(layer, "values")) for layer in range(layers)]
    shape = (layers, 2, 1, num_kv_heads, context, head_dim)
    memory = torch.from_numpy(host_memory(2 * math.prod(shape))).view(torch.bfloat16).view(shape)
    for part in (*(view.keys for view in paged), *(view.values for view in paged), *memory.flatten(0, 1)):
        part.normal_()

    def case(kind: str, views: list[KVView], ids: torch.Tensor) -> Case:
        batch = step_batch(ids.to(torch.int32)[None], views[0].keys.shape[2], context - 1, 1)
        return Case(
            f"attention, {num_kv_heads} x {group} x {head_dim}, {context:,} tokens, {kind}",
            lambda: decoder.forward(batch, views, layout.group_of_layer),
            num_bytes * layers,
            4 * context * num_kv_heads * group * head_dim * layers,
        )

    return [
        case("contiguous", [KVView(*layer) for layer in memory], torch.zeros(1)),
        case("ascending", paged, torch.arange(blocks)),
        case("as given out", paged, torch.from_numpy(given_out(pool.num_blocks, blocks))),
        case("random", paged, torch.randperm(pool.num_blocks)[:blocks]),
    ]


def given_out(num_blocks: int, count: int) -> BlockIds:
    """The blocks of a prompt that is computed 2,048 tokens at a time, after many requests that grew by turns."""
    rng, allocator = np.random.default_rng(0), Allocator(num_blocks)
    running: list[list[BlockIds]] = []
    for _ in range(1000):
        while allocator.num_free < num_blocks // 4:
            allocator.release(np.concatenate(running.pop(int(rng.integers(len(running))))))
        running.append([allocator.allocate(int(rng.integers(1, num_blocks // 8)))])
        for _ in range(int(rng.integers(8))):  # a block of decoded tokens for one of those that run
            running[int(rng.integers(len(running)))].append(allocator.allocate(1))
    while allocator.num_free < count:
        allocator.release(np.concatenate(running.pop(0)))
    step = 2048 // BLOCK
    return np.concatenate([allocator.allocate(min(step, count - start)) for start in range(0, count, step)])


def linear_rate(rounds: int) -> float:
    """Operations a second of Pagoda's own product where it is in cache: torch's is not everywhere the faster one."""
    x, weight = torch.randn(512, 576).bfloat16(), torch.randn(1024, 576).bfloat16()
    return 2 * x.shape[0] * weight.numel() / best_s(lambda: linear(x, weight), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a BF16 model (default: %(default)s)")
    parser.add_argument("--weights", default="full", help="full or int8 (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="timed calls of each case (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="default: all CPUs")
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    limits = measure()
    if args.threads not in limits.read:
        parser.error(f"the machine's limits are measured on {' or '.join(map(str, limits.read))} threads only")
    read, rate = limits.read[args.threads], max(limits.bf16[args.threads], linear_rate(20))
    print(f"{cpu_name()}, {args.threads} threads, {backend_name()} kernels")
    print(
        f"limits: read {read / 1e9:.1f} GB/s, BF16 matrices {rate / 1e9:,.0f} GFLOP/s (the faster of torch and Pagoda)"
    )

    decoder = load_model(args.model, dtype="bfloat16", weights_format=args.weights).decoder
    tables: list[Callable[[], list[Case]]] = [lambda: step_cases(decoder)]
    shapes = [(*heads, context) for heads in ((3, 3, 64), (8, 4, 128)) for context in CONTEXTS]
    tables += [lambda shape=shape: attention_cases(*shape) for shape in shapes]  # type: ignore[misc]
    results = []
    for table in tables:
        cases = table()
        for turn in range(args.rounds + 1):
            for case in cases:
                case.run()
                if turn == 0:
                    case.forget()
        results += show([evaluate(case, read, rate, args.threads) for case in cases])
    if args.json:
        write_json(args.json, {"cpu": cpu_name(), "threads": args.threads, **limits.to_json()}, results)


def show(results: list[Result]) -> list[Result]:
    """Print a table."""
    print(f"{'':50}{'first':>9}{'min ms':>9}{'median':>9}{'GB/s':>8}{'GFLOP/s':>9}{'floor':>9}{'share':>7}{'busy':>6}")
    for r in results:
        first = "" if r.first_ms is None else f"{r.first_ms:.2f}"
        print(
            f"{r.name:50}{first:>9}{r.min_ms:9.2f}{r.median_ms:9.2f}{r.gb_s:8.1f}{r.gflop_s:9.0f}"
            f"{r.floor_ms:9.2f}{r.share:7.0%}{r.busy:6.2f}"
        )
    return results


def evaluate(case: Case, read: float, rate: float, threads: int) -> Result:
    """The case's times against its floor."""
    fastest, floor = min(case.wall), max(case.num_bytes / read, case.operations / rate)
    return Result(
        case.name,
        statistics.median(case.first) * 1e3 if case.first else None,
        fastest * 1e3,
        statistics.median(case.wall) * 1e3,
        case.num_bytes / fastest / 1e9,
        case.operations / fastest / 1e9,
        floor * 1e3,
        floor / fastest,
        sum(case.cpu) / (sum(case.wall) * threads),
    )


def write_json(path: str, machine: dict[str, Any], results: list[Result]) -> None:
    """The machine and the table."""
    with open(path, "w") as file:
        json.dump({**machine, "results": [asdict(result) for result in results]}, file, indent=2)


if __name__ == "__main__":
    main()
