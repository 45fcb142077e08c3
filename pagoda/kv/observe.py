"""Why a prefix missed: what the tree held before, what it holds instead, and what was given up and when.

    commit ──> a hash of everything up to each block      8 bytes a block, chained: parent's hash + the block's tokens
    evict  ──> a ghost under that hash                    the last 65,536, oldest forgotten first
    facts      the first missed block's hash ──> ghost?   else: a divergence? never seen
    elsewhere  another scope of the tenant?               asked only by who wants to know: it looks into each

`facts` are noted of every request, from the match that its admission made anyway. Only the tree's own scopes of the
asking tenant are looked at, and only its own tokens are shown. The hashes never decide a hit, so that a collision could
at worst spoil an explanation.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice

import numpy as np
import numpy.typing as npt

from pagoda.kv.allocator import BlockIds
from pagoda.kv.keys import Scope
from pagoda.kv.lease import RestoreReport
from pagoda.kv.radix import RadixTree
from pagoda.kv.radix_node import Match, TokenArray

MAX_GHOSTS = 65_536
MAX_SCOPES = 64
CONTEXT_TOKENS = 16


class MissReason(StrEnum):
    """Why the first missed token missed."""

    NONE = "none"  # all but the last token hit, which is always computed
    EVICTED = "evicted"
    LEASE_EXPIRED = "lease_expired"  # and evicted then
    RESTORE_FAILED = "restore_failed"  # a tier has it and could not give it
    RESTORE_SLOWER = "restore_slower"  # a tier has it, and computing it was, or was predicted to be, faster
    OTHER_SCOPE = "other_scope"  # the tenant has it under another cache_salt or adapter
    DIVERGED = "diverged"
    NEVER_SEEN = "never_seen"


@dataclass(frozen=True, slots=True)
class Eviction:
    """One call that made room, and under what pressure. Times are the cache's clock's; blocks are counts then."""

    at: float
    policy: str
    num_evicted: int
    num_held: int
    num_leased: int
    lease_expired_at: float | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """How much of a prompt hit, and why not more.

    Attributes:
        eviction: of the first missed block, if it was evicted.
        before, asked: tokens just before the first missed one, and from it on.
        cached: what the cache has there instead, if it diverged.
        differs: the scope's fields that differ, if another scope has it.
        restore: what came of asking the tiers for what the device missed; None if they were not asked.
    """

    num_tokens: int
    num_hit_tokens: int
    reason: MissReason
    eviction: Eviction | None = None
    before: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()
    cached: tuple[int, ...] = ()
    differs: tuple[str, ...] = ()
    restore: RestoreReport | None = None

    def with_restore(self, report: RestoreReport | None) -> Explanation:
        """This one, told with what tiers did: if one had more than it gave, that is the reason."""
        if report is None:
            return self
        reason = self.reason
        if report.num_failed_blocks:
            reason = MissReason.RESTORE_FAILED
        elif report.num_restored_blocks < report.num_found_blocks or report.num_slower_blocks or report.skipped_tiers:
            reason = MissReason.RESTORE_SLOWER
        elif report.num_restored_blocks == report.num_asked_blocks:
            reason = MissReason.NONE
        return replace(self, reason=reason, restore=report)


class MissLog:
    """Remembers what was where, in 8 bytes a block and the ghosts. Not thread-safe: the engine's thread owns it."""

    def __init__(self, tree: RadixTree, num_blocks: int) -> None:
        self._tree = tree
        self._hashes: npt.NDArray[np.int64] = np.zeros(num_blocks, dtype=np.int64)
        self._ghosts: OrderedDict[int, Eviction] = OrderedDict()

    def on_commit(self, scope: Scope, after: int | None, tokens: TokenArray, blocks: BlockIds) -> None:
        """Blocks `[num_groups, n]` came into the tree after another one; some of them it may have had already."""
        parent = hash(scope) if after is None else int(self._hashes[after])
        size = self._tree.block_size
        data = tokens.astype(np.int64, copy=False).tobytes()
        hashes = []
        for start in range(0, len(data), 8 * size):
            hashes.append(parent := hash((parent, data[start : start + 8 * size])))
        self._hashes[blocks] = hashes

    def on_evict(self, ids: BlockIds, eviction: Eviction) -> None:
        """Blocks left the tree."""
        for ghost in self._hashes[ids].tolist():
            self._ghosts[ghost] = eviction
            self._ghosts.move_to_end(ghost)
        while len(self._ghosts) > MAX_GHOSTS:
            self._ghosts.popitem(last=False)

    def forget(self) -> None:
        """Remember no eviction: what was evicted is of no use to anyone any more."""
        self._ghosts.clear()

    def facts(self, tokens: TokenArray, scope: Scope, match: Match) -> Explanation:
        """Why a lookup of `tokens`, which found `match`, found no more, as far as that is told at once.

        Mutates nothing, and matches nothing again.
        """
        known = match.num_tokens
        before = _ids(tokens[max(0, known - CONTEXT_TOKENS) : known])
        asked = _ids(tokens[known : known + CONTEXT_TOKENS])

        def because(reason: MissReason, eviction: Eviction | None = None, cached: tuple[int, ...] = ()) -> Explanation:
            return Explanation(tokens.size, known, reason, eviction, before, asked, cached)

        if known == tokens.size - 1:
            return because(MissReason.NONE)
        ghost = self._ghost(tokens, scope, known, match.blocks)
        if ghost is not None:
            expired = ghost.lease_expired_at is not None
            return because(MissReason.LEASE_EXPIRED if expired else MissReason.EVICTED, ghost)
        instead = self._tree.after(match, scope, CONTEXT_TOKENS)
        if instead.size and instead[0] != tokens[known]:
            return because(MissReason.DIVERGED, cached=_ids(instead))
        return because(MissReason.NEVER_SEEN)

    def _ghost(self, tokens: TokenArray, scope: Scope, known: int, blocks: BlockIds) -> Eviction | None:
        """The eviction of the block with the first missed token, if this very block was there."""
        size = self._tree.block_size
        index = known // size
        block = tokens[index * size : (index + 1) * size]
        if block.size < size:
            return None
        roots = {segment.start: segment.scope for segment in self._tree.lineages.of(tokens, scope)}
        # A hit has the block before its end in every group.
        root = roots.get(index * size)
        parent = int(self._hashes[blocks[0, index - 1]]) if root is None else hash(root)
        return self._ghosts.get(hash((parent, block.astype(np.int64, copy=False).tobytes())))

    def elsewhere(self, facts: Explanation, tokens: TokenArray, scope: Scope) -> Explanation:
        """The facts of a prompt, or that another scope of its tenant has a block more. Some scopes are asked."""
        # Without keys nobody is known to own both scopes.
        if not scope.namespace or facts.reason not in (MissReason.DIVERGED, MissReason.NEVER_SEEN):
            return facts
        for other in islice(self._tree.scopes(), MAX_SCOPES):
            if other.namespace != scope.namespace or other == scope:
                continue
            if self._tree.match(tokens[:-1], other).num_tokens >= facts.num_hit_tokens + self._tree.block_size:
                fields = {"cache_salt": other.salt != scope.salt, "adapter": other.adapter != scope.adapter}
                differs = tuple(name for name, differs in fields.items() if differs)
                return replace(facts, reason=MissReason.OTHER_SCOPE, differs=differs, cached=())
        return facts


def _ids(tokens: TokenArray) -> tuple[int, ...]:
    return tuple(tokens.tolist())
