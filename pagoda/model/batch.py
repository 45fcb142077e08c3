"""ForwardBatch: the ragged rows that one forward pass computes.

    requests       A (3 new tokens)   B (1)   C (2)
    token_ids      a5 a6 a7           b9      c0 c1          one row per new token
    positions      5  6  7            9       0  1           RoPE positions
    query_start    0        3     4       6                  row range of each request
    context_lens   8                  10      2              KV entries of each request, the new ones included
    block_tables   one int32 row of block ids per request, for each layer group
    slot_mapping   where each row's K and V are written: block_id * block_size + offset, for each layer group
    logits_rows    2  3  5                                   the rows that need logits

Rows of one request are neighbours, in order of position, and the last tokens of its context: unless some were left out
(Narrowed), and `places` says which entry of its context each row is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's input, on the model's device. Immutable; built by the engine's runner.

    Attributes:
        token_ids: int64 `[num_rows]`.
        positions: int64 `[num_rows]`, rotary positions.
        query_start: int32 `[num_requests + 1]`, row offsets.
        context_lens: int32 `[num_requests]`; the last of a request's rows sees exactly this many KV entries.
        block_tables: per layer group, int32 `[num_requests, max_blocks]`. Entries past a request's length, and of
            blocks that slid out of the group's window, are any valid block id and are never read.
        slot_mapping: per layer group, int64 `[num_rows]`.
        logits_rows: int64 `[num_logits]`.
        places: int32 `[num_rows]`, each row's KV entry among its request's; None: they are its last ones.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slot_mapping: tuple[torch.Tensor, ...]
    logits_rows: torch.Tensor
    places: torch.Tensor | None = None
