"""SparseHook: the LayerHook of a step that has sparse requests in it.

row of the batch   0: dense     1: h2o                      2: pyramid
a layer's batch    as planned   as planned; its mass seen   another length and other slots in this layer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pagoda.engine.request import Sample
from pagoda.engine.step_plan import Rows
from pagoda.kernels import AttentionOutput, LayerStep, RowRecall, Steering
from pagoda.model.batch import ForwardBatch
from pagoda.sparse.base import SparseSequence
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
    """See LayerInputHook and SteeringHook. Each sparse request's sequence sees its own rows."""

    def __init__(self, members: Sequence[_Member], group_of_layer: Sequence[int]) -> None:
        self._members = members
        self._observers = [each for each in members if each.sequence.wants_mass(each.start, each.stop)]
        self._group_of_layer = group_of_layer
        self.needs_mass = bool(self._observers)

    def before_layer(self, layer: int, residual: torch.Tensor, batch: ForwardBatch) -> None:
        """Let those that recall KV fetch what is needed next."""
        for each in self._members:
            if isinstance(each.sequence, RecallingSequence):
                each.sequence.before_layer(layer, residual[each.rows], each.sample.running_lease, each.start)

    def before_attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> ForwardBatch:
        """Fetch what is needed now, and ask each sequence where its rows are in this layer."""
        for each in self._members:
            if isinstance(each.sequence, RecallingSequence):
                each.sequence.before_attention(layer, q[each.rows], each.sample.running_lease, each.start)
        places = self._places(layer, batch)
        if places is None:
            return batch
        lens, slots = places
        mapping = list(batch.slot_mapping)
        mapping[self._group_of_layer[layer]] = slots
        return replace(batch, context_lens=lens, slot_mapping=tuple(mapping))

    def _places(self, layer: int, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The lengths and slots of a layer where some are not the batch's; None where all are."""
        places = None
        for each in self._members:
            place = each.sequence.place(layer, each.sample.running_lease, each.start, each.stop)
            if place is None:
                continue
            if places is None:
                places = batch.context_lens.clone(), batch.slot_mapping[self._group_of_layer[layer]].clone()
            lens, slots = places
            lens[each.request] = place.context_len
            slots[each.rows] = torch.tensor(place.slots, device=slots.device)
        return places

    def after_attention(self, layer: int, batch: ForwardBatch, output: AttentionOutput) -> None:
        """Show those that go by it what attention their rows paid."""
        if output.mass is not None:
            for each in self._observers:
                seen = output.mass[each.request, :, : self._length(each, layer, batch)]
                each.sequence.after_attention(layer, seen, each.start, each.stop)

    def _length(self, each: _Member, layer: int, batch: ForwardBatch) -> int:
        """The KV entries that a member's last row sees in a layer."""
        place = each.sequence.place(layer, each.sample.running_lease, each.start, each.stop)
        return int(batch.context_lens[each.request]) if place is None else place.context_len

    # -- all layers in one call --------------------------------------------------------------------------------------

    def steering(self, batch: ForwardBatch) -> Steering | None:
        """See SteeringHook. Where what is recalled is not stored as it is in the pool, layers run one by one."""
        layers = [self._layer_step(layer, batch) for layer in range(len(self._group_of_layer))]
        if not all(each.recall.only_copies for layer in layers for each in (*layer.own, *layer.foretold)):
            return None
        return Steering(layers, [each.request for each in self._observers])

    def _layer_step(self, layer: int, batch: ForwardBatch) -> LayerStep:
        own: list[RowRecall] = []
        foretold: list[RowRecall] = []
        for each in self._members:
            if isinstance(each.sequence, RecallingSequence):
                recall = each.sequence.recall(layer, each.sample.running_lease)
                if recall is not None:
                    of_kind = foretold if each.sequence.is_foretold(layer) else own
                    of_kind.append(RowRecall(each.rows.start, recall))
        lens, slots = self._places(layer, batch) or (None, None)
        return LayerStep(lens, slots, own, foretold)

    def after_layers(self, batch: ForwardBatch, mass: torch.Tensor) -> None:
        """See SteeringHook."""
        for layer, of_layer in enumerate(mass):
            for each, seen in zip(self._observers, of_layer, strict=True):
                seen = seen[:, : self._length(each, layer, batch)]
                each.sequence.after_attention(layer, seen, each.start, each.stop)
