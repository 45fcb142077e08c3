"""Recall: a request whose KV is all in host memory, and whose next tokens see what of it matters to them.

    host pool        every token's keys and values
    device           | places: what was fetched, its own choice for each layer and KV head | recent tokens |
    sketches         a few numbers for every unit of tokens, for each layer and KV head; with them the device scores
                     what it does not have

Before a layer attends, units that score well and are not in a place are copied over those there that score worst. What
is in the places is attended to whether it was asked for now or earlier, so that a unit crosses once for all the steps
in a row that need it. A policy is its sketch: InfiniGen's is part of each key, Quest's the bounds of a block's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from pagoda.kernels import KVView, Recall
from pagoda.kv.allocator import BlockIds
from pagoda.sparse.host import HostPool

# Scores are logarithms: what takes another's place is looked at e^2 times as much. That brings a third of what would
# come without it, and choices are no worse for it, since what mattered lately matters more than one step's scores say.
_STAY = 2.0


class Sketch(Protocol):
    """What is kept of keys to score them by, against what is made of a query: their product is the score.

    Attributes:
        unit: tokens that are scored and fetched together.
        width: numbers kept for each unit.
        alpha: how far below the best score of a query a unit is still fetched.
    """

    unit: int
    width: int
    alpha: float

    def of_keys(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """From rotated keys `[num_kv_heads, units * unit, head_dim]`, `[num_kv_heads, units, width]`."""
        ...

    def columns(self, layer: int) -> torch.Tensor | None:
        """What rotated queries are multiplied by before they meet sketches: see Recall."""
        ...


class RecalledKV:
    """One request's KV in host memory, and which of it is on the device. Not thread-safe; `close` it.

    The first `places * unit` entries of the request's block table are the places; a unit's tokens lie there in order.

    Args:
        host: where the KV goes; its blocks are the request's until `close`.
        layers: those whose KV it is, as many as the host pool has.
        scale: what the model multiplies scores by.

    Attributes:
        num_tokens: tokens in host memory.
        num_units: units that are fetched from there; later tokens are on the device anyway.
        resident: per layer, the unit in each place, int64 `[num_kv_heads, places]`.
    """

    def __init__(self, sketch: Sketch, host: HostPool, layers: Sequence[int], scale: float) -> None:
        self.sketch = sketch
        self.num_tokens = 0
        self.num_units = 0
        self._host = host
        self._scale = scale
        self._slots = torch.empty(0, dtype=torch.int64)
        self._at = {layer: index for index, layer in enumerate(layers)}
        self._sketches: dict[int, torch.Tensor] = {}
        self._num_sketched = dict.fromkeys(layers, 0)
        self.resident: dict[int, torch.Tensor] = {}
        self._fetched = torch.zeros(len(layers), host.num_kv_heads, dtype=torch.int64)  # units
        self._num_counted = 0
        self._recalls: dict[int, Recall] = {}

    @property
    def num_sketch_bytes(self) -> int:
        """Bytes of sketches on the device, room for later tokens included."""
        return sum(each.nbytes for each in self._sketches.values())

    @property
    def num_fetched(self) -> int:
        """Pairs of token and KV head that were fetched, over all layers."""
        return int(self._fetched.sum()) * self.sketch.unit

    @property
    def num_fetched_bytes(self) -> int:
        """Bytes that came from host memory."""
        return self.num_fetched * self._host.bytes_per_entry

    def count(self) -> None:
        """Tell the host pool what was fetched since the last time."""
        so_far = self.num_fetched_bytes
        self._host.num_fetched_bytes += so_far - self._num_counted
        self._num_counted = so_far

    @property
    def num_host_bytes(self) -> int:
        """Bytes of host memory that the request holds."""
        return self._slots.numel() * self._host.bytes_per_token

    def reserve(self, num_tokens: int) -> None:
        """Make room in host memory for so many tokens in all.

        Raises:
            OutOfBlocks: there is none; nothing changed.
        """
        missing = num_tokens - self._slots.numel()
        if missing > 0:
            self._slots = torch.cat([self._slots, self._host.allocate(missing)])

    def append(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store a layer's keys and values `[num_kv_heads, n, head_dim]` of the tokens from `start` on, and sketch them.

        All tokens before have been stored, and there is room for these.
        """
        self._recalls.pop(layer, None)
        stop = start + keys.shape[1]
        self._host.write(self._at[layer], self._slots[start:stop], keys, values)
        self.num_tokens = stop
        unit, first = self.sketch.unit, self._num_sketched[layer]
        last = stop // unit
        if last > first:
            whole = self._host.keys(self._at[layer], self._slots[first * unit : last * unit]).to(keys.device)
            new = self.sketch.of_keys(layer, whole).to(keys.dtype)
            if layer not in self._sketches:
                self._sketches[layer] = new.new_empty(new.shape[0], new.shape[2], self._slots.numel() // unit)
            self._sketches[layer][:, :, first:last] = new.mT
            self._num_sketched[layer] = last

    def place(self, units: torch.Tensor) -> None:
        """Say which units are in the places of every layer, int64 `[num_kv_heads, places]`."""
        self.resident = {layer: units.clone(memory_format=torch.contiguous_format) for layer in self._at}
        self._recalls.clear()

    def settle(self, num_units: int) -> None:
        """Say how many units are fetched from host memory, and no longer on the device anyway."""
        self.num_units = num_units
        self._recalls.clear()

    def recall(self, layer: int, view: KVView, table: BlockIds) -> Recall:
        """What may be fetched into a layer's places now.

        Args:
            view: the layer's keys and values in the pool.
            table: the request's block ids, those of the places first, which are the same until `settle`.
        """
        if layer not in self._recalls:
            self._recalls[layer] = Recall(
                sketches=self._sketches[layer][:, :, : self.num_units],
                columns=self.sketch.columns(layer),
                scale=self._scale,
                resident=self.resident[layer],
                fetched=self._fetched[self._at[layer]],
                entries=self._host.entries(self._at[layer]),
                slots=self._slots[: self.num_units * self.sketch.unit],
                view=view,
                table=torch.from_numpy(table.copy()).to(view.keys.device),
                unit=self.sketch.unit,
                alpha=self.sketch.alpha,
                stay=_STAY,
            )
        return self._recalls[layer]

    def close(self) -> None:
        """Give the host memory back."""
        self.count()
        self._host.free(self._slots)
        self._slots = self._slots[:0]
        self._sketches, self._recalls = {}, {}
