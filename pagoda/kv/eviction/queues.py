"""Queues: a tree's candidates for eviction, apart by account and priority, each part in the order of one policy.

    account 0   priority 10  [policy]   <- first to go when account 0 gives way
                         35  [policy]      35 is what has no directive
                         80  [policy]
    account 1            35  [policy]

Priorities are those of TensorRT-LLM's retention directives: lower ones go first, whatever the policy thinks of them.
Which account gives way is not decided here. With one account and no directives there is one policy, as if this were
not here.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import insort

from pagoda.kv.eviction.base import Evictable, EvictionPolicy

DEFAULT_PRIORITY = 35


class Queues:
    """The policies of one tree."""

    def __init__(self, policy: EvictionPolicy, block_size: int, num_blocks: int) -> None:
        policy.bind(block_size, num_blocks)
        self._policies = {(0, DEFAULT_PRIORITY): policy}
        self._priorities = {0: [DEFAULT_PRIORITY]}  # of each account, ascending
        self.first = policy  # the one that learns
        self._expiries: list[tuple[float, int, Evictable]] = []  # of nodes with an end, and of some without one now
        self._num_expiring = 0
        self._order = itertools.count()

    def of(self, node: Evictable) -> EvictionPolicy:
        """The policy that has a node now."""
        policy = self._policies.get((node.account, node.priority))
        if policy is None:
            policy = self._policies[node.account, node.priority] = self.first.sibling()
            insort(self._priorities.setdefault(node.account, []), node.priority)
        return policy

    def take(self, account: int) -> tuple[Evictable, EvictionPolicy] | None:
        """Take out the leaf of an account to evict next, and who chose it; None when there is none."""
        for priority in self._priorities.get(account, ()):
            policy = self._policies[account, priority]
            leaf = policy.take()
            if leaf is not None:
                return leaf, policy
        return None

    def place(self, node: Evictable, priority: int, expires_at: float) -> None:
        """Give a node a priority until a time, when it gets the default one again."""
        queued = node.queued
        self.forget(node)
        node.priority, node.expires_at = priority, expires_at
        if queued:
            self.of(node).offer(node)
        if expires_at < math.inf:
            self._num_expiring += 1
            heapq.heappush(self._expiries, (expires_at, next(self._order), node))
            if len(self._expiries) > 2 * self._num_expiring + 64:
                self._expiries = [entry for entry in self._expiries if entry[2].expires_at == entry[0]]
                heapq.heapify(self._expiries)

    def forget(self, node: Evictable) -> None:
        """A node is no candidate any more, and has no end."""
        self.of(node).discard(node)
        if node.expires_at < math.inf:
            node.expires_at = math.inf
            self._num_expiring -= 1

    def expire(self, now: float) -> None:
        """Give the default priority to nodes whose time is over. O(log n) each."""
        while self._expiries and self._expiries[0][0] <= now:
            end, _, node = heapq.heappop(self._expiries)
            if node.expires_at == end:
                self.place(node, DEFAULT_PRIORITY, math.inf)
