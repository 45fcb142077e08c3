"""FirstRows: keys and values, in full, of the tokens that sequences begin with, where blocks of keys are quantized.

    plan      a: <s> ..   b: Hi ..   c: <s> ..        all of one tenant
    rows      0: <s>      1: Hi      2: (free)

A sequence's first token sees itself alone, so its keys and values depend on nothing but the token and the adapter: what
is computed once serves all who begin so, cold or after a hit, and where it was given up it is computed again. Only
within a namespace and a salt, though it is the same in all: a pass that is spared would tell one tenant of another.
(That such a token is worth keeping as it is: IntactKV, arXiv:2403.01241.)
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from pagoda.engine.request import Request, Sample
from pagoda.engine.step_plan import Rows
from pagoda.kernels import KVView
from pagoda.kv.pool import BlockPool
from pagoda.model.batch import ForwardBatch
from pagoda.model.decoder import Decoder
from pagoda.model.lora import Adapter, AdapterRows


class _First(NamedTuple):
    """What a row is of, and whose. `adapter` is the identity of the one that changes it, or ""."""

    token: int
    namespace: str
    salt: str
    adapter: str

    @classmethod
    def of(cls, sample: Sample) -> _First:
        scope, adapter = sample.request.scope, _adapter(sample.request)
        token = int(sample.tokens.view[0])
        return cls(token, scope.namespace, scope.salt, "" if adapter is None else adapter.identity)


class FirstRows:
    """The rows of a pool of first tokens, one to a block; the least recently used are given up for others.

    Args:
        pool: of `layout.firsts`, with a block for each sequence that a plan may have.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._views = [
            KVView.of({part.name: pool.view(layer, part.name) for part in spec.parts})
            for layer, spec in enumerate(pool.layout.layers)
        ]
        self._free = list(range(pool.num_blocks))
        self._rows: OrderedDict[_First, int] = OrderedDict()
        self._made_by: weakref.ref[Decoder] | None = None
        # Of the last plan: most plans have the samples of the one before.
        self._firsts: dict[Sample, _First] = {}
        self._planned: list[int] = []

    def find(self, plan: Sequence[Rows], decoder: Decoder) -> dict[int, int]:
        """Which row has the first token of each sequence of a plan, by the blocks that it begins with.

        What no row has is computed: one token for each, in one pass.
        """
        if self._made_by is None or self._made_by() is not decoder:  # other weights
            self._free += self._rows.values()
            self._rows.clear()
            self._firsts = {}
            self._made_by = weakref.ref(decoder)
        samples = [rows.sample for rows in plan]
        if samples != list(self._firsts):
            known, self._firsts = self._firsts, {}  # nothing is, should computing fail
            firsts = {sample: known.get(sample) or _First.of(sample) for sample in samples}
            self._planned, self._firsts = self._find(firsts, decoder), firsts
        return {
            table.leading: row
            for rows, row in zip(plan, self._planned, strict=True)
            for table in rows.lease.tables
            if table.first == 0  # else the token slid out of the window
        }

    def _find(self, firsts: Mapping[Sample, _First], decoder: Decoder) -> list[int]:
        row_of, missing = {}, {}
        for sample, first in firsts.items():
            if first in self._rows:
                row_of[first] = self._rows[first]
                self._rows.move_to_end(first)
            else:
                missing[first] = _adapter(sample.request)
        if missing:
            row_of |= self._compute(missing, decoder)
        return [row_of[first] for first in firsts.values()]

    def _compute(self, missing: Mapping[_First, Adapter | None], decoder: Decoder) -> dict[_First, int]:
        """Compute first tokens into free rows, or into those of the least recently used.

        What is not finite serves this step, whose requests will fail, and is computed again for the next.
        """
        while len(self._free) < len(missing):
            self._free.append(self._rows.popitem(last=False)[1])
        taken = self._free[-len(missing) :]
        decoder.forward(
            _singles([first.token for first in missing], taken, decoder.device),
            self._views,
            [0] * len(self._views),
            adapters=AdapterRows.of(list(missing.values()), decoder.device),
        )
        blocks = torch.tensor(taken, device=decoder.device)
        finite = self._views[-1].are_finite(blocks, torch.zeros_like(blocks)).tolist()
        for first, row, is_finite in zip(missing, taken, finite, strict=True):
            if is_finite:
                self._rows[first] = row
                self._free.remove(row)
        return dict(zip(missing, taken, strict=True))


def _adapter(request: Request) -> Adapter | None:
    """The adapter that changes a request's first token."""
    return request.adapter if request.scope.adapter_from == 0 else None


def _singles(tokens: Sequence[int], blocks: Sequence[int], device: torch.device) -> ForwardBatch:
    """A request of one token for each, in a block of its own."""
    count = len(tokens)
    ids = torch.tensor(blocks, dtype=torch.int32, device=device)
    return ForwardBatch(
        token_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions=torch.zeros(count, dtype=torch.int64, device=device),
        query_start=torch.arange(count + 1, dtype=torch.int32, device=device),
        context_lens=torch.ones(count, dtype=torch.int32, device=device),
        block_tables=(ids[:, None],),
        slot_mapping=(ids.long(),),
        logits_rows=torch.empty(0, dtype=torch.int64, device=device),
    )
