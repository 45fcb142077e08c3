"""Random paged batches in a pool whose every byte that nobody may read is NaN.

pool bytes   | poison | layer's keys | poison | layer's values | poison |   per block, the stride padded
blocks       those of the requests, shuffled; all others are poison, and so are the slots past each context
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagoda.kernels import KVView, SharedPrefix

PAD = 24  # elements around each part of a block


@dataclass(frozen=True)
class PagedBatch:
    pool: torch.Tensor
    view: KVView
    block_table: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    q: torch.Tensor

    def widened(self) -> PagedBatch:
        """The same numbers in float32, for the oracle."""
        view = KVView(self.view.keys.float(), self.view.values.float())
        return PagedBatch(self.pool, view, self.block_table, self.query_start, self.context_lens, self.q.float())


def make_view(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, KVView]:
    """A pool full of NaN, and the view of one layer in it."""
    part = num_kv_heads * block_size * head_dim
    stride = 2 * part + 3 * PAD
    pool = torch.full((num_blocks, stride), torch.nan, dtype=dtype)
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    strides = (stride, block_size * head_dim, head_dim, 1)
    return pool, KVView(pool.as_strided(shape, strides, PAD), pool.as_strided(shape, strides, part + 2 * PAD))


def make_batch(
    lens: list[tuple[int, int]],
    *,
    num_kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    shared: tuple[SharedPrefix, ...] = (),
    seed: int = 0,
) -> PagedBatch:
    """Requests of (context_len, query_len); those under one shared prefix start with the first one's blocks."""
    generator = torch.Generator().manual_seed(seed)
    blocks_of = [-(-context // block_size) for context, _ in lens]
    num_blocks = sum(blocks_of) + 3
    pool, view = make_view(num_blocks, num_kv_heads, block_size, head_dim, dtype)
    ids = torch.randperm(num_blocks, generator=generator).tolist()
    # Entries that must not be followed lead far outside the pool.
    table = torch.full((len(lens), max(blocks_of, default=0) + 2), 2**31 - 1, dtype=torch.int32)
    for request, (context, query_len) in enumerate(lens):
        first = 0 if window is None else max(0, context - query_len - window + 1)
        for start, count, num_shared in shared:
            if start < request < start + count:
                table[request, :num_shared] = table[start, :num_shared]
                first = num_shared * block_size
        for j in range(context if query_len else 0):
            index = j // block_size
            if index < first // block_size:
                continue
            if table[request, index] == 2**31 - 1:
                table[request, index] = ids.pop()
            if j < first:
                continue  # written once, out of the window now: the slot stays poison
            for part in (view.keys, view.values):
                value = torch.randn(num_kv_heads, head_dim, generator=generator)
                part[int(table[request, index]), :, j % block_size] = value.to(dtype)
    query_lens = torch.tensor([0] + [query_len for _, query_len in lens])
    num_heads = num_kv_heads * group
    rows = int(query_lens.sum())
    # Rows of a wider tensor, as the queries in a fused qkv projection are.
    wide = torch.randn(rows, num_heads + 2, head_dim, generator=generator).to(dtype)
    return PagedBatch(
        pool,
        view,
        table,
        query_lens.cumsum(0).to(torch.int32),
        torch.tensor([context for context, _ in lens], dtype=torch.int32),
        wide[:, 1:-1],
    )
