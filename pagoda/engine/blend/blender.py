"""Blender: puts the KV of passages where a step's rows need it, and has most of those rows not computed.

    begin     passages found in the tree, or nothing: then the step is one like any other
    layer 1   keys and values computed against the passage's: which rows go on            BlendNarrowing.narrow
              the others' ── turned ──> the request's own blocks, layers 2 and up

The decoder computes the rest: the rows that are left read the others' KV through the block table as they read any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pagoda.blend.progress import BlendProgress
from pagoda.blend.rotate import Rotations, gather, move, turn_keys, turns
from pagoda.blend.select import CHECK_LAYER, Choice, choose, deviations
from pagoda.engine.step_plan import Rows
from pagoda.kernels import KVView
from pagoda.kv.cache import KVCache
from pagoda.kv.radix_node import ABSENT
from pagoda.model.batch import ForwardBatch
from pagoda.model.hooks import Narrowed


@dataclass(frozen=True, slots=True)
class _Found:
    """Tokens of one request's passages whose KV is there. `sources` and `targets` are slots, `[groups, tokens]`."""

    progress: BlendProgress
    positions: npt.NDArray[np.int64]
    relative: npt.NDArray[np.int64]
    rows: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor


class Blender:
    """Finds passages for the steps of one model and pool.

    Args:
        cache: where passages are found, by their tokens alone.
        views: the pool's layers.
        group_of_layer: whose slots each layer has.
        rotations: each layer's tables; layers may share them.
    """

    def __init__(
        self,
        cache: KVCache,
        views: Sequence[KVView],
        group_of_layer: Sequence[int],
        rotations: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._cache = cache
        self._views = views
        self._groups = group_of_layer
        self._rotations = [Rotations(*tables) for tables in rotations]

    def begin(self, plan: Sequence[Rows], batch: ForwardBatch) -> BlendNarrowing | None:
        """What passages have for a step; None if that is nothing. Notes the hits in the cache."""
        found = []
        if len(self._views) > CHECK_LAYER:
            for rows, first_row in zip(plan, batch.query_start.tolist(), strict=False):
                progress = rows.sample.request.blend
                if progress is not None and rows.stop > progress.first:
                    found += self._find(progress, rows, first_row, batch)
        return BlendNarrowing(found, self._views, self._groups, self._rotations) if found else None

    def _find(self, progress: BlendProgress, rows: Rows, first_row: int, batch: ForwardBatch) -> list[_Found]:
        request, size = rows.sample.request, self._cache.block_size
        last = request.prompt.size - 1  # whose logits are wanted: it is computed
        relative: list[npt.NDArray[np.int64]] = []
        positions: list[npt.NDArray[np.int64]] = []
        sources: list[npt.NDArray[np.int64]] = []
        for span in progress.spec.spans:
            start, stop = max(rows.start, span.start), min(rows.stop, span.stop, last)
            if start >= stop:
                continue
            look = self._cache.use if start == span.start else self._cache.find  # one hit, however many steps
            match = look(span.alone(request.prompt), request.scope)
            before = span.start - span.num_anchor_tokens
            at = np.arange(start - before, min(stop - before, match.num_tokens), dtype=np.int64)
            blocks = match.blocks[:, at // size].astype(np.int64)
            there = (blocks != ABSENT).all(axis=0)
            relative.append(at[there])
            positions.append(at[there] + before)
            sources.append((blocks * size + at % size)[:, there])
        if not any(at.size for at in relative):
            return []
        place = np.concatenate(positions)
        in_batch = torch.from_numpy(place - rows.start + first_row).to(batch.token_ids.device)
        return [
            _Found(
                progress,
                place,
                np.concatenate(relative),
                in_batch,
                torch.from_numpy(np.concatenate(sources, axis=1)).to(in_batch.device),
                torch.stack([slots[in_batch] for slots in batch.slot_mapping]),
            )
        ]


class BlendNarrowing:
    """See Narrowing: rows outside passages go on, and those chosen in them; the others get the passage's KV."""

    layer = CHECK_LAYER

    def __init__(
        self,
        found: Sequence[_Found],
        views: Sequence[KVView],
        group_of_layer: Sequence[int],
        rotations: Sequence[Rotations],
    ) -> None:
        self._found = found
        self._views = views
        self._groups = group_of_layer
        self._rotations = rotations

    def narrow(self, batch: ForwardBatch) -> Narrowed:
        """See Narrowing. Mutates the pool, at the slots of the rows that stop."""
        keep = torch.ones(len(batch.token_ids), dtype=torch.bool, device=batch.token_ids.device)
        for each in self._found:
            turned = self._turns(each)
            choice = self._choose(each, turned[CHECK_LAYER])
            each.progress.note(each.positions, choice)
            stops = ~choice.chosen
            keep[each.rows[stops]] = False
            self._reuse(each, turned, stops)
        return Narrowed.to(batch, keep)

    def _turns(self, found: _Found) -> list[Rotations]:
        """Each layer's, of all rows; layers share them as they share tables."""
        old, new = (torch.from_numpy(places).to(found.rows.device) for places in (found.relative, found.positions))
        by_table = {id(tables.cos): tables for tables in self._rotations}
        turned = {name: turns(tables, old, new) for name, tables in by_table.items()}
        return [turned[id(tables.cos)] for tables in self._rotations]

    def _choose(self, found: _Found, turn: Rotations) -> Choice:
        view, group, spec = self._views[CHECK_LAYER], self._groups[CHECK_LAYER], found.progress.spec
        keys, values = gather(view, found.sources[group])
        deviation = deviations((turn_keys(keys, turn), values), gather(view, found.targets[group]))
        return choose(deviation, spec.ratio, spec.max_deviation)

    def _reuse(self, found: _Found, turned: Sequence[Rotations], stops: torch.Tensor) -> None:
        """Copy the passages' KV of the layers that the rows where `stops` do not reach."""
        left = {id(turn.cos): Rotations(turn.cos[stops], turn.sin[stops]) for turn in turned}
        sources, targets = found.sources[:, stops], found.targets[:, stops]
        later = range(CHECK_LAYER + 1, len(self._views))
        move(
            [self._views[layer] for layer in later],
            [left[id(turned[layer].cos)] for layer in later],
            [sources[self._groups[layer]] for layer in later],
            [targets[self._groups[layer]] for layer in later],
        )
