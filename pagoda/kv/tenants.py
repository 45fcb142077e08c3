"""Tenants: whose blocks are whose, and who gives way when the pool is full.

    used
     │ ▓            ▓ over its guaranteed share: gives way, most the tenant with the largest excess / weight
     │ ▓   ▓
     │ ▒   ▒   ░    ▒ ░ within it: gives way to itself alone
     └──────────
       a   b   c

A tenant without a share of its own is in the commons with all others of that kind: one account, without a guarantee and
of weight 1, in which the eviction policy alone decides. Excess over weight is levelled as by weighted max-min fairness
(Demers et al., 1989), so under pressure each account tends to its guarantee plus its weight's part of the rest.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from pagoda.errors import ConfigError
from pagoda.kv.allocator import Allocator, BlockIds

COMMONS = 0


class Taker(Enum):
    """Who takes blocks, if no tenant does: the operator, before whom no share is guaranteed, or whoever comes next."""

    OPERATOR = "operator"
    NEXT = "next"


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant's part of the pool.

    Attributes:
        guaranteed: the part of all blocks that nobody else can take from it, 0 to 1.
        weight: how much of the rest it gets, relative to others' weights.

    Raises:
        ConfigError: either is out of range.
    """

    guaranteed: float = 0.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.guaranteed <= 1:
            raise ConfigError(f"a guaranteed share is between 0 and 1, got {self.guaranteed}")
        if not 0 < self.weight <= 1e6:
            raise ConfigError(f"a weight is above 0 and at most 1e6, got {self.weight}")


