"""As much of vLLM as a connector sees: requests, blocks, steps. Its KV is a digest of all tokens up to a position."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import torch

from pagoda.errors import TierError
from pagoda.integrations.vllm.messages import Orders, Replies
from pagoda.integrations.vllm.scheduler import SchedulerSide
from pagoda.integrations.vllm.settings import Settings
from pagoda.integrations.vllm.worker import WorkerSide
from pagoda.kv.keys import BlockKey, KeyChain
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier
from pagoda.kv.tiers.records import Failed, GetResult, Target
from tests.waiting import PATIENCE_S

SIZE = 4  # tokens in a block
NUM_LAYERS = 3
NUM_BLOCKS = 64
_ids = itertools.count()


@dataclass
class FakeRequest:
    all_token_ids: list[int]
    kv_transfer_params: Mapping[str, Any] | None = None
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False
    num_computed_tokens: int = 0
    request_id: str = field(default_factory=lambda: f"r{next(_ids)}")

    def __post_init__(self) -> None:
        self.prompt_token_ids: Sequence[int] | None = list(self.all_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def kv_of(tokens: Sequence[int], position: int, layer: int, shard: int) -> np.ndarray:
    """The bytes of one token in one layer."""
    text = f"{list(tokens[: position + 1])} {layer} {shard}"
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), dtype=np.uint8)


class FakeVllm:
    """One engine with a connector and some workers, each with a cache of its own."""

    def __init__(self, settings: Settings, num_workers: int = 1, fingerprint: bytes = bytes(32)) -> None:
        self.scheduler = SchedulerSide(KeyChain(fingerprint, settings.secret), SIZE, num_workers)
        self.caches = [torch.zeros(NUM_LAYERS, NUM_BLOCKS, SIZE, 16, dtype=torch.uint8) for _ in range(num_workers)]
        self.workers = [WorkerSide(settings, SIZE, NUM_BLOCKS, rank, num_workers) for rank in range(num_workers)]
        for worker, cache in zip(self.workers, self.caches, strict=True):
            worker.register({f"layer {i}": cache[i] for i in range(NUM_LAYERS)})
        self.tables: dict[str, list[int]] = {}
        self._free = list(range(NUM_BLOCKS))
        self._finished: Counter[str] = Counter()
        self.failed: set[int] = set()

    def step(self, scheduled: Mapping[str, FakeRequest], num_tokens: Mapping[str, int]) -> set[str]:
        """Compute so many tokens of each request; returns the requests whose loads all workers finished."""
        orders = self.scheduler.orders(num_tokens, lambda name: self.tables[name])
        told = []
        for shard, worker in enumerate(self.workers):
            own = Orders(**{name: getattr(orders, name) for name in Orders.__dataclass_fields__})
            own.loads, own.saves = list(orders.loads), list(orders.saves)
            worker.begin(own)
            for name, count in num_tokens.items():
                self._compute(scheduled[name], count, shard)
            worker.start_loads()
            worker.save()
            self._finished.update(worker.finish())
            self.failed |= worker.take_failed_blocks()
            told.append(worker.take_replies())
        for name, count in num_tokens.items():
            scheduled[name].num_computed_tokens += count
        replies = [reply for reply in told if reply is not None]
        self.scheduler.update(reduce(Replies.aggregate, replies) if replies else None)
        done = {name for name, count in self._finished.items() if count == len(self.workers)}
        for name in done:
            del self._finished[name]
        return done

    def _compute(self, request: FakeRequest, count: int, shard: int) -> None:
        start = request.num_computed_tokens
        for position in range(start, start + count):
            block = self.tables[request.request_id][position // SIZE]
            for layer in range(NUM_LAYERS):
                kv = kv_of(request.all_token_ids, position, layer, shard)
                self.caches[shard][layer, block, position % SIZE] = torch.from_numpy(kv.copy())

    def run(self, request: FakeRequest, limit_s: float = PATIENCE_S, chunk: int = 16) -> dict[str, Any] | None:
        """Admit a request, compute its prompt, check its KV, end it; returns what its client is told."""
        self.admit(request, limit_s)
        name = request.request_id
        while request.num_computed_tokens < request.num_tokens:
            count = min(chunk, request.num_tokens - request.num_computed_tokens)
            self.step({name: request}, {name: count})
        self.check(request)
        return self.end(request)

    def admit(self, request: FakeRequest, limit_s: float = PATIENCE_S) -> int:
        """Let a request get what the tiers have; returns how many tokens."""
        deadline = time.monotonic() + limit_s
        while (matched := self.scheduler.matched_tokens(request, 0)) is None:  # type: ignore[arg-type]
            assert time.monotonic() < deadline, "nobody answered"
            self.step({}, {})
        name = request.request_id
        ids = self.tables[name] = [self._free.pop() for _ in range(-(-request.num_tokens // SIZE))]
        self.scheduler.allocated(request, ids, matched)  # type: ignore[arg-type]
        request.num_computed_tokens = matched
        if matched:
            while name not in self.step({}, {}):
                assert time.monotonic() < deadline, "the load did not end"
            bad = [i for i, block in enumerate(ids) if block in self.failed]
            request.num_computed_tokens = min([matched, *(i * SIZE for i in bad)])
            self.failed.clear()
            if not request.num_computed_tokens:
                assert self.scheduler.matched_tokens(request, 0) == 0  # type: ignore[arg-type]
            self.scheduler.allocated(request, ids, 0)  # type: ignore[arg-type]
        return request.num_computed_tokens

    def check(self, request: FakeRequest) -> None:
        """Every computed token's KV is right, in every layer of every worker."""
        for shard, cache in enumerate(self.caches):
            for position in range(request.num_computed_tokens):
                block = self.tables[request.request_id][position // SIZE]
                for layer in range(NUM_LAYERS):
                    kv = kv_of(request.all_token_ids, position, layer, shard)
                    assert np.array_equal(cache[layer, block, position % SIZE].numpy(), kv), (position, layer, shard)

    def end(self, request: FakeRequest) -> dict[str, Any] | None:
        told = self.scheduler.finished(request)  # type: ignore[arg-type]
        self._free += self.tables.pop(request.request_id, [])
        for cache in self.caches:
            cache[:, self._free] = 0xEE  # poison
        self.step({}, {})
        return told

    def settle(self) -> None:
        """Wait until all that was saved is written."""
        for worker in self.workers:
            assert worker._parts.hierarchy.flush(PATIENCE_S)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


class HoleyTier(MemoryTier):
    """Says that it has all, and cannot give some."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.unreadable: set[BlockKey] = set()
        self.slow_s = 0.0

    def _get_into(self, targets: Sequence[Target]) -> list[GetResult]:
        time.sleep(self.slow_s)
        good = super()._get_into(targets)
        return [
            Failed(TierError("unreadable")) if target.id.key in self.unreadable else result
            for target, result in zip(targets, good, strict=True)
        ]


class Lent(FaultyTier):
    """A tier that another engine has too; it stays open."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner, Faults())

    def _close(self) -> None:
        pass
