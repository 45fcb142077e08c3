"""What looks into the decoder's loop over layers, and steers it: LayerHook (sparse attention), Narrowing (blending).

before_layer ── qkv ── before_attention ── rotate, write KV ── narrow ── attend ── after_attention ── project, MLP
     │                        │                                   │                      │
     └ looks ahead            └ which KV the layer writes, reads  │                      └ sees the attention
                                                                  └ at one layer: which rows go on

A hook is called at every layer, unless it can say before the first one what it will do in all of them (SteeringHook):
then one native call runs them. A narrowing is called once, so that the layers before it and those after it may still
run in one native call each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from pagoda.kernels import AttentionOutput, Steering
from pagoda.model.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class Narrowed:
    """The rows that go on to the rest of the forward pass.

    `rows` (int64, increasing) index the current rows, and `batch` describes them alone: its `logits_rows` count the
    rows that are left, and its `places` say where in its context each is.
    """

    rows: torch.Tensor
    batch: ForwardBatch

    @classmethod
    def to(cls, batch: ForwardBatch, keep: torch.Tensor) -> Narrowed:
        """Go on with the rows where `keep`, bool `[num_rows]`, is true: all whose logits are wanted must be among them.

        A request that keeps no row stays, without any.
        """
        rows = keep.nonzero()[:, 0]
        kept_before = torch.cat((keep.new_zeros(1, dtype=torch.int64), keep.cumsum(0)))
        query_start = kept_before[batch.query_start]
        places = batch.places
        if places is None:
            counts = batch.query_start.diff()
            last_row_to_end = (batch.context_lens - batch.query_start[1:]).repeat_interleave(counts)
            places = torch.arange(len(keep), dtype=torch.int32, device=keep.device) + last_row_to_end
        narrowed = replace(
            batch,
            token_ids=batch.token_ids[rows],
            positions=batch.positions[rows],
            query_start=query_start.int(),
            slot_mapping=tuple(slots[rows] for slots in batch.slot_mapping),
            logits_rows=kept_before[batch.logits_rows],
            places=places[rows],
        )
        return cls(rows, narrowed)


class Narrowing(Protocol):
    """Drops rows from a pass, once, when it can be seen at `layer` which of them are not needed."""

    @property
    def layer(self) -> int:
        """The layer at which it is asked."""
        ...

    def narrow(self, batch: ForwardBatch) -> Narrowed:
        """Say which rows go on: K and V of `layer` and of those below are written for all rows of `batch`.

        The rows that go on are computed from this layer's attention on, and read what the pool has for the others.
        """
        ...


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

    def after_attention(self, layer: int, batch: ForwardBatch, output: AttentionOutput) -> None:
        """See a layer's attention output."""
        ...


@runtime_checkable
class LayerInputHook(LayerHook, Protocol):
    """A hook that also sees what each layer is given, before anything is made of it."""

    def before_layer(self, layer: int, residual: torch.Tensor, batch: ForwardBatch) -> None:
        """See a layer's input, the residual stream `[rows, hidden_size]`, before its norm.

        `Decoder.queries` says what this or a later layer would ask with it.
        """
        ...


@runtime_checkable
class SteeringHook(LayerHook, Protocol):
    """A hook that knows what it does in every layer before the first one, so that it need not be called in each."""

    def steering(self, batch: ForwardBatch) -> Steering | None:
        """What the layers do otherwise than `batch` says; None: the hook must be called in each."""
        ...

    def after_layers(self, batch: ForwardBatch, mass: torch.Tensor) -> None:
        """See the attention mass of the requests that steering named, `[num_layers, requests, num_kv_heads, n]`."""
        ...
