"""CacheAdmin: what an operator may see and do of the cache. Runs on the engine's thread: see `AsyncEngine.manage`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from pagoda.engine.history import History
from pagoda.errors import LeaseRefused, PoolIsLeased
from pagoda.kv.block_map import BlockMap as BlockMap
from pagoda.kv.block_map import BlockUse as BlockUse
from pagoda.kv.cache import KVCache
from pagoda.kv.keys import Scope
from pagoda.kv.observe import Explanation
from pagoda.kv.radix_node import TokenArray, as_tokens
from pagoda.kv.retained import Retained
from pagoda.kv.tiered import TieredCache
from pagoda.kv.view import PrefixView as PrefixView
from pagoda.kv.write_queue import Purge as Purge


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease; a pin has no `ttl_s`, and never ends. A `name` says what it belongs to.

    `held_in` is "pool", or the name of the tier that has its blocks.
    """

    id: str
    tenant: str
    name: str
    num_tokens: int
    num_blocks: int
    ttl_s: float | None
    remaining_s: float | None
    held_in: str


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What a tenant has and did.

    Attributes:
        num_blocks: in the tree.
        num_leased_blocks: charged to its leases.
        num_held_blocks: of its requests and leases, in the tree or not.
        num_cached_blocks: in the tree alone; they may be evicted.
        num_guaranteed_blocks: that nobody else can take from it.
        num_evicted_blocks: that it lost to make room; this and the tokens are counted since the start.
        tier_bytes: what it has in each tier, as the tier said lately.
    """

    tenant: str
    num_blocks: int
    num_leased_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_guaranteed_blocks: int
    num_query_tokens: int
    num_hit_tokens: int
    num_computed_tokens: int
    num_restored_tokens: int
    num_prefetched_tokens: int
    num_evicted_blocks: int
    tier_bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class PublicPrefix:
    """A text that every tenant hits, and how many of its tokens are cached for all now."""

    tokens: list[int]
    num_cached_tokens: int


class CacheAdmin:
    """Looks at a cache and at the last requests, and changes what the cache retains."""

    def __init__(self, cache: KVCache, history: History) -> None:
        self._cache = cache
        self._history = history

    def explanation(self, request_id: str, tenant: str) -> Explanation | None:
        """Why a recent request's prompt did not hit further; None if it is another tenant's or not remembered."""
        return self._history.explain(request_id, tenant)

    def usage(self) -> list[TenantUsage]:
        """Every tenant's, by name. O(blocks)."""
        in_tree, leased = self._cache.blocks_by_namespace(), self._cache.retention.usage
        tenants = self._cache.tenants
        in_tiers = self._cache.bytes_by_tier() if isinstance(self._cache, TieredCache) else {}
        return [
            TenantUsage(
                tenant.name,
                in_tree[tenant.name],
                leased.get(tenant.name, 0),
                *tenants.held_and_cached(tenant),
                tenants.guaranteed(tenant.name),
                tenant.num_query_tokens,
                tenant.num_hit_tokens,
                tenant.num_computed_tokens,
                tenant.num_restored_tokens,
                tenant.num_prefetched_tokens,
                tenant.num_evicted_blocks,
                in_tiers.get(tenant.name, {}),
            )
            for tenant in sorted(tenants.all(), key=lambda tenant: tenant.name)
        ]

    def prefixes(self, tenant: str | None = None, limit: int = 1000) -> list[PrefixView]:
        """The tree of a tenant, or of all: the first `limit` runs, parents first. O(of what is returned)."""
        return list(islice(self._cache.prefixes(tenant), limit))

    def outline(self, tenant: str | None, limit: int) -> list[PrefixView]:
        """The most used runs of the tree of a tenant, or of all: at most `limit`, parents first."""
        return self._cache.outline(tenant, limit)

    def block_map(self, max_cells: int) -> BlockMap:
        """What the pool is used for; its labels are indices of `tenants`."""
        return self._cache.block_map(max_cells)

    def tenants(self) -> list[str]:
        """Every tenant seen or configured."""
        return [tenant.name for tenant in self._cache.tenants.all()]

    def leases(self, tenant: str | None = None) -> list[LeaseInfo]:
        """The leases of a tenant, or all; the oldest first."""
        return [_info(lease) for lease in self._cache.retention.leases if tenant in (None, lease.owner)]

    def check_room(self, tokens: Sequence[int], scope: Scope) -> None:
        """Whether a lease on a prefix could be granted now, before it is computed for it. What a tier says is not known
        before it is asked.

        Raises:
            LeaseRefused: it would not fit the lease budget.
        """
        cache, prefix = self._cache, as_tokens(tokens)
        whole = prefix[: prefix.size // cache.block_size * cache.block_size]
        missing = cache.peak_blocks(whole.size, 0) - cache.lookup(prefix, scope).num_blocks
        try:
            cache.retention.check_room(max(0, missing), scope.namespace)
        except PoolIsLeased:
            if not (isinstance(cache, TieredCache) and cache.can_promise):
                raise

    def pin(self, tokens: Sequence[int], scope: Scope) -> LeaseInfo:
        """Keep the cached whole blocks of a prefix until its lease is ended.

        Raises:
            LeaseRefused: nothing of it is cached, or it does not fit the lease budget.
        """
        retention = self._cache.retention
        try:
            return _info(retention.retain(as_tokens(tokens), scope, ttl_s=None, owner=scope.namespace))
        except LeaseRefused:
            retention.num_refused += 1
            raise

    def publish(self, tokens: Sequence[int], scope: Scope) -> int:
        """Let every tenant hit a prefix: see `KVCache.publish`. Returns how many of its tokens are cached for all now.

        Raises:
            LeaseRefused: it is shorter than a block, or too much is public.
        """
        return self._cache.publish(as_tokens(tokens), scope)

    def published(self) -> list[PublicPrefix]:
        """What is public, the oldest first."""
        return [PublicPrefix(tokens.tolist(), num_cached) for tokens, num_cached in self._cache.published()]

    def unpublish(self, tokens: Sequence[int]) -> int:
        """End every public prefix that begins with these tokens; returns how many that were."""
        return self._cache.unpublish(as_tokens(tokens))

    def end_lease(self, lease_id: str, tenant: str | None = None) -> bool:
        """End a lease or pin, of this tenant if one is given; false if there is none."""
        lease = self._cache.retention.find(lease_id)
        if lease is None or tenant not in (None, lease.owner):
            return False
        self._cache.retention.release(lease)
        return True

    def lease_names(self) -> set[str]:
        """The names of all leases that have one."""
        return {lease.name for lease in self._cache.retention.leases if lease.name}

    def end_named(self, tenant: str, name: str) -> None:
        """End a tenant's lease of a name, if there is one."""
        for lease in self._named(tenant, name):
            self._cache.retention.release(lease)

    def postpone(self, tenant: str, name: str, ttl_s: float) -> None:
        """Let a tenant's lease of a name end `ttl_s` seconds from now, if there is one."""
        self._cache.retention.expire()
        for lease in self._named(tenant, name):
            self._cache.retention.postpone(lease, ttl_s)

    def _named(self, tenant: str, name: str) -> list[Retained]:
        return [lease for lease in self._cache.retention.leases if (lease.owner, lease.name) == (tenant, name)]

    def purge_tenant(self, tenant: str) -> tuple[int, Purge | None]:
        """Forget all of a tenant, leased or in use or not, in tiers too.

        Returns:
            How many blocks that took from the tree; how far tiers are, None where there are none.
        """
        self._history.forget_tenant(tenant)
        # Tiers first: what the pool has is then counted with the rest of what they had.
        below = self._cache.purge_below(tenant) if isinstance(self._cache, TieredCache) else None
        return self._cache.purge(tenant), below

    def purge_prefix(self, tokens: Sequence[int] | TokenArray, scope: Scope) -> int:
        """Forget what begins with a prefix, and what only led there; returns how many blocks the tree lost."""
        prefix = as_tokens(tokens)
        self._history.forget_prefix(prefix, scope)
        return self._cache.purge(scope, prefix)

    def request_ids(self, start: str) -> list[str]:
        """The ids of recent requests that start so."""
        return self._history.ids(start)

    def purge_request(self, request_id: str) -> int | None:
        """Forget what begins with a recent request's prompt; returns as `purge_prefix`, None if it is not known."""
        past = self._history.find(request_id)
        return None if past is None else self.purge_prefix(past.prompt, past.scope)

    def clear(self) -> int:
        """Evict all that no request and no lease holds; returns how many blocks that freed."""
        return self._cache.clear()


def _info(lease: Retained) -> LeaseInfo:
    remaining = None if lease.ttl_s is None else max(0.0, lease.expires_at - time.monotonic())
    held_in, num_blocks = lease.held_in or "pool", lease.num_below or lease.pinned.blocks.size
    return LeaseInfo(lease.id, lease.owner, lease.name, lease.num_tokens, num_blocks, lease.ttl_s, remaining, held_in)
