"""Lineages: whose prefixes a sequence shares, from its beginning to its end.

    tokens   [ a published prefix  |  the tenant's own            |  after an adapter's activation ]
    scope      PUBLIC                 (tenant, salt)                 (tenant, salt, adapter)
    root       of PUBLIC              of that scope after the first  of that scope after the first two

Every part has a root of its own in the tree, and a key of its own in tiers, named by its scope and by all tokens before
it: nothing is found by one who has another beginning. Parts meet at block boundaries. What is published is a list of
texts that an operator chose, not what happens to be cached: which parts a sequence has depends on its tokens alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagoda.errors import LeaseRefused
from pagoda.kv.keys import Scope
from pagoda.kv.radix_node import TokenArray, common_prefix

PUBLIC = Scope("(public)")
MAX_PUBLISHED = 64
_END = sys.maxsize


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start` to `stop` of a sequence, shared within `scope`."""

    scope: Scope
    start: int
    stop: int


class Lineages:
    """Cuts sequences into segments. Knows what is published."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._published: list[TokenArray] = []

    @property
    def published(self) -> Sequence[TokenArray]:
        """The public prefixes."""
        return tuple(self._published)

    def publish(self, tokens: TokenArray) -> None:
        """Let everybody share a prefix of whole blocks, and every beginning of it.

        Raises:
            LeaseRefused: there are too many, each of which every lookup asks.
        """
        if common_prefix(tokens, self._longest(tokens)) == tokens.size:
            return
        if len(self._published) >= MAX_PUBLISHED:
            raise LeaseRefused(f"there are {MAX_PUBLISHED} public prefixes already")
        self._published.append(tokens.copy())

    def unpublish(self, tokens: TokenArray) -> int:
        """Let nobody find what begins with these tokens as public any more; returns how many prefixes that ends."""
        kept = [each for each in self._published if common_prefix(each, tokens) < tokens.size]
        count = len(self._published) - len(kept)
        self._published = kept
        return count

    def _longest(self, tokens: TokenArray) -> TokenArray:
        return max(self._published, key=lambda each: common_prefix(each, tokens), default=tokens[:0])

    def of(self, tokens: TokenArray, scope: Scope) -> tuple[Segment, ...]:
        """The segments of a sequence in a request's scope; the last has no end. Mutates nothing."""
        if scope.after:  # asked by the name of a root
            scope = replace(scope, after=b"")
        if not self._published and not scope.adapter_from:
            return (Segment(scope, 0, _END),)
        base = replace(scope, adapter="", adapter_from=0)
        # What an adapter changes from the first token on is no published text's KV.
        most = scope.adapter_from if scope.adapter else _END
        known = tokens[: min(tokens.size, most)]
        public = common_prefix(known, self._longest(known)) if self._published else 0
        own = self._whole(public)
        changed = self._whole(most) if scope.adapter else _END
        segments = []
        if public:
            # A prompt that ends within a published block may hit the tokens of it; what it computes is its own.
            segments.append(Segment(PUBLIC, 0, public if public == tokens.size else own))
        if own < changed:
            segments.append(self._segment(base, tokens, own, changed))
        if scope.adapter:
            segments.append(self._segment(scope, tokens, changed, _END))
        return tuple(segments)

    def _whole(self, num_tokens: int) -> int:
        return num_tokens // self._block_size * self._block_size

    def _segment(self, scope: Scope, tokens: TokenArray, start: int, stop: int) -> Segment:
        before = tokens[:start].astype("<i8").tobytes() if start <= tokens.size else b"-"  # never reached
        return Segment(replace(scope, after=before), start, stop)


def common_reach(one: Sequence[Segment], other: Sequence[Segment]) -> int:
    """How many tokens two sequences with these segments could share."""
    for a, b in zip(one, other, strict=False):
        if a.scope != b.scope:
            return min(a.start, b.start)
    longer = one if len(one) > len(other) else other
    return longer[min(len(one), len(other))].start if len(one) != len(other) else _END
