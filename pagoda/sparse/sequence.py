"""DroppingSequence: one request under a policy that drops entries: what is left of it, and when it is compressed."""

from __future__ import annotations

import sys
from copy import copy
from typing import Self

import numpy as np
import torch

from pagoda.errors import OutOfBlocks
from pagoda.kv.allocator import BlockIds
from pagoda.kv.cache import KVCache
from pagoda.kv.lease import Lease
from pagoda.sparse.base import Place
from pagoda.sparse.choosing import Choosing
from pagoda.sparse.report import SparseReport
from pagoda.sparse.store import SparseMemory


class DroppingSequence:
    """See SparseSequence.

    Args:
        policy: chooses.
        num_prompt: tokens of the prompt; those after it are output.
        exact: nothing is dropped before the prompt is computed.
    """

    def __init__(self, policy: Choosing, num_prompt: int, cache: KVCache, memory: SparseMemory, *, exact: bool) -> None:
        self.rotary_offset = 0
        self._policy = policy
        self._num_prompt = num_prompt
        self._cache = cache
        self._memory = memory
        self._exact = exact
        self._observed = policy.observed(num_prompt)
        # What follows the prompt is computed from what is kept of it; and where memory is bounded, what is hit beyond
        # the budget would be dropped before anything was seen of it.
        seen_from = self._observed.start or max(0, num_prompt - policy.least_observed)
        self.hit_limit = seen_from if exact else min(seen_from, policy.num_tokens)
        self._layers = memory.full_layers
        self._at = 0  # tokens computed when it was compressed last
        self._positions: dict[int, torch.Tensor] = {}  # of what was kept then, int64 [num_kv_heads, kept]
        self._mass: dict[int, torch.Tensor] = {}
        self._sinks: dict[int, torch.Tensor] = {}  # keys of packed entries as at position 0, float32
        self.report = SparseReport(policy.name, 0, 0, 0, 0, 0, 0)

    # -- when --------------------------------------------------------------------------------------------------------

    def limit(self, start: int) -> int:
        """See SparseSequence."""
        most = sys.maxsize
        if start >= self._num_prompt or not self._exact:
            most = self._limit_entries - (self._policy.num_tokens if self._is_due(start) else self._num_entries(start))
        for end in (self._num_prompt, self._observed.start):
            if start < end:
                most = min(most, end - start)
        return most

    @property
    def _limit_entries(self) -> int:
        return self._policy.num_tokens + self._policy.num_between if self._policy.compresses_output else sys.maxsize

    def _is_due(self, num_computed: int) -> bool:
        if num_computed < self._num_prompt and self._exact:
            return False
        entries = self._num_entries(num_computed)
        if num_computed == self._num_prompt and self._at < num_computed:
            return entries > self._policy.num_tokens
        return entries >= self._limit_entries

    def _num_entries(self, num_computed: int) -> int:
        """Of the layer that has most."""
        return num_computed - self._at + max((kept.shape[1] for kept in self._positions.values()), default=self._at)

    # -- what is seen ------------------------------------------------------------------------------------------------

    def wants_mass(self, start: int, stop: int) -> bool:
        """See SparseSequence."""
        return self._observed.start < stop and start < self._observed.stop

    def uses_hook(self, start: int, stop: int) -> bool:
        """See SparseSequence."""
        return self.wants_mass(start, stop) or self._is_uneven

    @property
    def _is_uneven(self) -> bool:
        """Whether layers have different numbers of entries."""
        lengths = {kept.shape[1] for kept in self._positions.values()}
        return len(lengths) > 1 or (bool(lengths) and len(self._layers) < len(self._memory.layout.layers))

    def place(self, layer: int, lease: Lease, start: int, stop: int) -> Place | None:
        """See SparseSequence."""
        kept = self._positions.get(layer)
        dropped = 0 if kept is None else self._at - kept.shape[1]
        if dropped == lease.tables[0].num_dropped:
            return None
        table = lease.tables[self._memory.layout.group_of_layer[layer]]
        shift = dropped - table.num_dropped
        return Place(stop - dropped, table.slots(start - shift, stop - shift))

    def after_attention(self, layer: int, mass: torch.Tensor, start: int, stop: int) -> None:
        """See SparseSequence."""
        if layer not in self._layers:
            return
        total = mass.to("cpu", copy=True)
        if (before := self._mass.get(layer)) is not None:
            total[:, : before.shape[1]] += before
        self._mass[layer] = total

    # -- compression -------------------------------------------------------------------------------------------------

    def make_room(self, lease: Lease) -> None:
        """See SparseSequence."""
        if self._is_due(lease.num_computed_tokens):
            self._compress(lease)

    def compress(self, lease: Lease, num_tokens: int) -> None:
        """Have a budget of at most so many tokens, as few as the policy allows, and drop now what is beyond it.

        The prompt must be computed.

        Raises:
            OutOfBlocks: there are not enough blocks to copy to; nothing changed.
        """
        before = self._policy
        self._policy = before.with_budget(max(before.least_budget, min(num_tokens, before.num_tokens)))
        if self._num_entries(lease.num_computed_tokens) > self._policy.num_tokens:
            try:
                self._compress(lease)
            except OutOfBlocks:
                self._policy = before
                raise

    def _compress(self, lease: Lease) -> None:
        num_computed = lease.num_computed_tokens
        keep: dict[int, torch.Tensor] = {}
        positions: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._layers):
            held = self._held(layer, num_computed)
            count = min(self._policy.layer_budget(index, len(self._layers)), held.shape[1])
            keep[layer] = self._policy.select(held, self._mass_of(layer, held), count)
            positions[layer] = held.gather(1, keep[layer])
        groups = self._memory.layout.groups
        counts = [None if each.window else max(keep[layer].shape[1] for layer in each.layers) for each in groups]

        def move(group: int, old: BlockIds, new: BlockIds) -> None:
            for layer in groups[group].layers:
                self._memory.move(layer, old, new, keep[layer])

        before = lease.num_blocks
        if not self._positions and self._policy.packs_positions:
            self._remember_sinks(lease)
        self._cache.compact(lease, counts, move)
        self._mass = {layer: mass.gather(1, keep[layer]) for layer, mass in self._padded_mass(num_computed).items()}
        self._positions, self._at = positions, num_computed
        if self._policy.packs_positions:
            self._pack(lease)
        self._note(lease, before)

    def _held(self, layer: int, num_computed: int) -> torch.Tensor:
        """The token of each entry."""
        kept = self._positions.get(layer)
        num_heads = self._memory.views[layer].keys.shape[1]
        new = torch.arange(0 if kept is None else self._at, num_computed).expand(num_heads, -1)
        return new if kept is None else torch.cat((kept, new), dim=1)

    def _mass_of(self, layer: int, held: torch.Tensor) -> torch.Tensor:
        """What each entry has had; those that nobody looked at yet have nothing."""
        mass = torch.zeros(held.shape)
        if (seen := self._mass.get(layer)) is not None:
            mass[:, : seen.shape[1]] = seen
        return mass

    def _padded_mass(self, num_computed: int) -> dict[int, torch.Tensor]:
        if not self._observed:
            return {}
        return {layer: self._mass_of(layer, self._held(layer, num_computed)) for layer in self._layers}

    def _note(self, lease: Lease, num_blocks_before: int) -> None:
        returned = num_blocks_before - lease.num_blocks
        last, entries = self.report, self._num_entries(self._at)
        self.report = SparseReport(
            policy=last.policy,
            num_compactions=last.num_compactions + 1,
            num_kept_tokens=entries,
            num_dropped_tokens=self._at - entries,
            num_blocks=lease.num_blocks,
            num_returned_blocks=last.num_returned_blocks + returned,
            returned_bytes=last.returned_bytes + returned * self._memory.layout.pool_block_bytes,
        )

    # -- packed positions --------------------------------------------------------------------------------------------

    def _remember_sinks(self, lease: Lease) -> None:
        """The first keys as at position 0: turning them from there each time, rounding does not add up."""
        for layer in self._layers:
            num_heads = self._memory.views[layer].keys.shape[1]
            first = torch.arange(self._policy.num_packed)
            table = lease.tables[self._memory.layout.group_of_layer[layer]].ids
            keys = self._memory.keys(layer, table, first.expand(num_heads, -1))
            self._sinks[layer] = self._memory.turned(layer, keys, -first)

    def _pack(self, lease: Lease) -> None:
        """Turn the packed entries to the positions right before the others; first move all back if positions run out.

        The others have the positions up to the last one, without a gap.
        """
        policy, memory = self._policy, self._memory
        start = self._at - self.rotary_offset - policy.num_tokens
        if self._at - self.rotary_offset + policy.num_between > memory.max_positions:
            for layer, group in enumerate(memory.layout.group_of_layer):
                memory.turn_blocks(layer, np.unique(lease.tables[group].held), -start)
            self.rotary_offset += start
            start = 0
        for layer, keys in self._sinks.items():
            table = lease.tables[memory.layout.group_of_layer[layer]].ids
            positions = start + torch.arange(policy.num_packed)
            memory.write_keys(layer, table, 0, memory.turned(layer, keys, positions))

    def fork(self, lease: Lease) -> Self:
        """See SparseSequence."""
        twin = copy(self)
        # Tensors in these are replaced, never changed.
        twin._positions, twin._mass, twin._sinks = dict(self._positions), dict(self._mass), dict(self._sinks)
        twin._see_again(lease)
        return twin

    def _see_again(self, lease: Lease) -> None:
        """Computed again, it must see what it saw, and no more."""
        if self._observed:
            self.hit_limit = min(self.hit_limit, max(self._observed.start, lease.num_hit_tokens))

    def forget(self, lease: Lease) -> None:
        """See SparseSequence."""
        self._see_again(lease)
        self._at, self.rotary_offset = 0, 0
        self._positions, self._mass, self._sinks = {}, {}, {}
