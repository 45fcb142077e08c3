"""Runners: turn a step's plan into tensors, and the tensors into logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from pagoda.engine.scheduler import Rows
from pagoda.kernels import KVView
from pagoda.kv.layout import KVLayout
from pagoda.kv.pool import BlockPool
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


def layout_for(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> KVLayout:
    """The KV layout of a model whose cache has the dtype of its activations."""
    return KVLayout.for_attention(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        dtype=str(dtype).removeprefix("torch."),
        windows=spec.windows,
    )


def build_batch(plan: Sequence[Rows], device: torch.device) -> ForwardBatch:
    """The ragged rows of a plan, on `device`."""
    counts = np.array([rows.stop - rows.start for rows in plan], dtype=np.int32)
    query_start = np.zeros(len(plan) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    leases = [rows.sample.running_lease for rows in plan]

    def to(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    tables, slots = [], []
    for group in range(len(leases[0].tables)):
        of_group = [lease.tables[group] for lease in leases]
        ids = np.zeros((len(plan), max(len(table) for table in of_group)), dtype=np.int32)
        for row, table in zip(ids, of_group, strict=True):
            row[: len(table)] = table.ids
        tables.append(to(ids))
        written = (table.slots(rows.start, rows.stop) for table, rows in zip(of_group, plan, strict=True))
        slots.append(to(np.concatenate(list(written))))
    wanted = [rows.needs_logits for rows in plan]
    tokens = np.concatenate([rows.sample.tokens.view[rows.start : rows.stop] for rows in plan])
    positions = np.concatenate([np.arange(rows.start, rows.stop, dtype=np.int64) for rows in plan])
    return ForwardBatch(
        token_ids=to(tokens.astype(np.int64)),
        positions=to(positions),
        query_start=to(query_start),
        context_lens=to(np.array([rows.stop for rows in plan], dtype=np.int32)),
        block_tables=tuple(tables),
        slot_mapping=tuple(slots),
        logits_rows=to(query_start[1:][wanted].astype(np.int64) - 1),
        max_query_len=int(counts.max()),
    )


def adapter_rows(plan: Sequence[Rows], device: torch.device) -> AdapterRows | None:
    """Which rows of a plan an adapter changes; None if there are none."""
    adapters: dict[Adapter, int] = {}
    which = []
    for rows in plan:
        adapter, first = rows.sample.request.adapter, rows.sample.request.scope.adapter_from
        of_rows = np.full(rows.stop - rows.start, -1, dtype=np.int64)
        if adapter is not None and rows.stop > first:
            of_rows[max(0, first - rows.start) :] = adapters.setdefault(adapter, len(adapters))
        which.append(of_rows)
    return AdapterRows(list(adapters), torch.from_numpy(np.concatenate(which)).to(device)) if adapters else None


class ModelRunner:
    """Runs a decoder on a pool; `decoder` may be replaced between steps, by one of the same shape."""

    def __init__(self, decoder: Decoder, pool: BlockPool) -> None:
        self.decoder = decoder
        self._group_of_layer = pool.layout.group_of_layer
        self._kv = [
            KVView(pool.view(layer, "keys"), pool.view(layer, "values")) for layer in range(len(pool.layout.layers))
        ]

    def execute(self, plan: Sequence[Rows]) -> torch.Tensor:
        """See Runner."""
        device = self.decoder.device
        batch, adapters = build_batch(plan, device), adapter_rows(plan, device)
        return self.decoder.forward(batch, self._kv, self._group_of_layer, adapters=adapters)
