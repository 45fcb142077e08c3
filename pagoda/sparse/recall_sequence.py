"""RecallingSequence: one request whose KV goes to host memory, and comes back for the step that needs it.

    entries of a layer
       ^                     /|    /|    /|    /|   budget
       |  prompt, exact  /    |  /  |  /  |  /  |
       |             /        |/    |/    |/    |   places + recent
       |         /            '     '     '     '
       +-----/----------------------------------------> tokens computed

At the end of a prompt that is larger than the budget all its KV is copied to host memory, and what is left in the pool
becomes places and recent tokens (see recall.py). Tokens that are decoded stay in the pool until they are no longer
recent, which is settled for many at a time: only then they are copied to host memory. The prompt itself is computed
exactly, and needs its room in the pool until then.
"""

from __future__ import annotations

import sys
from copy import copy
from dataclasses import replace
from typing import Self

import numpy as np
import torch

from pagoda.kernels import Recall, recall_entries
from pagoda.kv.allocator import BlockIds
from pagoda.kv.cache import KVCache
from pagoda.kv.lease import Lease
from pagoda.sparse.base import Place
from pagoda.sparse.host import RecallMemory
from pagoda.sparse.recall import RecalledKV, Sketch
from pagoda.sparse.report import SparseReport
from pagoda.sparse.store import SparseMemory

# In lower layers the residual stream still changes a lot: they go by their own queries. What was foretold for SmolLM2's
# layers 1 and 2 had 76% of their attention, what their own queries found 88%; later it made a difference of 1%.
_FIRST_AHEAD = 3


