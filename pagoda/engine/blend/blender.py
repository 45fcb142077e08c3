"""Blender: puts the KV of passages where a step's rows need it, and has most of those rows not computed.

    begin     passages found in the tree ── turned ──> the request's own blocks, layers 2 and up
    layer 1   rows computed so far against the passage's: which ones go on            BlendHook.after_attention

The decoder computes the rest: the rows that are left read the others' KV through the block table as they read any.
Steps without passages have no hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pagoda.blend.progress import BlendProgress
from pagoda.blend.rotate import Rotations, gather, move, turn_keys, turns
from pagoda.blend.select import CHECK_LAYER, choose, deviations
from pagoda.engine.scheduler import Rows
from pagoda.kernels import AttentionOutput, KVView
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

    def begin(self, plan: Sequence[Rows], batch: ForwardBatch) -> BlendHook | None:
        """Copy what passages have for a step into its requests' blocks; None if that is nothing.

        Mutates the pool, at the slots of the step.
        """
        found = []
        if len(self._views) > CHECK_LAYER:
            for rows, first_row in zip(plan, batch.query_start.tolist(), strict=False):
                progress = rows.sample.request.blend
                if progress is not None and rows.stop > progress.first:
                    found += self._find(progress, rows, first_row, batch)
        return BlendHook([self._reuse(each) for each in found], self._views, self._groups) if found else None

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
            match = look(request.prompt[span.start : span.stop], request.scope)
            at = np.arange(start - span.start, min(stop - span.start, match.num_tokens), dtype=np.int64)
            blocks = match.blocks[:, at // size].astype(np.int64)
            there = (blocks != ABSENT).all(axis=0)
            relative.append(at[there])
            positions.append(at[there] + span.start)
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

    def _reuse(self, found: _Found) -> _Measured:
        old, new = (torch.from_numpy(places).to(found.rows.device) for places in (found.relative, found.positions))
        turn_of = {
            id(tables.cos): turns(tables, old, new) for tables in {id(t.cos): t for t in self._rotations}.values()
        }
        turned = [turn_of[id(tables.cos)] for tables in self._rotations]
        later = range(CHECK_LAYER + 1, len(self._views))
        move(
            [self._views[layer] for layer in later],
            [turned[layer] for layer in later],
            [found.sources[self._groups[layer]] for layer in later],
            [found.targets[self._groups[layer]] for layer in later],
        )
        keys, values = gather(self._views[CHECK_LAYER], found.sources[self._groups[CHECK_LAYER]])
        return _Measured(found, turn_keys(keys, turned[CHECK_LAYER]), values)


@dataclass(frozen=True, slots=True)
class _Measured:
    """What was found, and what it would be at the layer where it is compared."""

    found: _Found
    keys: torch.Tensor
    values: torch.Tensor


class BlendHook:
    """A LayerHook for one step: after layer 1, only rows outside passages and those chosen in them go on."""

    needs_mass = False

    def __init__(self, measured: Sequence[_Measured], views: Sequence[KVView], group_of_layer: Sequence[int]) -> None:
        self._measured = measured
        self._view = views[CHECK_LAYER]
        self._group = group_of_layer[CHECK_LAYER]

    def before_attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> ForwardBatch:
        """See LayerHook."""
        return batch

    def after_attention(self, layer: int, batch: ForwardBatch, output: AttentionOutput) -> Narrowed | None:
        """See LayerHook."""
        if layer != CHECK_LAYER:
            return None
        keep = torch.ones(len(batch.token_ids), dtype=torch.bool, device=batch.token_ids.device)
        for each in self._measured:
            found, spec = each.found, each.found.progress.spec
            computed = gather(self._view, found.targets[self._group])
            choice = choose(deviations((each.keys, each.values), computed), spec.ratio, spec.max_deviation)
            found.progress.note(found.positions, choice)
            keep[found.rows[~choice.chosen]] = False
        return None if keep.all() else Narrowed.to(batch, keep)
