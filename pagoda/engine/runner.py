"""Runners: turn a step's plan into tensors, and the tensors into logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from pagoda.engine.blend.blender import Blender
from pagoda.engine.first_tokens import FirstRows
from pagoda.engine.sparse.hook import sparse_hook
from pagoda.engine.step_plan import Rows
from pagoda.errors import ConfigError
from pagoda.kernels import FirstTokens, KVView, Staging
from pagoda.kv.block_table import BlockTable
from pagoda.kv.cache import KVCache
from pagoda.kv.formats import parse_format, plain_format
from pagoda.kv.layout import KVLayout
from pagoda.kv.pool import BlockPool
from pagoda.kv.staging import StagedPool
from pagoda.model.batch import ForwardBatch
from pagoda.model.decoder import Decoder
from pagoda.model.lora import Adapter, AdapterRows
from pagoda.model.spec import ModelSpec


class Runner(Protocol):
    """Computes one step."""

    def execute(self, plan: Sequence[Rows]) -> torch.Tensor:
        """Compute the planned rows and write their KV.

        Returns:
            float32 `[n, vocab_size]`: logits of the last row of each entry that `needs_logits`, in order.
        """

    def spoilt(self, plan: Sequence[Rows]) -> list[Rows]:
        """The parts of prompts of an executed plan, of those without logits to tell it, whose KV is not all finite.

        Kernels that compute rows together let one that is not finite spoil those before it, which other prompts share.
        """


def layout_for(
    spec: ModelSpec, block_size: int, dtype: torch.dtype, kv_format: str = "auto", skip_layers: Collection[int] = ()
) -> KVLayout:
    """The KV layout of a model.

    Args:
        dtype: of its activations.
        kv_format: what `parse_format` takes; `auto` keeps keys and values in the dtype of the activations.
        skip_layers: those that do so whatever the format.

    Raises:
        ConfigError: there is no such format or layer, or the format cannot hold such heads.
    """
    if strange := [str(layer) for layer in skip_layers if not 0 <= layer < spec.num_layers]:
        raise ConfigError(
            "`--kv-skip-layers` (in Python `kv_skip_layers`) must be layers of the model, "
            f"0 to {spec.num_layers - 1}, got {', '.join(strange)}"
        )
    name = str(dtype).removeprefix("torch.")
    plain = plain_format(name)
    chosen = plain if kv_format == "auto" else parse_format(kv_format)
    return KVLayout(
        [
            (plain if layer in skip_layers else chosen).attention(
                spec.num_kv_heads, spec.head_dim, block_size, window, name
            )
            for layer, window in enumerate(spec.windows)
        ],
        block_size,
    )


def build_batch(plan: Sequence[Rows], device: torch.device) -> ForwardBatch:
    """The ragged rows of a plan, on `device`. Lists, and few arrays: after each step their code is in no cache."""
    token_ids: list[int] = []
    positions: list[int] = []
    query_start, context_lens, wanted = [0], [], []
    num_groups = len(plan[0].lease.tables)
    slots: list[list[int]] = [[] for _ in range(num_groups)]
    for rows in plan:
        start, stop, sparse = rows.start, rows.stop, rows.sample.sparse
        turned = 0 if sparse is None else sparse.rotary_offset
        token_ids += rows.sample.tokens.part(start, stop).tolist()
        positions += range(start - turned, stop - turned)
        query_start.append(len(positions))
        context_lens.append(stop - rows.lease.tables[0].num_dropped)
        if rows.needs_logits:
            wanted.append(len(positions) - 1)
        for of_group, table in zip(slots, rows.lease.tables, strict=True):
            of_group += table.slots(start, stop)

    def to(values: npt.ArrayLike, dtype: npt.DTypeLike) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype)).to(device)

    return ForwardBatch(
        token_ids=to(token_ids, np.int64),
        positions=to(positions, np.int64),
        query_start=to(query_start, np.int32),
        context_lens=to(context_lens, np.int32),
        block_tables=tuple(
            to(_padded([rows.lease.tables[group] for rows in plan]), np.int32) for group in range(num_groups)
        ),
        slot_mapping=tuple(to(of_group, np.int64) for of_group in slots),
        logits_rows=to(wanted, np.int64),
    )


def _padded(tables: Sequence[BlockTable]) -> npt.NDArray[np.int32]:
    """The entries of block tables as rows, zeros after their ends."""
    width = max([len(table.packed) for table in tables])
    rows = bytearray().join([table.packed.ljust(width, b"\0") for table in tables])
    return np.frombuffer(rows, dtype=np.int32).reshape(len(tables), -1)


def adapter_rows(plan: Sequence[Rows], device: torch.device) -> AdapterRows | None:
    """Which rows of a plan an adapter changes; None if there are none."""
    if all(rows.sample.request.adapter is None for rows in plan):
        return None
    of_rows: list[Adapter | None] = []
    for rows in plan:
        first = min(max(rows.start, rows.sample.request.scope.adapter_from), rows.stop)
        of_rows += [None] * (first - rows.start) + [rows.sample.request.adapter] * (rows.stop - first)
    return AdapterRows.of(of_rows, device)


class ModelRunner:
    """Runs a decoder on a pool; `decoder` may be replaced between steps, by one of the same shape.

    With the `cache` that the pool belongs to, passages are reused.
    """

    def __init__(self, decoder: Decoder, pool: BlockPool, cache: KVCache | None = None) -> None:
        self.decoder = decoder
        self._pool = pool
        self._group_of_layer = pool.layout.group_of_layer
        self._staged = _Staged.of(pool)
        self.kv = self._views()
        self._blender = None if cache is None else Blender(cache, self.kv, self._group_of_layer, decoder.rotations)

    def execute(self, plan: Sequence[Rows]) -> torch.Tensor:
        """See Runner."""
        if self._staged is None:
            return self._forward(plan)
        staging, written = self._staged.pool.staging, _Written.by(plan, self._pool.layout.block_size)
        staging.begin(self._staged.first_rows.find(plan, self.decoder))
        staging.open(written.whole, written.begun + written.ended)
        if self._staged.viewed is not staging.strips:
            self.kv = self._views()
        logits = self._forward(plan)
        staging.close(written.whole + written.ended)
        return logits

    def spoilt(self, plan: Sequence[Rows]) -> list[Rows]:
        """See Runner. Asks the last layer, to which whatever is not finite came, of the blocks that may be shared."""
        size, group = self._pool.layout.block_size, self._group_of_layer[-1]
        found = []
        for rows in plan:
            sample = rows.sample
            # Of a single row the logits tell.
            if rows.stop - rows.start == 1 or sample.sparse is not None or sample.request.blend is not None:
                continue
            # What is staged is shared once its block is whole, and what is not at once.
            staged = self._staged is not None
            start, stop = (at // size * size if staged else at for at in (rows.start, rows.stop))
            slots = torch.tensor(
                rows.lease.tables[group].slots(start, stop), dtype=torch.int64, device=self.decoder.device
            )
            if not bool(self.kv[-1].are_finite(slots // size, slots % size).all()):
                found.append(rows)
        return found

    def _forward(self, plan: Sequence[Rows]) -> torch.Tensor:
        """The logits of a plan. What drops rows and a hook that counts on them cannot steer the same pass."""
        blended = [rows for rows in plan if rows.sample.request.blend is not None]
        others = [rows for rows in plan if rows.sample.request.blend is None]
        if not blended or not any(rows.sample.sparse is not None for rows in others):
            return self._pass(plan)
        of_part = [self._pass(blended), self._pass(others)]
        place, order = [0, len(of_part[0])], []
        for rows in plan:
            if rows.needs_logits:
                part = int(rows.sample.request.blend is None)
                order.append(place[part])
                place[part] += 1
        return torch.cat(of_part)[order]

    def _pass(self, plan: Sequence[Rows]) -> torch.Tensor:
        device = self.decoder.device
        batch, adapters = build_batch(plan, device), adapter_rows(plan, device)
        narrowing = self._blender.begin(plan, batch) if self._blender is not None else None
        hook = sparse_hook(plan, self._group_of_layer) if narrowing is None else None
        return self.decoder.forward(batch, self.kv, self._group_of_layer, hook, adapters, narrowing)

    def _views(self) -> list[KVView]:
        if self._staged is not None:
            self._staged.viewed = self._staged.pool.staging.strips
        return [self._view(layer) for layer in range(len(self._pool.layout.layers))]

    def _view(self, layer: int) -> KVView:
        spec = self._pool.layout.layers[layer]
        parts = {part.name: self._pool.view(layer, part.name) for part in spec.parts}
        if self._staged is None or not spec.staged:
            return KVView.of(parts)
        pool, staging = self._staged.pool, self._staged.pool.staging
        (keys, slot_of), (values, _) = (staging.views(layer, part.name) for part in spec.staged)
        first_keys, first_values = (pool.firsts.view(layer, part.name) for part in spec.staged)
        return KVView.of(parts, Staging(keys, values, slot_of, FirstTokens(first_keys, first_values, staging.row_of)))


@dataclass(slots=True)
class _Staged:
    """A pool with a staging area, the first tokens that it keeps, and the strips that the runner's views are of."""

    pool: StagedPool
    first_rows: FirstRows
    viewed: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, pool: BlockPool) -> _Staged | None:
        """None if the pool has none."""
        return cls(pool, FirstRows(pool.firsts)) if isinstance(pool, StagedPool) else None


@dataclass(frozen=True, slots=True)
class _Written:
    """The blocks of all groups that a step writes to: wholly; to their end; and those that are not full after it."""

    whole: list[int]
    ended: list[int]
    begun: list[int]

    @classmethod
    def by(cls, plan: Sequence[Rows], block_size: int) -> _Written:
        found = cls([], [], [])
        for rows in plan:
            first, end = rows.start // block_size, rows.stop // block_size  # end: of those that are full
            whole = -(-rows.start // block_size)
            for table in rows.lease.tables:
                found.ended.extend(table.ids[first : min(whole, end)].tolist())
                found.whole.extend(table.ids[whole:end].tolist())
                found.begun.extend(table.ids[end : -(-rows.stop // block_size)].tolist())
        return found
