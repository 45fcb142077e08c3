"""Recalls: what requests get from the tiers, in a worker. Never touched by another thread than the worker's own.

    start     look up and load into staging memory; fetch.py decides how long that is worth waiting for
    answer    how many blocks there are, once the first ones came
    load      blocks to put them into; what arrives is copied there at every `poll`
    ...       until all are in place, or the rest is not coming: every load is finished, once

A recall that got a `load` is finished even if it is ended before, because vLLM keeps its blocks until it hears of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pagoda.integrations.vllm.block_io import VllmBlocks
from pagoda.integrations.vllm.messages import Answer, Ask, Load, Replies
from pagoda.kv.fetch import Fetch
from pagoda.kv.hierarchy import Hierarchy, WritePolicy
from pagoda.kv.keys import OwnerTag
from pagoda.kv.tiers.records import RecordId
from pagoda.kv.transfer import ByteRows, Lane


@dataclass(slots=True, eq=False)
class _Recall:
    """`arrived` are blocks in staging memory; `placed` the sources of those in vLLM's cache, from `load.first` on."""

    ids: Sequence[RecordId]
    fetch: Fetch
    arrived: dict[int, tuple[Lane, ByteRows]] = field(default_factory=dict)
    load: Load | None = None
    placed: list[Lane] = field(default_factory=list)
    is_answered: bool = False
    has_all: bool = False

    def take_in(self) -> None:
        """Take what came."""
        self.has_all = self.fetch.done.is_set()  # asked first: a piece may arrive between the two
        while not self.fetch.pieces.empty():
            piece = self.fetch.pieces.get()
            for block, payload in piece.blocks.items():
                self.arrived[block] = piece.lane, payload

    def run(self, start: int) -> list[tuple[Lane, ByteRows]]:
        """The arrived blocks from `start` on, as far as one follows the other."""
        blocks: list[tuple[Lane, ByteRows]] = []
        while (block := self.arrived.get(start + len(blocks))) is not None:
            blocks.append(block)
        return blocks

    @property
    def is_over(self) -> bool:
        """Whether nothing more is worth waiting for."""
        fetch = self.fetch
        late = fetch.elapsed_s > fetch.worth_waiting_s(fetch.num_loaded)
        return self.has_all or fetch.hedged.is_set() or late


class Recalls:
    """All recalls of a worker.

    Args:
        hierarchy: the tiers.
        blocks: vLLM's cache.
        block_size: tokens in a block, for counting.
        shard: the worker's rank.
        owner: whose all records are.

    Attributes:
        replies, finished, failed_blocks: what to tell vLLM; the owner takes and replaces them.
    """

    def __init__(self, hierarchy: Hierarchy, blocks: VllmBlocks, block_size: int, shard: int, owner: OwnerTag) -> None:
        self.replies = Replies()
        self.finished: set[str] = set()
        self.failed_blocks: set[int] = set()
        self._hierarchy = hierarchy
        self._blocks = blocks
        self._block_size = block_size
        self._shard = shard
        self._owner = owner
        self._open: dict[str, _Recall] = {}

    def start(self, ask: Ask) -> None:
        """Begin to load what was asked for."""
        self.end(ask.request_id)
        ids = [RecordId(key, shard=self._shard) for key in ask.keys]
        fetch = self._hierarchy.fetcher.fetch([[record] for record in ids], ask.recompute_s, ask.patience_s)
        self._open[ask.request_id] = _Recall(ids, fetch)

    def load(self, load: Load) -> None:
        """Say where to put it. If there is nothing any more, all of it has failed."""
        recall = self._open.get(load.request_id)
        if recall is None:
            self._finish(load, Answer(()), placed=0)
        else:
            recall.load = load

    def end(self, request_id: str) -> None:
        """What this request asked for is needed no more."""
        recall = self._open.pop(request_id, None)
        if recall is not None:
            self._hierarchy.fetcher.end(recall.fetch)
            if recall.load is not None:
                self._finish(recall.load, self._report(recall, recall.placed), len(recall.placed))

    def poll(self) -> None:
        """Answer what can be answered and place what arrived. Mutates vLLM's cache."""
        self._hierarchy.arrived.clear()
        for name, recall in list(self._open.items()):
            recall.take_in()
            if recall.load is not None:
                self._place(recall, recall.load)
                if len(recall.placed) == len(recall.load.block_ids) or recall.is_over:
                    self.end(name)
            elif not recall.is_answered:
                self._answer(name, recall)

    def wait(self, timeout_s: float) -> None:
        """Sleep until something arrives, at most so long, if anything is awaited."""
        if any(recall.load is not None or not recall.is_answered for recall in self._open.values()):
            self._hierarchy.arrived.wait(timeout_s)

    def close(self) -> None:
        """Let go of everything."""
        for name in list(self._open):
            self.end(name)

    def _answer(self, name: str, recall: _Recall) -> None:
        fetch, here = recall.fetch, recall.run(0)
        if recall.is_over:
            sources = [lane for lane, _ in here]
        elif here and fetch.leading is not None:
            sources = list(fetch.leading)
        else:
            return
        recall.is_answered = True
        self.replies.answers[name] = 1, self._report(recall, sources)
        if not sources:
            self.end(name)

    def _report(self, recall: _Recall, sources: Sequence[Lane]) -> Answer:
        """What to tell the scheduler."""
        fetch, names = recall.fetch, tuple(lane.name for lane in sources)
        if fetch.leading is None:
            return Answer(names, skipped=tuple(lane.name for lane in self._hierarchy.lanes))
        return Answer(names, len(fetch.leading), fetch.num_slower, fetch.num_failed, tuple(fetch.skipped))

    def _place(self, recall: _Recall, load: Load) -> None:
        """Copy what arrived at the front of a load into vLLM's blocks."""
        start = load.first + len(recall.placed)
        run = recall.run(start)[: len(load.block_ids) - len(recall.placed)]
        if not run:
            return
        ids = load.block_ids[len(recall.placed) :][: len(run)]
        for block_id, (_, payload) in zip(ids, run, strict=True):
            self._blocks.import_block(block_id, payload[0])
        for index, (lane, _) in enumerate(run, start):
            del recall.arrived[index]
            recall.placed.append(lane)
            lane.tally.add("restored_tokens", self._block_size)
        self._to_faster(recall.ids[start : start + len(run)], run)
        self._hierarchy.fetcher.taken(recall.fetch, len(run))

    def _to_faster(self, ids: Sequence[RecordId], run: Sequence[tuple[Lane, ByteRows]]) -> None:
        """Write what came from a slower tier to the faster ones before it."""
        for lane, indices in _by_lane([lane for lane, _ in run]):
            if lane is not self._hierarchy.lanes[0]:
                rows = np.stack([run[i][1][0] for i in indices])
                owners = [self._owner] * len(indices)
                self._hierarchy.write(WritePolicy.THROUGH, [ids[i] for i in indices], rows, owners, above=lane)

    def _finish(self, load: Load, report: Answer, placed: int) -> None:
        self.finished.add(load.request_id)
        self.failed_blocks.update(load.block_ids[placed:])
        self.replies.loaded[load.request_id] = 1, report


def _by_lane(lanes: Sequence[Lane]) -> Iterator[tuple[Lane, list[int]]]:
    """The positions of each lane."""
    for lane in dict.fromkeys(lanes):
        yield lane, [i for i, other in enumerate(lanes) if other is lane]
