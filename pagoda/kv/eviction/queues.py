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

from bisect import insort

from pagoda.kv.eviction.base import Evictable, EvictionPolicy

DEFAULT_PRIORITY = 35


class Queues:
    """The policies of one tree."""

    def __init__(self, policy: EvictionPolicy, block_size: int) -> None:
        policy.bind(block_size)
        self._policies = {(0, DEFAULT_PRIORITY): policy}
        self._priorities = {0: [DEFAULT_PRIORITY]}  # of each account, ascending
        self._first = policy

    def of(self, node: Evictable) -> EvictionPolicy:
        """The policy that has a node now."""
        policy = self._policies.get((node.account, node.priority))
        if policy is None:
            policy = self._policies[node.account, node.priority] = self._first.sibling()
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