class RecallingSequence:
    """See SparseSequence.

    Args:
        name: the policy's.
        sketch: how what is not on the device is scored.
        budget: most entries of a layer in the pool, once the prompt is computed.
        recent: last tokens that always stay.
        places: entries for what is fetched, a multiple of the sketch's unit.
        ahead: each layer's needs are foretold from the input of the layer before.
    """

    rotary_offset = 0
    hit_limit = sys.maxsize

    def __init__(
        self,
        name: str,
        sketch: Sketch,
        *,
        num_prompt: int,
        num_total: int,
        budget: int,
        recent: int,
        places: int,
        ahead: bool,
        cache: KVCache,
        memory: SparseMemory,
        recall: RecallMemory,
    ) -> None:
        self._sketch = sketch
        self._num_prompt, self._num_total = num_prompt, num_total
        self._budget, self._recent, self._places, self._ahead = budget, recent, places, ahead
        self._cache, self._memory, self._recall = cache, memory, recall
        self._layers = frozenset(memory.full_layers)
        self._kv: RecalledKV | None = None
        self._num_dropped = 0
        self._report = SparseReport(name, 0, 0, 0, 0, 0, 0)

    @property
    def report(self) -> SparseReport:
        """See SparseSequence."""
        if self._kv is None:
            return self._report
        return replace(
            self._report,
            host_bytes=self._kv.num_host_bytes,
            sketch_bytes=self._kv.num_sketch_bytes,
            fetched_bytes=self._kv.num_fetched_bytes,
        )

    def limit(self, start: int) -> int:
        """See SparseSequence. After the prompt every row has needs of its own."""
        return self._num_prompt - start if start < self._num_prompt else 1

    def uses_hook(self, start: int, stop: int) -> bool:
        """See SparseSequence."""
        return self._kv is not None

    def wants_mass(self, start: int, stop: int) -> bool:
        """See SparseSequence."""
        return False

    # -- memory ------------------------------------------------------------------------------------------------------

    def make_room(self, lease: Lease) -> None:
        """See SparseSequence."""
        if self._kv is not None:
            self._kv.count()
        num_computed = lease.num_computed_tokens
        if num_computed < self._num_prompt or num_computed - self._num_dropped < self._budget:
            return
        kv = self._kv or self._opened()
        self._copy_to_host(kv, lease)
        num_units = (num_computed - self._recent) // self._sketch.unit
        keep = self._entries_to_keep(kv, num_units, num_computed)
        groups = self._memory.layout.groups

        def move(group: int, old: BlockIds, new: BlockIds) -> None:
            # Later compactions find the places where they were; only recent tokens move up.
            stay = self._places if kv.num_units and np.array_equal(old[: new.size], new) else 0
            for layer in groups[group].layers:
                self._memory.move(layer, old, new, keep[:, stay:], first=stay)

        before = lease.num_blocks
        try:
            self._cache.compact(lease, [None if each.window else keep.shape[1] for each in groups], move)
        except BaseException:
            if self._kv is None:
                kv.close()
            raise
        self._kv = kv
        kv.settle(num_units)
        self._num_dropped = num_computed - keep.shape[1]
        self._note(lease, before - lease.num_blocks, keep.shape[1])

    def _opened(self) -> RecalledKV:
        """Host memory, what will be decoded included: nothing may be lost later."""
        kv = RecalledKV(self._sketch, self._recall.host, self._memory.full_layers, self._recall.scale)
        kv.reserve(self._num_total)
        return kv

    def _copy_to_host(self, kv: RecalledKV, lease: Lease) -> None:
        """Copy what was computed since the last time."""
        memory, first = self._memory, kv.num_tokens
        new = torch.arange(first - self._num_dropped, lease.num_computed_tokens - self._num_dropped)
        for layer in self._layers:
            table = lease.tables[memory.layout.group_of_layer[layer]].ids
            entries = new.expand(memory.views[layer].keys.shape[1], -1)
            kv.append(layer, first, memory.keys(layer, table, entries), memory.values(layer, table, entries))

    def _entries_to_keep(self, kv: RecalledKV, num_units: int, num_computed: int) -> torch.Tensor:
        """Places, then recent tokens. At first the places have the first unit and the last ones that are not recent."""
        num_heads, unit = self._memory.views[0].keys.shape[1], self._sketch.unit
        if kv.num_units:
            places = torch.arange(self._places)
        else:
            units = torch.arange(num_units - self._places // unit, num_units)
            units[0] = 0
            places = (units[:, None] * unit + torch.arange(unit)).flatten()
            kv.place(units.expand(num_heads, -1))
        recent = torch.arange(num_units * unit - self._num_dropped, num_computed - self._num_dropped)
        return torch.cat([places, recent]).expand(num_heads, -1)

    def _note(self, lease: Lease, num_returned: int, num_entries: int) -> None:
        last = self._report
        self._report = replace(
            last,
            num_compactions=last.num_compactions + 1,
            num_kept_tokens=num_entries,
            num_blocks=lease.num_blocks,
            num_returned_blocks=last.num_returned_blocks + num_returned,
            returned_bytes=last.returned_bytes + num_returned * self._memory.layout.pool_block_bytes,
        )

    def fork(self, lease: Lease) -> Self:
        """See SparseSequence."""
        assert self._kv is None, "a prompt's KV is in the pool until its first sample goes on"
        return copy(self)

    def forget(self, lease: Lease) -> None:
        """See SparseSequence."""
        if self._kv is not None:
            self._report = self.report
            self._kv.close()
        self._kv, self._num_dropped = None, 0

    # -- a step ------------------------------------------------------------------------------------------------------

    def before_layer(self, layer: int, residual: torch.Tensor, lease: Lease, start: int) -> None:
        """Fetch what the next layer will need, if that can be foretold; its input is that of LayerInputHook."""
        ahead = layer + 1
        if self.is_foretold(ahead) and (recall := self.recall(ahead, lease)) is not None:
            queries = self._recall.queries(ahead, residual, torch.tensor([start], device=residual.device))
            recall_entries(queries[0], recall)

    def before_attention(self, layer: int, q: torch.Tensor, lease: Lease, start: int) -> None:
        """Fetch what the layer needs, if that was not foretold: `q` are its queries `[1, num_heads, head_dim]`."""
        if not self.is_foretold(layer) and (recall := self.recall(layer, lease)) is not None:
            recall_entries(self._recall.rotated(layer, q, torch.tensor([start], device=q.device))[0], recall)

    def is_foretold(self, layer: int) -> bool:
        """Whether a layer's needs are made of the input of the layer before it, not of its own queries."""
        return self._ahead and layer >= _FIRST_AHEAD

    def recall(self, layer: int, lease: Lease) -> Recall | None:
        """What may be fetched in a layer; None where all is on the device."""
        if self._kv is None or layer not in self._layers:
            return None
        table = lease.tables[self._memory.layout.group_of_layer[layer]]
        return self._kv.recall(layer, self._memory.views[layer], table.ids)

    def place(self, layer: int, lease: Lease, start: int, stop: int) -> Place | None:
        """See SparseSequence. The batch counts what layers of the first group see; others may see another number."""
        table = lease.tables[self._memory.layout.group_of_layer[layer]]
        if table.num_dropped == lease.tables[0].num_dropped:
            return None
        return Place(stop - table.num_dropped, table.slots(start, stop))

    def after_attention(self, layer: int, mass: torch.Tensor, start: int, stop: int) -> None:
        """See SparseSequence. Nothing is looked at."""
