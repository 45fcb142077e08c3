"""How near the kernels come to the machine: attention and linear against memory speed and torch.

Every figure is the median over rounds in which the candidates take turns, so that a noisy minute hurts all alike. Data
that a real step would find cold (weights, KV) is cycled through more memory than the caches hold.

    python -m benchmarks.kernels --help
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.thin import attention_decoder, step_batch
from pagoda import kernels
from pagoda.kernels import CompactMatrix, FirstTokens, Int8Matrix, KVView, Staging, backend_name
from pagoda.kv.formats import default_block_size, parse_format
from pagoda.kv.layout import KVLayout
from pagoda.kv.pool import BlockPool

CACHE_BYTES = 600 << 20  # more than a last-level cache
BLOCK_SIZE = 16


def medians(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds per call of each candidate."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for step in range(rounds + 1):
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            if step:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def in_pairs(first: Callable[[], object], second: Callable[[], object], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each call, the two side by side in time; every other round begins with the second."""
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(-1, rounds):
        for of in (0, 1) if step % 2 else (1, 0):
            start = time.perf_counter()
            (first, second)[of]()
            if step >= 0:
                times[of].append(time.perf_counter() - start)
    return times


def cycle(count: int) -> Iterator[int]:
    while True:
        yield from range(count)


def bench_memory(rounds: int) -> None:
    buffer = torch.zeros(CACHE_BYTES // 4)
    target = torch.empty_like(buffer)
    result = medians({"read": buffer.sum, "copy": lambda: target.copy_(buffer)}, rounds)
    size = buffer.numel() * 4
    print(
        f"memory       read {size / result['read'] / 1e9:6.1f} GB/s    copy {2 * size / result['copy'] / 1e9:6.1f} GB/s"
    )


def bench_linear(num_in: int, num_out: int, rounds: int) -> None:
    size = num_in * num_out * 2
    weights = [torch.randn(num_out, num_in).bfloat16() for _ in range(max(1, CACHE_BYTES // size))]
    codes = [Int8Matrix.quantize(weight) for weight in weights]
    compact = [CompactMatrix.of(weight) or weight for weight in weights]
    for rows in (1, 2, 4, 8, 16, 32, 64, 512):
        x = torch.randn(rows, num_in).bfloat16()
        turns = [cycle(len(weights)) for _ in range(4)]
        candidates: dict[str, Callable[[], object]] = {
            "torch": lambda x=x, turn=turns[0]: F.linear(x, weights[next(turn)]),  # type: ignore[misc]
        }
        if backend_name() == "native":
            from pagoda.kernels import native

            candidates["native"] = lambda x=x, turn=turns[1]: native.linear_few_rows(x, weights[next(turn)], None)  # type: ignore[misc]
            candidates["compact"] = lambda x=x, turn=turns[3]: native.linear_few_rows(x, compact[next(turn)], None)  # type: ignore[misc]
            candidates["int8"] = lambda x=x, turn=turns[2]: native.linear_few_rows(x, codes[next(turn)], None)  # type: ignore[misc]
        result = medians(candidates, rounds)
        # All in bytes of BF16 weights, so that figures compare.
        figures = "    ".join(f"{name} {size / seconds / 1e9:6.1f} GB/s" for name, seconds in result.items())
        print(f"linear       {rows:3} rows x [{num_out}, {num_in}]    {figures}")


def bench_decode(num_kv_heads: int, group: int, head_dim: int, context: int, requests: int, rounds: int) -> None:
    """One layer's decode attention; each call reads another layer of the pool, as a step does."""
    per_layer = requests * context * num_kv_heads * head_dim * 2 * 2
    layers = max(1, CACHE_BYTES // per_layer)
    blocks = requests * context // BLOCK_SIZE
    pool = torch.randn(blocks, layers, 2, num_kv_heads, BLOCK_SIZE, head_dim, dtype=torch.bfloat16)
    q = torch.randn(requests, num_kv_heads * group, head_dim).bfloat16()
    table = torch.randperm(blocks).to(torch.int32).view(requests, -1)
    starts = torch.arange(requests + 1, dtype=torch.int32)
    lens = torch.full((requests,), context, dtype=torch.int32)
    turn = cycle(layers)

    def attend() -> object:
        layer = pool[:, next(turn)]
        view = KVView(layer[:, 0], layer[:, 1])
        return kernels.paged_attention(q, view, table, starts, lens, scale=head_dim**-0.5)

    seconds = medians({"attend": attend}, rounds)["attend"]
    print(
        f"decode       {requests:3} x {context} entries, {num_kv_heads} x {group} heads of {head_dim}    "
        f"{seconds * 1e6:8.0f} us    {per_layer / seconds / 1e9:6.1f} GB/s of KV"
    )


def filled_views(kv_format: str, num_kv_heads: int, head_dim: int, context: int, block_size: int) -> list[KVView]:
    """Layers of a pool that the caches cannot hold, of random tokens in block order."""
    spec = parse_format(kv_format).attention(num_kv_heads, head_dim, block_size, None, "bfloat16")
    blocks = context // block_size
    num_layers = CACHE_BYTES // (KVLayout([spec], block_size).block_bytes * blocks) + 1
    pool = BlockPool(KVLayout([spec] * num_layers, block_size), blocks)
    staging = None
    if spec.staged:
        full = torch.zeros(2, blocks, num_kv_heads, block_size, head_dim, dtype=torch.bfloat16)
        firsts = FirstTokens(full[0, :1, :, :1], full[1, :1, :, :1], torch.zeros(blocks, dtype=torch.int32))
        staging = Staging(full[0], full[1], torch.arange(blocks, dtype=torch.int32), firsts)
    k, v = torch.randn(2, context, num_kv_heads, head_dim).bfloat16()
    views = []
    for layer in range(num_layers):
        view = KVView.of({part.name: pool.view(layer, part.name) for part in spec.parts}, staging)
        kernels.write_kv(view, k, v, torch.arange(context))
        views.append(view)
    return views


def bench_formats(
    num_kv_heads: int,
    group: int,
    head_dim: int,
    context: int,
    rounds: int,
    block_size: int | None = None,
    requests: int = 1,
) -> dict[str, float]:
    """A layer's decode attention in every KV format, in the decoder, as times the speed of BF16's.

    The median of the ratios of neighbouring steps, printed with their quartiles: minutes change times, not ratios.

    Args:
        block_size: None: of each format what an engine takes that was told nothing.
        requests: decoded together, each with a context of its own.
    """

    def attend(name: str) -> tuple[Callable[[], object], int]:
        size = default_block_size(name) if block_size is None else block_size
        blocks = requests * (context // size + 1)  # one more, for the token that is decoded
        views = filled_views(name, num_kv_heads, head_dim, blocks * size, size)
        decoder = attention_decoder(num_kv_heads, group, head_dim, len(views), context + 1)
        batch = step_batch(torch.randperm(blocks).to(torch.int32).view(requests, -1), size, context, 1)
        return lambda: decoder.forward(batch, views, (0,) * len(views)), len(views)

    plain, plain_layers = attend("bf16")
    speeds = {}
    for name in ("int8", "fp8_e4m3", "fp8_e5m2", "int8/int4", "int4/int8", "int4"):
        coded, layers = attend(name)
        steps = in_pairs(plain, coded, rounds)
        before, after = [s / plain_layers for s in steps[0]], [s / layers for s in steps[1]]
        low, speeds[name], high = statistics.quantiles((x / y for x, y in zip(before, after, strict=True)), n=4)
        print(
            f"formats      {requests} x {context} entries, {num_kv_heads} x {group} heads of {head_dim}    "
            f"bf16 {statistics.median(before) * 1e6:6.0f} us    {name} {statistics.median(after) * 1e6:6.0f} us    "
            f"{speeds[name]:5.2f}x ({low:.2f} to {high:.2f})"
        )
    return speeds


def bench_prefill(num_kv_heads: int, group: int, head_dim: int, tokens: int, rounds: int) -> None:
    blocks = tokens // BLOCK_SIZE
    pool = torch.randn(blocks, 2, num_kv_heads, BLOCK_SIZE, head_dim).bfloat16()
    view = KVView(pool[:, 0], pool[:, 1])
    q = torch.randn(tokens, num_kv_heads * group, head_dim).bfloat16()
    table = torch.arange(blocks, dtype=torch.int32)[None]
    starts, lens = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    dense_q, dense_k, dense_v = torch.randn(3, 1, num_kv_heads * group, tokens, head_dim).bfloat16()
    result = medians(
        {
            "paged": lambda: kernels.paged_attention(q, view, table, starts, lens, scale=head_dim**-0.5),
            "torch, dense": lambda: F.scaled_dot_product_attention(dense_q, dense_k, dense_v, is_causal=True),
        },
        rounds,
    )
    operations = 2 * tokens * tokens * head_dim * num_kv_heads * group
    figures = "    ".join(f"{name} {s * 1e3:7.2f} ms {operations / s / 1e9:6.0f} GFLOP/s" for name, s in result.items())
    print(f"prefill      {tokens} tokens, {num_kv_heads} x {group} heads of {head_dim}    {figures}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed calls of each candidate (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads (default: all CPUs)")
    parser.add_argument("--only", choices=["memory", "linear", "decode", "formats", "prefill"], help="run one part")
    parser.add_argument("--block-size", type=int, help="of formats' blocks (default: what engines take for each)")
    parser.add_argument("--requests", type=int, default=1, help="of a call of formats'; default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{backend_name()} kernels, {args.threads} threads")
    if args.only in (None, "memory"):
        bench_memory(args.rounds)
    if args.only in (None, "linear"):
        bench_linear(576, 3072, args.rounds)
        bench_linear(4096, 4096, args.rounds)
    if args.only in (None, "decode"):
        for num_kv_heads, group, head_dim in ((3, 3, 64), (8, 4, 128), (8, 8, 128), (16, 1, 64)):
            bench_decode(num_kv_heads, group, head_dim, 4096, 1, args.rounds)
        bench_decode(3, 3, 64, 1024, 8, args.rounds)
    if args.only in (None, "formats"):
        for num_kv_heads, group, head_dim in ((3, 3, 64), (8, 4, 128), (16, 1, 64)):
            bench_formats(num_kv_heads, group, head_dim, 8192, args.rounds, args.block_size, args.requests)
    if args.only in (None, "prefill"):
        bench_prefill(3, 3, 64, 2048, args.rounds)
        bench_prefill(8, 4, 128, 2048, args.rounds)


if __name__ == "__main__":
    main()
