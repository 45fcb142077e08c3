"""SparseHook: the LayerHook of a step that has sparse requests in it.

row of the batch   0: dense     1: h2o                      2: pyramid
a layer's batch    as planned   as planned; its mass seen   another length and other slots in this layer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pagoda.engine.request import Sample
from pagoda.engine.scheduler import Rows
from pagoda.kernels import AttentionOutput
from pagoda.model.batch import ForwardBatch
from pagoda.sparse.base import Place, SparseSequence
from pagoda.sparse.recall_sequence import RecallingSequence


@dataclass(frozen=True, slots=True)
class _Member:
    """A sparse request: which of the batch's requests it is, and its rows there."""

    request: int
    rows: slice
    sample: Sample
    sequence: SparseSequence
    start: int
    stop: int


def sparse_hook(plan: Sequence[Rows], group_of_layer: Sequence[int]) -> SparseHook | None:
    """The hook that a plan needs; None if no request in it does."""
    members, first = [], 0
    for index, rows in enumerate(plan):
        count, sequence = rows.stop - rows.start, rows.sample.sparse
        if sequence is not None and sequence.uses_hook(rows.start, rows.stop):
            at = slice(first, first + count)
            members.append(_Member(index, at, rows.sample, sequence, rows.start, rows.stop))
        first += count
    return SparseHook(members, group_of_layer) if members else None


class SparseHook:
    """See LayerInputHook. Each sparse request's sequence sees its own rows."""

    def __init__(self, members: Sequence[_Member], group_of_layer: Sequence[int]) -> None:
        self.needs_mass = any(each.sequence.wants_mass(each.start, each.stop) for each in members)
        self._members = members
        self._group_of_layer = group_of_layer
        self._lens: dict[int, int] = {}  # of the members in the layer that is being computed

    def before_layer(self, layer: int, residual: torch.Tensor, batch: ForwardBatch) -> None:
        """Let those that recall KV fetch what is needed next."""
        for each in self._members:
            if isinstance(each.sequence, RecallingSequence):
                each.sequence.before_layer(layer, residual[each.rows], each.sample.running_lease, each.start)

    def before_attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> ForwardBatch:
        """Ask each sequence where its rows are in this layer."""
        self._lens = {}
        places: list[tuple[_Member, Place]] = []
        for each in self._members:
            at, lease = each.rows, each.sample.running_lease
            place = each.sequence.before_attention(layer, q[at], k[at], v[at], lease, each.start)
            if place is not None:
                places.append((each, place))
                self._lens[each.request] = place.context_len
        return _replaced(batch, self._group_of_layer[layer], places) if places else batch

    def after_attention(self, layer: int, batch: ForwardBatch, output: AttentionOutput) -> None:
        """Show each sequence what attention its rows paid."""
        for each in self._members:
            mass = None
            if output.mass is not None:
                length = self._lens.get(each.request, int(batch.context_lens[each.request]))
                mass = output.mass[each.request, :, :length]
            each.sequence.after_attention(layer, mass, each.start, each.stop)


def _replaced(batch: ForwardBatch, group: int, places: Sequence[tuple[_Member, Place]]) -> ForwardBatch:
    """The batch with some requests in other places, of one layer group."""
    lens, slots, table = batch.context_lens.clone(), batch.slot_mapping[group].clone(), batch.block_tables[group]
    longest = max((place.table.size for _, place in places if place.table is not None), default=0)
    if longest:
        table = torch.nn.functional.pad(table, (0, max(0, longest - table.shape[1])))
    for each, place in places:
        lens[each.request] = place.context_len
        slots[each.rows] = torch.from_numpy(place.slots).to(slots.device)
        if place.table is not None:
            table[each.request, : place.table.size] = torch.from_numpy(place.table).to(table.device)
    tables, mapping = list(batch.block_tables), list(batch.slot_mapping)
    tables[group], mapping[group] = table, slots
    return replace(batch, context_lens=lens, block_tables=tuple(tables), slot_mapping=tuple(mapping))
