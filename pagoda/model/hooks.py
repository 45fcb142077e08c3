"""LayerHook: how sparse attention, blending and adapters look into, and steer, the decoder's loop over layers.

qkv ── before_attention ── rotate and write KV ── attend ── after_attention ── project, MLP ── next layer
           │                                                     │
           └ which KV this layer writes and reads                └ which rows go on
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pagoda.kernels import AttentionOutput
from pagoda.model.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class Narrowed:
    """The rows that go on to the rest of the forward pass.

    `rows` (int64, increasing) index the current rows, and `batch` describes them alone: its `logits_rows` count the
    rows that are left. Rows of one request that are no longer adjacent become requests of their own, with one row each,
    so that every row keeps its own context length.
    """

    rows: torch.Tensor
    batch: ForwardBatch


class LayerHook(Protocol):
    """Called around every layer's attention; a hook that returns its input changes nothing."""

    @property
    def needs_mass(self) -> bool:
        """Whether attention must also return the probability mass that each cached token received."""
        ...

    def before_attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> ForwardBatch:
        """See a layer's queries, keys and values, each `[rows, heads, head_dim]`, not yet rotated or written.

        Copy what must outlast the call: `q` is rotated in place after it.

        Returns the batch that this layer alone writes and attends with: `batch`, or one with other block tables and
        lengths.
        """
        ...

    def after_attention(self, layer: int, batch: ForwardBatch, output: AttentionOutput) -> Narrowed | None:
        """See a layer's attention output; return the rows that go on, or None for all of them."""
        ...
