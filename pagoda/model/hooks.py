"""LayerHook: how sparse attention, blending and adapters look into, and steer, the decoder's loop over layers.

before_layer ── qkv ── before_attention ── rotate, write KV ── attend ── after_attention ── project, MLP ── next layer
     │                        │                                                 │
     └ looks ahead            └ which KV this layer writes and reads            └ which rows go on
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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

    @classmethod
    def to(cls, batch: ForwardBatch, keep: torch.Tensor) -> Narrowed:
        """Go on with the rows where `keep`, bool `[num_rows]`, is true: all whose logits are wanted must be among them.

        Each run of adjacent rows of a request becomes a request.
        """
        rows = keep.nonzero()[:, 0]
        counts = batch.query_start.diff()
        request = torch.arange(len(counts), device=rows.device).repeat_interleave(counts)[rows]
        is_first = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        is_first[1:] = (rows.diff() != 1) | (request.diff() != 0)
        first = is_first.nonzero()[:, 0]
        starts = torch.cat((first, first.new_tensor([len(rows)])))
        ends = starts[1:]
        of_run = request[first]
        # the last row of a request sees all its entries, each row before it one less
        unseen = batch.query_start[of_run + 1] - 1 - rows[ends - 1]
        place = keep.cumsum(0) - 1
        narrowed = ForwardBatch(
            token_ids=batch.token_ids[rows],
            positions=batch.positions[rows],
            query_start=starts.int(),
            context_lens=(batch.context_lens[of_run] - unseen).int(),
            block_tables=tuple(table[of_run] for table in batch.block_tables),
            slot_mapping=tuple(slots[rows] for slots in batch.slot_mapping),
            logits_rows=place[batch.logits_rows],
            max_query_len=max((ends - first).tolist(), default=0),
        )
        return cls(rows, narrowed)


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


@runtime_checkable
class LayerInputHook(LayerHook, Protocol):
    """A hook that also sees what each layer is given, before anything is made of it."""

    def before_layer(self, layer: int, residual: torch.Tensor, batch: ForwardBatch) -> None:
        """See a layer's input, the residual stream `[rows, hidden_size]`, before its norm.

        `Decoder.queries` says what this or a later layer would ask with it.
        """
        ...
