"""Routing: which replica gets a request. Pure bookkeeping: no Ray, no clock, no I/O.

    blocks of a prompt ──PrefixIndex──> how much of it each replica has ──┐
    tokens that each replica has still to compute ───────────────────────┴──> the replica with the least of both

The cost of a replica is the prompt's tokens that it would have to compute, plus those it has yet to compute for others:
the tokens after which this prompt's answer begins. (The idea is SGLang's router's and Mooncake's conductor's.)

The index is a dictionary from a block's prefix id to the replicas that have it, one bit each. Whoever has a block has
all before it, so along a prompt the bits only go out: the few places where they do are found by bisection, in
O(log n) for each, and a decision takes microseconds however long the prompt and with a thousand replicas.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagoda.errors import ConfigError

MAX_LEVELS = 8  # holders of a prompt's start are told apart by depth this often, counted from the deepest
_FEW = 8  # bits that are faster to find one by one


class PrefixIndex:
    """Which replicas have which blocks, of the `max_blocks` most recently noted. A block's id stands for its prefix."""

    def __init__(self, num_replicas: int, max_blocks: int = 1 << 20) -> None:
        if num_replicas < 1 or max_blocks < 1:
            raise ConfigError(f"an index needs replicas and blocks, got {num_replicas} and {max_blocks}")
        self.num_replicas = num_replicas
        self.max_blocks = max_blocks
        self._holders: OrderedDict[int, int] = OrderedDict()  # prefix id -> bits of replicas; the coldest first

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, replica: int, blocks: Sequence[int]) -> None:
        """Note that a replica has the blocks of a prompt. The deepest become the coldest: prefixes stay closed."""
        bit = 1 << replica
        before = after = 0
        for block in reversed(blocks):
            holders = self._holders.get(block, 0)
            if holders != before or not after:
                before, after = holders, holders | bit  # neighbours mostly have one holder set: keep one object for it
            self._holders[block] = after
            self._holders.move_to_end(block)
        while len(self._holders) > self.max_blocks:
            self._holders.popitem(last=False)

    def remove(self, replica: int, blocks: Sequence[int]) -> None:
        """Note that a replica gave blocks up."""
        for block in blocks:
            holders = self._holders.get(block, 0) & ~(1 << replica)
            if holders:
                self._holders[block] = holders
            else:
                self._holders.pop(block, None)

    def forget(self, replica: int) -> None:
        """A replica lost everything. O(blocks)."""
        self.remove(replica, list(self._holders))

    def depths(self, blocks: Sequence[int]) -> npt.NDArray[np.int64]:
        """For each replica, how many leading blocks it has; fewer where more than MAX_LEVELS depths differ."""
        depths = np.zeros(self.num_replicas, dtype=np.int64)
        seen, at = 0, self._last(blocks, 0, len(blocks))
        for _ in range(MAX_LEVELS):
            if not at:
                break
            holders = self._holders[blocks[at - 1]]
            fresh, seen = holders & ~seen, seen | holders
            if fresh.bit_count() <= _FEW:
                while fresh:
                    lowest = fresh & -fresh
                    depths[lowest.bit_length() - 1] = at
                    fresh ^= lowest
            else:
                depths[self._as_array(fresh)] = at
            at = self._last(blocks, seen, at - 1)
        return depths

    def depths_with(self, others: Sequence[PrefixIndex], blocks: Sequence[int]) -> npt.NDArray[np.int64]:
        """For each replica, how many leading blocks it has here or in another index. O(blocks).

        For indexes of tiers: those may lose a block in the midst of a prefix, which bisection would not see.
        """
        depths = np.zeros(self.num_replicas, dtype=np.int64)
        indexes = [self._holders, *(other._holders for other in others)]
        having = (1 << self.num_replicas) - 1
        for at, block in enumerate(blocks):
            there = 0
            for holders in indexes:
                there |= holders.get(block, 0)
            if lost := having & ~there:
                depths[self._as_array(lost)] = at
                having &= there
                if not having:
                    return depths
        depths[self._as_array(having)] = len(blocks)
        return depths

    def _last(self, blocks: Sequence[int], besides: int, most: int) -> int:
        """How many leading blocks, at most `most`, some replica has that is not among `besides`."""
        low, holders = 0, self._holders
        while low < most:
            middle = (low + most) // 2
            if holders.get(blocks[middle], 0) & ~besides:
                low = middle + 1
            else:
                most = middle
        return low

    def _as_array(self, mask: int) -> npt.NDArray[np.bool_]:
        packed = np.frombuffer(mask.to_bytes(-(-self.num_replicas // 8), "little"), dtype=np.uint8)
        return np.unpackbits(packed, bitorder="little", count=self.num_replicas).astype(np.bool_)


class RoutingPolicy(Protocol):
    """Chooses a replica. `load` has, for each, the tokens that it has still to compute; infinity takes no requests."""

    def place(self, known: npt.NDArray[np.int64], num_tokens: int, load: npt.NDArray[np.float64]) -> int:
        """The replica for a prompt of `num_tokens`, of which each replica has as many as `known` says."""

    def choose(self, blocks: Sequence[int], block_tokens: int, num_tokens: int, load: npt.NDArray[np.float64]) -> int:
        """The replica for a prompt of `num_tokens`, in blocks of `block_tokens`."""

    def on_computed(self, replica: int, blocks: Sequence[int]) -> None:
        """A replica has, or is about to have, the blocks of a prompt."""

    def on_evicted(self, replica: int, blocks: Sequence[int]) -> None:
        """A replica gave blocks up."""


class LeastLoad:
    """The replica with the least to compute; of equals, each in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, blocks: Sequence[int], block_tokens: int, num_tokens: int, load: npt.NDArray[np.float64]) -> int:
        """The least loaded."""
        return self.place(np.zeros(load.size, dtype=np.int64), num_tokens, load)

    def place(self, known: npt.NDArray[np.int64], num_tokens: int, load: npt.NDArray[np.float64]) -> int:
        """The least loaded."""
        return self._take(load)

    def _take(self, cost: npt.NDArray[np.float64]) -> int:
        """The cheapest, the one after the last choice first among equals."""
        cheapest = np.flatnonzero(cost == cost.min())
        replica = int(cheapest[np.searchsorted(cheapest, self._next) % cheapest.size])
        self._next = (replica + 1) % cost.size
        return replica

    def on_computed(self, replica: int, blocks: Sequence[int]) -> None:
        """Nothing."""

    def on_evicted(self, replica: int, blocks: Sequence[int]) -> None:
        """Nothing."""


class RoundRobin(LeastLoad):
    """Each replica in turn."""

    def place(self, known: npt.NDArray[np.int64], num_tokens: int, load: npt.NDArray[np.float64]) -> int:
        """The next that takes requests."""
        return self._take(np.where(np.isinf(load), np.inf, 0.0))


class PrefixAware(LeastLoad):
    """The replica that can answer first: the least tokens to compute, of this prompt and before it."""

    def __init__(self, index: PrefixIndex) -> None:
        super().__init__()
        self.index = index

    def choose(self, blocks: Sequence[int], block_tokens: int, num_tokens: int, load: npt.NDArray[np.float64]) -> int:
        """The cheapest."""
        return self.place(self.index.depths(blocks) * block_tokens, num_tokens, load)

    def place(self, known: npt.NDArray[np.int64], num_tokens: int, load: npt.NDArray[np.float64]) -> int:
        """The cheapest."""
        return self._take(load + (num_tokens - np.minimum(known, num_tokens)))

    def on_computed(self, replica: int, blocks: Sequence[int]) -> None:
        """Note it in the index."""
        self.index.add(replica, blocks)

    def on_evicted(self, replica: int, blocks: Sequence[int]) -> None:
        """Note it in the index."""
        self.index.remove(replica, blocks)


ROUTING_POLICIES = ("round-robin", "least-load", "prefix-aware")


def make_routing(name: str, num_replicas: int, max_blocks: int = 1 << 20) -> RoutingPolicy:
    """A fresh policy.

    Raises:
        ConfigError: no policy has that name.
    """
    match name:
        case "round-robin":
            return RoundRobin()
        case "least-load":
            return LeastLoad()
        case "prefix-aware":
            return PrefixAware(PrefixIndex(num_replicas, max_blocks))
    raise ConfigError(f"no routing policy is called {name!r}; there are {', '.join(ROUTING_POLICIES)}")
