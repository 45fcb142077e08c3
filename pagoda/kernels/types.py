"""What the kernels take and return besides plain tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class KVView:
    """One layer's keys and values in the pool; owns nothing.

    Both are `[num_blocks, num_kv_heads, block_size, head_dim]` with any strides, the last dimension contiguous. The
    block stride is usually far larger than a block of this layer, since a block holds all layers.
    """

    keys: torch.Tensor
    values: torch.Tensor


class SharedPrefix(NamedTuple):
    """Adjacent requests of a batch whose block tables start with the same `num_blocks` blocks."""

    first_request: int
    num_requests: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """What attention computed.

    Attributes:
        out: `[num_rows, num_heads, head_dim]`, in the dtype of the queries.
        lse: natural log of each row's softmax denominator, float32 `[num_rows, num_heads]`, if asked for.
        mass: probability that each KV entry received, summed over the request's rows and over the query heads of each
            KV head, float32 `[num_requests, num_kv_heads, max_context]` (zero past a request's context), if asked for.
    """

    out: torch.Tensor
    lse: torch.Tensor | None = None
    mass: torch.Tensor | None = None
