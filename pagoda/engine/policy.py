"""Queue policies: the order in which waiting samples are admitted.

Each takes the waiting samples in order of arrival and yields them in order of admission. Service classes come before
all of them: `Ranks` tells a sample's class, which waiting raises. Within a class, tenants with shares take turns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from pagoda.engine.request import Sample
from pagoda.engine.tenants import PROMOTE_S, ServiceClass, TenantSpec
from pagoda.kv.cache import KVCache
from pagoda.kv.tenants import Tenants

QueuePolicy = Callable[[Sequence[Sample], KVCache], Iterable[Sample]]

_LPM_DEPTH = 128
_LPM_TOKENS_PER_SECOND = 2000.0


def fcfs(waiting: Sequence[Sample], cache: KVCache) -> Iterable[Sample]:
    """First come, first served."""
    return waiting


def priority(waiting: Sequence[Sample], cache: KVCache) -> Iterable[Sample]:
    """Lower `priority` values first, then first come."""
    return sorted(waiting, key=lambda sample: sample.request.priority)


def longest_prefix_match(waiting: Sequence[Sample], cache: KVCache) -> Iterable[Sample]:
    """Longest known prefix first, as SGLang does, so that hits are used before they are evicted.

    Waiting ages: each second counts as much as 2,000 more tokens of prefix, so none starves. The tree is asked for
    the oldest 128 only; the others follow in order of arrival.
    """
    now = time.perf_counter()

    def merit(sample: Sample) -> float:
        age = now - sample.request.arrived_at
        return cache.lookup(sample.tokens.view, sample.request.scope).num_tokens + _LPM_TOKENS_PER_SECOND * age

    yield from sorted(waiting[:_LPM_DEPTH], key=merit, reverse=True)
    yield from waiting[_LPM_DEPTH:]


QUEUE_POLICIES: Mapping[str, QueuePolicy] = {"fcfs": fcfs, "priority": priority, "lpm": longest_prefix_match}


class Ranks:
    """Service classes as numbers, 0 for the first."""

    def __init__(self, tenants: Mapping[str, TenantSpec]) -> None:
        self._ranks = {name: spec.service_class.rank for name, spec in tenants.items()}
        self._are_equal = not set(self._ranks.values()) - {ServiceClass.STANDARD.rank}

    def of(self, sample: Sample) -> int:
        """A sample's class: its tenant's."""
        return self._ranks.get(sample.request.scope.namespace, ServiceClass.STANDARD.rank)

    def aged(self, sample: Sample) -> int:
        """The class that it has earned: one higher for every PROMOTE_S seconds since it arrived."""
        if self._are_equal:
            return ServiceClass.STANDARD.rank
        return max(0, self.of(sample) - int((time.perf_counter() - sample.request.arrived_at) / PROMOTE_S))

    def is_promoted(self, sample: Sample) -> bool:
        """Whether that is another than its own."""
        return self.aged(sample) < self.of(sample)


def in_turn(
    samples: Iterable[Sample],
    rank: Callable[[Sample], int],
    tenants: Tenants,
    full: Collection[int],
    num_blocks: Callable[[Sample], int],
) -> Iterator[Sample]:
    """Samples by class. Within one, where tenants have shares, the next is of the account that uses least of its own.

    So a tenant that sends more gets no more than its share while others wait: weighted max-min fairness of memory. Half
    of what the next sample takes is counted as used: without, whoever is due less would be rounded up (Webster's rule,
    as seats are given to parties).

    Args:
        full: accounts to pass over from now on; the caller adds to it.
        num_blocks: that a sample will take.
    """
    ranked = sorted(((rank(sample), sample) for sample in samples), key=itemgetter(0))
    if not tenants.has_shares:
        yield from (sample for _, sample in ranked)
        return
    due = tenants.entitlements()
    for _, same in groupby(ranked, key=itemgetter(0)):
        lines: dict[int, deque[Sample]] = {}
        for _, sample in same:
            lines.setdefault(tenants.of(sample.request.scope.namespace).account, deque()).append(sample)
        while lines:
            uses = {
                account: (tenants.num_held_by(account) + num_blocks(line[0]) / 2) / max(1.0, due[account])
                for account, line in lines.items()
            }
            account = min(uses, key=uses.__getitem__)
            if account not in full:
                yield lines[account].popleft()
            if account in full or not lines[account]:
                del lines[account]
