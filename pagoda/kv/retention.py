"""Retention: prefixes that stay until their lease expires, whatever the pressure.

    retain(prefix, ttl)   pin its blocks, as a request does ──> Retained; or LeaseRefused, with the reason
    refresh(hit)          whoever hits a leased prefix starts its time anew
    expire()              let go of what ran out: O(log n) each
    postpone(retained)    end at another time
    release(retained)     let go early
    keep_below(...)       a lease that a tier holds instead of the pool: it counts here, and takes no block

A leased block is a held block: eviction, conservation and what admission counts as available need nothing new. What is
new is the bound: leases never take more than `limit_blocks`, so requests always have the rest of the pool. A pin is a
lease without an end. A block under several leases is charged once, to the first lessee for as long as its lease lasts.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagoda.errors import LeaseRefused, PoolIsLeased
from pagoda.kv.allocator import BlockIds
from pagoda.kv.keys import Scope
from pagoda.kv.radix_node import TokenArray
from pagoda.kv.retained import PinnedPrefix, Retained

MAX_LEASES = 4096
KEPT_LONGER = 0.25  # of its time, a lease's copies outside the pool


class Pins(Protocol):
    """What retention needs of a cache."""

    block_size: int

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""

    def pin(self, tokens: TokenArray, scope: Scope) -> PinnedPrefix | None:
        """Hold the whole blocks that are known of a prefix; None if there is none."""

    def unpin(self, pinned: PinnedPrefix) -> None:
        """Let go of them."""

    def keep_copies(self, blocks: BlockIds, ttl_s: float) -> None:
        """Let copies of blocks that are outside the pool last so long; 0 if no lease needs them any more."""

    def keep_below(self, lease: Retained, ttl_s: float) -> None:
        """Let the tier that holds a lease keep its prefix so long; 0 if it ended."""


class Retention:
    """The table of leases. Not thread-safe: the engine's thread owns it.

    Args:
        pins: the cache.
        clock: seconds that never go back.

    Attributes:
        limit_blocks: most blocks under lease; whoever knows how much requests need sets it. None at first.
        limit_cause: what that bound comes from, and the setting that changes it, for those whose lease is refused.
        owner_limits: most of them charged to an owner; whoever is not in it has no limit of its own.
        guaranteed: blocks that each owner is sure of, leased or not; nobody else counts on those.
        unguaranteed_limit_blocks: most blocks that all leases may have beyond what their owners are guaranteed.
        num_refused: leases refused since the start; whoever says so counts, as a tier may take what the pool refuses.
        lapsed_at: of each block, when the last of its leases ran out; 0 if it has one, or had none.
    """

    def __init__(self, pins: Pins, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_blocks = 0
        self.limit_cause = "nothing is set aside for leases"
        self.owner_limits: dict[str, int] = {}
        self.guaranteed: Mapping[str, int] = {}
        self.unguaranteed_limit_blocks = pins.num_blocks
        self.num_refused = 0
        self._pins = pins
        self._clock = clock
        self._serials = itertools.count()
        self._leases: dict[int, Retained] = {}
        self._by_anchor: dict[int, list[Retained]] = {}  # anchor -> the leases that have it
        self._expiries: list[tuple[float, int]] = []  # (not after, serial): one of each timed lease, some of gone ones
        self._usage: Counter[str] = Counter()
        self._usage_below: Counter[str] = Counter()
        self._num_leases = np.zeros(pins.num_blocks, dtype=np.int32)  # of each block
        self._payer = np.zeros(pins.num_blocks, dtype=np.int64)  # of each block, the lease it is charged to
        self._copies_until = np.zeros(pins.num_blocks, dtype=np.float64)  # of each block, as told to the cache
        self.lapsed_at = np.zeros(pins.num_blocks, dtype=np.float64)
        self._is_anchor = np.zeros(pins.num_blocks, dtype=np.bool_)

    @property
    def leases(self) -> Collection[Retained]:
        """All leases that have not run out, the oldest first."""
        self.expire()
        return self._leases.values()

    @property
    def num_blocks(self) -> int:
        """Blocks under at least one lease."""
        self.expire()
        return self._usage.total()

    @property
    def usage(self) -> Mapping[str, int]:
        """Blocks charged to each owner."""
        self.expire()
        return self._usage

    @property
    def next_expiry_s(self) -> float | None:
        """Seconds until `expire` may have something to do; None if there is no lease with an end."""
        return max(0.0, self._expiries[0][0] - self._clock()) if self._expiries else None

    def find(self, lease_id: str) -> Retained | None:
        """The lease of this id, if it has not ended."""
        return next((lease for lease in self.leases if lease.id == lease_id), None)

    def retain(self, tokens: TokenArray, scope: Scope, *, ttl_s: float | None, owner: str, name: str = "") -> Retained:
        """Lease the whole blocks that are known of a prefix; an owner's lease of that name on it is prolonged.

        Raises:
            LeaseRefused: there is no whole block, or a bound would be exceeded; nothing changed.
        """
        self.expire()
        pinned = self._pins.pin(tokens, scope)
        try:
            if pinned is None:
                raise LeaseRefused(
                    f"only whole blocks of {self._pins.block_size} tokens can be leased, and this prefix of "
                    f"{tokens.size} tokens has none in the cache"
                )
            others = self._by_anchor.get(pinned.anchor, ())
            same = next((lease for lease in others if (lease.owner, lease.name) == (owner, name)), None)
            if same is None:
                return self._add(pinned, scope, ttl_s, owner, name)
        except LeaseRefused:
            if pinned is not None:
                self._pins.unpin(pinned)
            raise
        self._pins.unpin(pinned)
        same.prolong(self._clock(), ttl_s)
        self._keep_copies(same)
        return same

    def _add(self, pinned: PinnedPrefix, scope: Scope, ttl_s: float | None, owner: str, name: str) -> Retained:
        at = pinned.blocks.astype(np.intp)
        new = at[self._num_leases[at] == 0]
        self.check_room(new.size, owner)
        lease = Retained(next(self._serials), owner, name, scope, pinned, ttl_s, math.inf)
        if ttl_s is not None:
            lease.expires_at = self._clock() + ttl_s
            heapq.heappush(self._expiries, (lease.expires_at, lease.serial))
        self._leases[lease.serial] = lease
        self._by_anchor.setdefault(pinned.anchor, []).append(lease)
        self._is_anchor[pinned.anchor] = True
        self._num_leases[at] += 1
        self.lapsed_at[at] = 0
        self._charge(lease, new)
        self._keep_copies(lease)
        return lease

    def keep_below(
        self, pinned: PinnedPrefix, scope: Scope, num_blocks: int, ttl_s: float, owner: str, name: str, held_in: str
    ) -> Retained:
        """Note a lease that a tier holds since the pool refused it.

        Args:
            pinned: its tokens, and no blocks.
            num_blocks: what the tier has.

        Raises:
            LeaseRefused: its owner, or the server, has too many by now; nothing changed.
        """
        self._check_owner(num_blocks, owner)
        expires_at = self._clock() + ttl_s
        lease = Retained(next(self._serials), owner, name, scope, pinned, ttl_s, expires_at, held_in, num_blocks)
        lease.copies_until = expires_at
        heapq.heappush(self._expiries, (expires_at, lease.serial))
        self._leases[lease.serial] = lease
        self._usage_below[owner] += num_blocks
        return lease

    def _keep_copies(self, lease: Retained) -> None:
        """See that copies outside the pool outlast a lease, by a quarter of its time: so not every hit tells anew.

        Pins need none: they end with the process.
        """
        if lease.ttl_s is None:
            return
        if lease.held_in is not None:
            if lease.copies_until < lease.expires_at:
                lease.copies_until = lease.expires_at + lease.ttl_s * KEPT_LONGER
                self._pins.keep_below(lease, lease.copies_until - self._clock())
            return
        at = lease.pinned.blocks.astype(np.intp)
        short = at[self._copies_until[at] < lease.expires_at]
        if short.size:
            until = lease.expires_at + lease.ttl_s * KEPT_LONGER
            self._copies_until[short] = until
            self._pins.keep_copies(short.astype(lease.pinned.blocks.dtype), until - self._clock())

    def copies_last_s(self, blocks: npt.NDArray[np.intp]) -> list[float]:
        """For how many seconds more copies of blocks were promised; negative where none were."""
        left: list[float] = (self._copies_until[blocks] - self._clock()).tolist()
        return left

    def check_room(self, num_new: int, owner: str) -> None:
        """Whether so many more blocks may be leased.

        Raises:
            LeaseRefused: a bound would be exceeded.
        """
        self.expire()
        self._check_owner(num_new, owner)
        mine = self._usage[owner]
        if not self.limit_blocks:
            raise PoolIsLeased(f"no KV block may be leased: {self.limit_cause}")
        after = self._usage + Counter({owner: num_new})
        beyond = sum(max(0, count - self.guaranteed.get(name, 0)) for name, count in after.items())
        alone = self.guaranteed.get(owner, 0) + self.unguaranteed_limit_blocks
        if num_new > (most := min(self.limit_blocks, alone)):
            cause = self._cause(self.limit_blocks <= alone)
            raise PoolIsLeased(f"{num_new} more KV blocks are needed, and at most {most} may be leased: {cause}")
        if after.total() > self.limit_blocks or beyond > self.unguaranteed_limit_blocks:
            # No figures but the owner's: what the others hold is not its business.
            cause = self._cause(after.total() > self.limit_blocks)
            raise PoolIsLeased(
                f"{num_new} more KV blocks are needed beside the {mine} that the tenant has leased, and the "
                f"server's lease budget has no room for them now: {cause}"
            )

    def _cause(self, is_limit: bool) -> str:
        if is_limit:
            return self.limit_cause
        return "the rest is kept for a full context and for what tenants are guaranteed; `--kv-memory` sets the pool"

    def _check_owner(self, num_new: int, owner: str) -> None:
        """Whether an owner may have so many more blocks leased, wherever they are. Raises LeaseRefused."""
        if len(self._leases) >= MAX_LEASES:
            raise LeaseRefused("the server keeps no more leases now")
        mine, limit = self._usage[owner] + self._usage_below[owner], self.owner_limits.get(owner)
        if limit is not None and mine + num_new > limit:
            raise LeaseRefused(
                f"{num_new} more KV blocks are needed, and {mine} of the tenant's {limit} are leased: "
                "`lease_budget` in the file of API keys sets how many may be"
            )

    def _charge(self, lease: Retained, blocks: npt.NDArray[np.intp]) -> None:
        self._payer[blocks] = lease.serial
        if blocks.size:
            self._usage[lease.owner] += blocks.size

    def is_leased(self, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        """For each block, whether a lease has it; ABSENT is none."""
        leased: npt.NDArray[np.bool_] = (self._num_leases[blocks.astype(np.intp)] > 0) & (blocks >= 0)
        return leased

    def leases_of_every(self, step: int) -> npt.NDArray[np.int32]:
        """Of every `step`-th block of the pool, from the first: how many leases have it."""
        return self._num_leases[::step]

    def end_on(self, gone: npt.NDArray[np.bool_]) -> None:
        """End every lease that has one of the blocks where `gone`, one entry a block of the pool, is true."""
        for lease in [each for each in self._leases.values() if gone[each.pinned.blocks].any()]:
            self.release(lease)
        self.lapsed_at[gone] = 0

    def refresh(self, blocks: BlockIds) -> None:
        """Note a hit: leases whose anchor is among its blocks start anew."""
        for block in blocks[self._is_anchor[blocks.astype(np.intp)]].tolist():
            for lease in self._by_anchor[block]:
                if not lease.name:
                    self.prolong(lease)

    def prolong(self, lease: Retained, ttl_s: float | None = None) -> None:
        """Let a lease last at least `ttl_s` from now, None for as long as it does after a hit."""
        lease.prolong(self._clock(), lease.ttl_s if ttl_s is None else ttl_s)
        self._keep_copies(lease)

    def postpone(self, lease: Retained, ttl_s: float) -> None:
        """Let a lease end `ttl_s` seconds from now, be that later or sooner than before."""
        lease.ttl_s, lease.expires_at = ttl_s, self._clock() + ttl_s
        self._expiries = [entry for entry in self._expiries if entry[1] != lease.serial]
        self._expiries.append((lease.expires_at, lease.serial))
        heapq.heapify(self._expiries)
        self._keep_copies(lease)

    def expire(self) -> None:
        """Let go of every lease whose time ran out."""
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            _, serial = heapq.heappop(self._expiries)
            lease = self._leases.get(serial)
            if lease is not None and lease.expires_at <= now:
                self.release(lease)
                at = lease.pinned.blocks.astype(np.intp)
                self.lapsed_at[at[self._num_leases[at] == 0]] = now
            elif (
                lease is not None and lease.ttl_s is not None
            ):  # it was refreshed; moving it in the heap at every hit would cost more
                heapq.heappush(self._expiries, (lease.expires_at, serial))

    def release(self, lease: Retained) -> None:
        """End a lease; nothing if it has ended. What no other lease and no request holds may be evicted from now on."""
        if lease.released:
            return
        lease.released = True
        del self._leases[lease.serial]
        if lease.held_in is not None:
            self._usage_below[lease.owner] -= lease.num_below
            self._pins.keep_below(lease, 0.0)
            return
        block = lease.pinned.anchor
        self._by_anchor[block].remove(lease)
        if not self._by_anchor[block]:
            del self._by_anchor[block]
            self._is_anchor[block] = False
        at = lease.pinned.blocks.astype(np.intp)
        self._num_leases[at] -= 1
        self._pass_on(lease, at[self._payer[at] == lease.serial])
        free = at[self._num_leases[at] == 0]
        if lease.expires_at > self._clock() and lease.ttl_s is not None:
            self._pins.keep_copies(free.astype(lease.pinned.blocks.dtype), 0.0)
        self._copies_until[free] = 0
        self._pins.unpin(lease.pinned)
        if len(self._expiries) > 2 * MAX_LEASES:  # leases released early leave their expiry behind
            self._expiries = [entry for entry in self._expiries if entry[1] in self._leases]
            heapq.heapify(self._expiries)

    def _pass_on(self, lease: Retained, blocks: npt.NDArray[np.intp]) -> None:
        """Charge the blocks that a lease paid for to the next lease that has them."""
        self._usage[lease.owner] -= blocks.size
        if not self._usage[lease.owner]:
            del self._usage[lease.owner]
        unpaid = blocks[self._num_leases[blocks] > 0]
        for heir in self._leases.values():
            if not unpaid.size:
                return
            taken = np.isin(unpaid, heir.pinned.blocks)
            self._charge(heir, unpaid[taken])
            unpaid = unpaid[~taken]
