"""Why a prefix missed: what the tree held before, what it holds instead, and what was given up and when.

    commit ──> a hash of everything up to each block      8 bytes a block, chained: parent's hash + the block's tokens
    evict  ──> a ghost under that hash                    the last 65,536, oldest forgotten first
    facts      the first missed block's hash ──> ghost?   else: a divergence? never seen
    settled    tiers gave more ──> the same of the first block that missed then
    elsewhere  another scope of the tenant?               asked only by who wants to know: it looks into each

`facts` are noted of every request, from the match that its admission made anyway. Only the tree's own scopes of the
asking tenant are looked at, and only its own tokens are shown. The hashes never decide a hit, so that a collision could
at worst spoil an explanation.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice

import numpy as np
import numpy.typing as npt

from pagoda.kv.allocator import BlockIds
from pagoda.kv.keys import Scope
from pagoda.kv.lease import Lease, RestoreReport
from pagoda.kv.lineage import PUBLIC
from pagoda.kv.radix import RadixTree
from pagoda.kv.radix_node import Match, TokenArray, common_prefix

MAX_GHOSTS = 65_536
OPERATOR = "operator"  # in place of a policy: somebody cleared the cache
MAX_SCOPES = 64
CONTEXT_TOKENS = 16


class MissReason(StrEnum):
    """Why the first missed token missed."""

    NONE = "none"  # all but the last token hit, which is always computed
    PARTIAL_BLOCK = "partial_block"  # all whole blocks before the last token hit, and no others are kept
    EVICTED = "evicted"
    LEASE_EXPIRED = "lease_expired"  # and evicted then
    RESTORE_FAILED = "restore_failed"  # a tier has it and could not give it
    RESTORE_SLOWER = "restore_slower"  # a tier has it, and computing it was, or was predicted to be, faster
    KV_POLICY = "kv_policy"  # the request's policy goes by what is computed from there on
    OTHER_SCOPE = "other_scope"  # the tenant has it under another cache_salt or adapter
    DIVERGED = "diverged"
    NEVER_SEEN = "never_seen"


@dataclass(frozen=True, slots=True)
class Eviction:
    """One call that made room, and under what pressure. Times are the cache's clock's; blocks are counts then.

    `policy` is the name of the one that chose them, or OPERATOR.
    """

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
        num_hit_tokens: of the device and of tiers.
        missed_at: the position of the first token that missed, after what tiers gave. Less than `num_hit_tokens` where
            tiers gave blocks that come after it.
        eviction: of the first missed block, if it was evicted.
        before, asked: tokens just before the first missed one, and from it on.
        cached: what the cache had there instead, if it diverged; begins as `asked` does where hits end with blocks.
        differs: the scope's fields that differ, if another scope has it.
        restore: what came of asking the tiers for what the device missed; None if they were not asked.
        num_purges: of what its tenant may see, by then: `cached` may be among what was purged later.
        num_blended_tokens: that missed, and were reused from passages that were computed alone.
    """

    num_tokens: int
    num_hit_tokens: int
    missed_at: int
    reason: MissReason
    eviction: Eviction | None = None
    before: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()
    cached: tuple[int, ...] = ()
    differs: tuple[str, ...] = ()
    restore: RestoreReport | None = None
    num_purges: int = 0
    num_blended_tokens: int = 0

    def with_restore(self, report: RestoreReport | None) -> Explanation:
        """This one, told with what tiers did: if one had more than it gave, that is the reason."""
        if report is None:
            return self
        reason = self.reason
        if reason in (MissReason.NONE, MissReason.PARTIAL_BLOCK):
            return replace(self, restore=report)
        if report.num_failed_blocks:
            reason = MissReason.RESTORE_FAILED
        elif report.num_restored_blocks < report.num_found_blocks or report.num_slower_blocks or report.skipped_tiers:
            reason = MissReason.RESTORE_SLOWER
        return replace(self, reason=reason, restore=report)