@dataclass(eq=False, slots=True)
class Tenant:
    """A namespace, where its blocks are counted, and what it did since the start.

    Attributes:
        index: its label in the allocator.
        account: with whom it shares a share; COMMONS, or one of its own.
        num_query_tokens, num_hit_tokens: of its prompts; a hit is in the pool or comes from a tier.
        num_evicted_blocks: blocks it lost to make room.
    """

    name: str
    index: int
    account: int
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_written_tokens: int = 0
    num_restored_tokens: int = 0
    num_prefetched_tokens: int = 0  # of those, there before their requests ran
    num_evicted_blocks: int = 0

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV was computed, and not loaded from a lower tier."""
        return self.num_written_tokens - self.num_restored_tokens


class Tenants:
    """Every tenant seen, and the shares of those that have one. Tells who gives way; evicts nothing itself.

    Args:
        allocator: counts each tenant's blocks.
        shares: by namespace.
        slack: blocks that an eviction may take beyond what it was asked for.

    Raises:
        ConfigError: the shares guarantee more than the pool.
    """

    def __init__(self, allocator: Allocator, shares: Mapping[str, Share], slack: int = 0) -> None:
        if sum(share.guaranteed for share in shares.values()) > 1 + 1e-9:
            raise ConfigError("tenants are guaranteed more than the whole pool")
        self._allocator = allocator
        self._tenants: dict[str, Tenant] = {}
        self._guaranteed = [0, *(int(share.guaranteed * allocator.num_blocks) for share in shares.values())]
        self._kept = [blocks + slack if blocks else 0 for blocks in self._guaranteed]
        self._weights = [1.0, *(share.weight for share in shares.values())]
        self._owners = [self._add(name, account) for account, name in enumerate(shares, COMMONS + 1)]

    def _add(self, name: str, account: int) -> Tenant:
        tenant = self._tenants[name] = Tenant(name, self._allocator.add_label(), account)
        return tenant

    def of(self, namespace: str) -> Tenant:
        """The tenant of a namespace; a new one is in the commons."""
        return self._tenants.get(namespace) or self._add(namespace, COMMONS)

    def all(self) -> Collection[Tenant]:
        """Every tenant seen or configured."""
        return self._tenants.values()

    @property
    def has_shares(self) -> bool:
        """Whether any tenant has a share of its own."""
        return bool(self._owners)

    def guaranteed(self, namespace: str) -> int:
        """Blocks that a tenant is guaranteed."""
        return self._guaranteed[self.of(namespace).account]

    @property
    def num_kept(self) -> int:
        """Most blocks that shares keep from whoever is not guaranteed any."""
        return sum(self._kept)

    def held_and_cached(self, tenant: Tenant) -> tuple[int, int]:
        """Blocks of a tenant that requests or leases hold, and those that only the tree has."""
        cached = self._allocator.num_cached_by(tenant.index)
        return self._allocator.num_used_by(tenant.index) - cached, cached

    def _used(self, account: int) -> int:
        if account != COMMONS:
            return self._allocator.num_used_by(self._owners[account - 1].index)
        used = self._allocator.num_blocks - self._allocator.num_free
        return used - sum(self._allocator.num_used_by(owner.index) for owner in self._owners)

    def _cached(self, account: int) -> int:
        if account != COMMONS:
            return self._allocator.num_cached_by(self._owners[account - 1].index)
        return self._allocator.num_cached - sum(self._allocator.num_cached_by(owner.index) for owner in self._owners)

    def is_within(self, namespace: str, num_more: int = 0) -> bool:
        """Whether a tenant would be within its guaranteed share with so many blocks more."""
        account = self.of(namespace).account
        return self._used(account) + num_more <= self._guaranteed[account]

    def entitlements(self) -> list[float]:
        """Blocks that each account is due by guarantee and weight; what those without blocks leave is shared."""
        total, used = self._allocator.num_blocks, [self._used(account) > 0 for account in range(len(self._weights))]
        weight = sum(self._weights[account] for account, uses in enumerate(used) if uses)
        kept = sum(self._guaranteed[account] for account, uses in enumerate(used) if uses)
        due = []
        for own, guaranteed, uses in zip(self._weights, self._guaranteed, used, strict=True):
            others = (weight - own, kept - guaranteed) if uses else (weight, kept)
            due.append(guaranteed + own / (others[0] + own) * max(0, total - others[1] - guaranteed))
        return due

    def num_held_by(self, account: int) -> int:
        """Blocks of an account that requests or leases hold."""
        return self._used(account) - self._cached(account)

    def gives_way(self, loser: str, taker: str) -> bool:
        """Whether a tenant must give blocks up when another one needs some: the same, or one over its share."""
        mine = self.of(loser).account
        return mine == self.of(taker).account or self._used(mine) > self._guaranteed[mine]

    def num_evictable(self, taker: str) -> int:
        """Cached blocks that go before a tenant is told that there is no room."""
        if not self._owners:
            return self._allocator.num_cached
        own = self.of(taker).account
        return sum(self._spare(account, own) for account in range(len(self._guaranteed)))

    def _spare(self, account: int, taker: int | Taker) -> int:
        """Cached blocks that an account gives up for another; all for itself and for the operator."""
        cached = self._cached(account)
        if taker in (Taker.OPERATOR, account):
            return cached
        return max(0, min(cached, self._used(account) - self._kept[account]))

    def plan(self, count: int, taker: str | Taker, unable: Collection[int] = ()) -> list[tuple[int, int]]:
        """Which accounts give up how many of `count` blocks; fewer than that if not so many may go. Mutates nothing.

        Args:
            taker: the namespace that needs them, or who else.
            unable: accounts that have nothing more to give.
        """
        if not self._owners:
            return [] if unable else [(COMMONS, count)]
        own = self.of(taker).account if isinstance(taker, str) else taker
        able = [account for account in range(len(self._guaranteed)) if account not in unable]
        spare = {account: self._spare(account, own) for account in able}
        excess = {account: self._used(account) - self._guaranteed[account] for account in spare}
        # Among equals the taker gives way, or two would take the same block from each other for ever.
        heap = [(-excess[a] / self._weights[a], a != own, a) for a in spare if spare[a]]
        heapq.heapify(heap)
        losses: dict[int, int] = {}
        while heap and count:  # a block at a time, so that all end level
            account = heap[0][2]
            losses[account] = losses.get(account, 0) + 1
            count -= 1
            left = excess[account] - losses[account]
            if losses[account] < spare[account]:
                heapq.heapreplace(heap, (-left / self._weights[account], account != own, account))
            else:
                heapq.heappop(heap)
        return list(losses.items())

    def names_of(self, ids: BlockIds) -> list[str]:
        """Whose each block is; of a free one, whose it was."""
        names = list(self._tenants)
        return [names[label] for label in self._allocator.labels(ids)]

    def note_evicted(self, ids: BlockIds) -> None:
        """Count evicted blocks against those who lost them."""
        for tenant, count in zip(self._tenants.values(), self._allocator.count_by_label(ids), strict=False):
            tenant.num_evicted_blocks += int(count)
