"""What a sparse KV policy is, and what the engine asks of it.

A policy is a request's wish, `kv_policy` read and checked. For each request that may outgrow its budget it opens a
sequence, which lives as long as the request does and which the engine asks around every step:

    scheduler   limit(start)         how many rows at most come next, so that a decision falls where it should
                make_room(lease)     compress now, if it is due; may raise OutOfBlocks, as reserving may
    runner      rotary_offset        token position - rotary position of the rows that come next
                uses_hook, wants_mass
    decoder     place                per layer: where this request's rows are written and what they see
                after_attention      per layer: what attention they paid
    scheduler   forget(lease)        preempted: it starts again from nothing

The memory is two things. `KVCache.compact` gives a lease private blocks, fewer than before, and `SparseMemory`
(store.py) moves entries between blocks. Keys are kept as they were rotated, so their order in the cache does not
matter: after compaction one slot may hold different tokens in different layers and heads.

    tokens          0  1  2  3  4  5  6  7  8  9           position = what the rotation said
    layer 0 head 0  0           4        7  8  9           entries: what is still there, in the order of slots
    layer 0 head 1  0     2              7  8  9           equally many in all heads of a layer
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch

from pagoda.kv.cache import KVCache
from pagoda.kv.lease import Lease
from pagoda.sparse.report import SparseReport
from pagoda.sparse.store import SparseMemory

Budget = int | str
"""Tokens that stay in each layer; or bytes, as `64MiB`; or `fit`: as many as the pool allows one request."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The most that a sequence needs at once.

    Attributes:
        entries: KV entries of each layer that sees everything, the rows of a step included.
        copies: entries that compaction writes while the old ones are still there.
        positions: rotary positions, counted from 0.
    """

    entries: int
    copies: int
    positions: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where one request's rows of a step are in one layer.

    Attributes:
        context_len: KV entries that the last row sees, itself included; the rows are the last entries.
        slots: where keys and values of the rows are written.
    """

    context_len: int
    slots: list[int]


class SparseSequence(Protocol):
    """The sparse side of one request. Used on the engine's thread alone; its lease is the one that it is given."""

    rotary_offset: int
    hit_limit: int
    """The most tokens that a prefix hit may give it: what it must see computed comes after."""

    @property
    def report(self) -> SparseReport:
        """What was done so far."""
        ...

    def limit(self, start: int) -> int:
        """How many rows from token `start` on may be computed in one step, at least 1. Mutates nothing."""
        ...

    def make_room(self, lease: Lease) -> None:
        """Compress, if it is due with what the lease has computed.

        Raises:
            OutOfBlocks: there are not enough blocks to copy to; nothing changed.
        """
        ...

    def uses_hook(self, start: int, stop: int) -> bool:
        """Whether layers do anything else for these rows than for those of other requests."""
        ...

    def wants_mass(self, start: int, stop: int) -> bool:
        """Whether `after_attention` needs the attention mass."""
        ...

    def place(self, layer: int, lease: Lease, start: int, stop: int) -> Place | None:
        """Where the request's rows are in a layer; None: where the lease and the layers of the first group say."""
        ...

    def after_attention(self, layer: int, mass: torch.Tensor, start: int, stop: int) -> None:
        """See the attention mass of the entries, float32 `[num_kv_heads, context_len]`, a view that must be copied.

        Called if `wants_mass`.
        """
        ...

    def fork(self, lease: Lease) -> Self:
        """The same for another lease on the same blocks, from where this one's prompt is computed on."""
        ...

    def forget(self, lease: Lease) -> None:
        """The lease ends, and another may come later, for the same tokens from the first on."""
        ...


@runtime_checkable
class SparsePolicy(Protocol):
    """A policy and its settings: immutable, one per request.

    A dataclass whose fields are the settings that a request may give; `from_fields` may translate.
    """

    name: ClassVar[str]
    bounds_prefill: ClassVar[bool]
    """Whether memory can be bounded while the prompt is computed, so that it may be longer than memory."""
    only_copies: ClassVar[bool]
    """Whether entries are copied as they are stored, and never turned or looked at: then they may be codes."""

    @property
    def budget(self) -> Budget: ...  # noqa: D102

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """The policy with these settings; raises InvalidRequest."""
        ...

    def with_budget(self, num_tokens: int) -> Self:
        """The same with a budget in tokens; raises InvalidRequest where that is too small."""
        ...

    def demand(self, num_prompt: int, num_total: int, *, exact: bool) -> Demand:
        """What a request needs. `exact`: nothing is dropped before its prompt is computed."""
        ...

    def open(
        self, num_prompt: int, num_total: int, cache: KVCache, memory: SparseMemory, *, exact: bool
    ) -> SparseSequence | None:
        """The sequence of a request of at most `num_total` tokens; None if it never outgrows the budget."""
        ...
