"""Which requests of a batch start with the same blocks, so that attention may read those once for all of them.

block tables            neighbours have in common
A  [ 7 | 2 | 5 | 9 ]     A, B: 3
B  [ 7 | 2 | 5 | 4 ]     B, C: 2          -> one prefix: A, B and C share blocks 7, 2
C  [ 7 | 2 | 8 ]         C, D: 0
D  [ 1 | 3 ]
"""

from __future__ import annotations

import numpy as np
import torch

from pagoda.kernels.types import SharedPrefix

_MIN_BLOCKS = 4  # below that, merging costs more than reading twice
_WORTH_SHORTENING = 0.5  # a request joins the ones before it if at least this share of their prefix remains


def find_shared_prefixes(
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    block_size: int,
    places: torch.Tensor | None = None,
) -> tuple[SharedPrefix, ...]:
    """Runs of adjacent requests with equal leading blocks, as `paged_attention` takes them. Mutates nothing.

    Only blocks that every row of the request comes after count. Requests that share blocks but are not adjacent are not
    found: a caller that has such requests sorts them first.

    Args:
        block_table: int32 `[num_requests, max_blocks]`, in CPU memory, as the next two.
        query_start: int32 `[num_requests + 1]`.
        context_lens: int32 `[num_requests]`.
        block_size: KV entries in a block.
        places: int32 `[num_rows]`, see `paged_attention`.
    """
    num_requests, max_blocks = block_table.shape
    if num_requests < 2 or max_blocks < _MIN_BLOCKS:
        return ()
    tables = block_table.numpy()
    if not (tables[1:, _MIN_BLOCKS - 1] == tables[:-1, _MIN_BLOCKS - 1]).any():
        return ()
    counts = np.diff(query_start.numpy())
    first_places = context_lens.numpy() - counts
    if places is not None:
        first_places[counts > 0] = places.numpy()[query_start.numpy()[:-1][counts > 0]]
    before = first_places // block_size
    differs = tables[1:] != tables[:-1]
    common = np.where(differs.any(axis=1), differs.argmax(axis=1), max_blocks)
    common = np.minimum(common, np.minimum(before[1:], before[:-1])).tolist()
    found, first = [], 0
    while first < num_requests - 1:
        num_blocks, last = common[first], first + 1
        if num_blocks < _MIN_BLOCKS:
            first += 1
            continue
        while last < num_requests - 1 and common[last] >= max(_MIN_BLOCKS, _WORTH_SHORTENING * num_blocks):
            num_blocks = min(num_blocks, common[last])
            last += 1
        found.append(SharedPrefix(first, last - first + 1, num_blocks))
        first = last + 1
    return tuple(found)