class MissLog:
    """Remembers what was where, in 8 bytes a block and the ghosts. Not thread-safe: the engine's thread owns it.

    Args:
        find: what the cache finds in the tree: see Books.
        only_whole: whether the tree keeps no partly filled blocks.
    """

    def __init__(
        self,
        tree: RadixTree,
        find: Callable[[TokenArray, Scope], Match],
        num_blocks: int,
        only_whole: bool = False,
    ) -> None:
        self._num_purges: Counter[str] = Counter()  # by namespace
        self._tree = tree
        self._find = find
        self._only_whole = only_whole
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

    def on_purge(self, namespace: str) -> None:
        """Something of a namespace is purged."""
        self._num_purges[namespace] += 1

    def _purges_seen_by(self, scope: Scope) -> int:
        """How often something was purged that requests of a scope may have been told of."""
        return self._num_purges[scope.namespace] + self._num_purges[PUBLIC.namespace]

    def forget(self) -> None:
        """Remember no eviction: what was evicted is of no use to anyone any more."""
        self._ghosts.clear()

    def facts(self, tokens: TokenArray, scope: Scope, match: Match) -> Explanation:
        """Why a lookup of `tokens`, which found `match`, found no more, as far as that is told at once.

        Mutates nothing, and matches nothing again.
        """
        known = match.num_tokens
        before, asked = _around(tokens, known)

        def because(reason: MissReason, eviction: Eviction | None = None, cached: tuple[int, ...] = ()) -> Explanation:
            told = Explanation(int(tokens.size), known, known, reason, eviction, before, asked, cached)
            num_purges = self._purges_seen_by(scope)
            return replace(told, num_purges=num_purges) if num_purges else told

        if known == tokens.size - 1:
            return because(MissReason.NONE)
        index = known // self._tree.block_size
        if self._only_whole and index == (tokens.size - 1) // self._tree.block_size:
            return because(MissReason.PARTIAL_BLOCK)
        # A hit has the block before its end in every group.
        name = int(self._hashes[match.blocks[0, index - 1]]) if index else 0
        ghost = self._ghost(tokens, scope, index, name)
        if ghost is not None:
            return because(_gone(ghost), ghost)
        # Where hits end with blocks, any token of the block may be the one that differs, and is to be shown.
        reach = self._tree.block_size if self._only_whole else 1
        instead = self._tree.after(match, scope, reach - 1 + CONTEXT_TOKENS)
        same = common_prefix(instead[:reach], tokens[known : known + reach])
        if same == min(reach, instead.size):
            return because(MissReason.NEVER_SEEN)
        told = because(MissReason.DIVERGED, cached=_ids(instead[: same + CONTEXT_TOKENS]))
        return replace(told, asked=_ids(tokens[known : known + same + CONTEXT_TOKENS]))

    def settled(self, facts: Explanation, lease: Lease) -> Explanation:
        """The facts of a prompt, told of the first token that missed after all that its lease hit.

        Call when the prompt is computed: what its blocks were before is to be told, not what becomes of them later.
        """
        at, tokens, size = lease.num_leading_tokens, lease.prompt, self._tree.block_size
        facts = replace(facts, num_hit_tokens=lease.num_hit_tokens)
        if at <= facts.missed_at:
            return facts
        ghost = None
        if at == tokens.size - 1:
            reason = MissReason.NONE
        elif at // size == (tokens.size - 1) // size:
            reason = MissReason.PARTIAL_BLOCK
        else:
            ghost = self._ghost(tokens, lease.scope, at // size, self._name(tokens, lease.scope, at // size))
            reason = MissReason.NEVER_SEEN if ghost is None else _gone(ghost)
        before, asked = _around(tokens, at)
        return Explanation(facts.num_tokens, lease.num_hit_tokens, at, reason, ghost, before, asked)

    def _name(self, tokens: TokenArray, scope: Scope, num_blocks: int) -> int:
        """The hash of a prefix of whole blocks."""
        name = 0
        roots = self._roots(tokens, scope)
        for index in range(num_blocks):
            name = self._next_name(tokens, roots, index, name)
        return name

    def _roots(self, tokens: TokenArray, scope: Scope) -> dict[int, Scope]:
        return {segment.start: segment.scope for segment in self._tree.lineages.of(tokens, scope)}

    def _next_name(self, tokens: TokenArray, roots: Mapping[int, Scope], index: int, name: int) -> int:
        """The hash of a prefix up to and with a block, after that of what is before it."""
        size = self._tree.block_size
        root = roots.get(index * size)
        block = tokens[index * size : (index + 1) * size]
        return hash((name if root is None else hash(root), block.astype(np.int64, copy=False).tobytes()))

    def _ghost(self, tokens: TokenArray, scope: Scope, index: int, name: int) -> Eviction | None:
        """The eviction of a block of a sequence, if this very block was there; `name` is that of all before it."""
        if (index + 1) * self._tree.block_size > tokens.size:
            return None
        return self._ghosts.get(self._next_name(tokens, self._roots(tokens, scope), index, name))

    def still_cached(self, facts: Explanation, tokens: TokenArray, scope: Scope) -> Explanation:
        """The facts of a prompt, without the text of another that may have been purged since: it is not there now."""
        if not facts.cached or facts.num_purges == self._purges_seen_by(scope):
            return facts
        shown = np.concatenate((tokens[: facts.missed_at], np.array(facts.cached, dtype=tokens.dtype)))
        for segment in self._tree.lineages.of(shown, scope):
            if segment.start <= facts.missed_at and self._tree.subtrees(segment.scope, shown[segment.start :]):
                return facts
        return replace(facts, cached=())

    def elsewhere(self, facts: Explanation, tokens: TokenArray, scope: Scope) -> Explanation:
        """The facts of a prompt, or that another scope of its tenant has a block more. Some scopes are asked."""
        # Without keys nobody is known to own both scopes.
        if not scope.namespace or facts.reason not in (MissReason.DIVERGED, MissReason.NEVER_SEEN):
            return facts
        for other in islice(self._tree.scopes(), MAX_SCOPES):
            if other.namespace != scope.namespace or other == scope:
                continue
            if self._find(tokens[:-1], other).num_tokens >= facts.missed_at + self._tree.block_size:
                fields = {"cache_salt": other.salt != scope.salt, "adapter": other.adapter != scope.adapter}
                differs = tuple(name for name, differs in fields.items() if differs)
                return replace(facts, reason=MissReason.OTHER_SCOPE, differs=differs, cached=())
        return facts


def _around(tokens: TokenArray, at: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens just before a position, and from it on."""
    return _ids(tokens[max(0, at - CONTEXT_TOKENS) : at]), _ids(tokens[at : at + CONTEXT_TOKENS])


def _gone(ghost: Eviction) -> MissReason:
    return MissReason.EVICTED if ghost.lease_expired_at is None else MissReason.LEASE_EXPIRED


def _ids(tokens: TokenArray) -> tuple[int, ...]:
    return tuple(tokens.tolist())
