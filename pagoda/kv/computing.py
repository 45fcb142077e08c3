"""Computing: prefixes on their way, so that requests that arrive together compute or restore them once.

A block is found in the tree when it is full. Until then the lease that computes it stands here, under the first block
of its prompt, and others that share more of that prompt than the tree has may wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.kv.keys import Scope
from pagoda.kv.lease import Lease
from pagoda.kv.lineage import Segment, common_reach
from pagoda.kv.radix_node import TokenArray, common_prefix, first_block_key


@dataclass(frozen=True, slots=True)
class PendingPrefix:
    """A longer prefix than the cache has, which `lease` is computing: it will be there at `num_tokens` tokens."""

    lease: Lease
    num_tokens: int

    @property
    def is_pending(self) -> bool:
        """Whether waiting for it still makes sense."""
        ends = self.lease.released or self.lease.is_detached
        return not ends and self.lease.num_computed_tokens < self.num_tokens


class Computing:
    """The leases whose prompts are not computed yet."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._leases: dict[tuple[Scope, bytes], list[Lease]] = {}

    def add(self, lease: Lease) -> None:
        """Announce that a lease computes its prompt; of one shorter than a block nobody can share a block."""
        if lease.prompt.size >= self._block_size:
            self._leases.setdefault(self._key(lease.lineage, lease.prompt), []).append(lease)

    def remove(self, lease: Lease) -> None:
        """Its prompt is computed, or it ended; nothing if it is not here."""
        key = self._key(lease.lineage, lease.prompt)
        others = [other for other in self._leases.get(key, ()) if other is not lease]
        if others:
            self._leases[key] = others
        else:
            self._leases.pop(key, None)

    def find(self, tokens: TokenArray, lineage: Sequence[Segment], num_known_tokens: int) -> PendingPrefix | None:
        """The longest prefix of all but the last of `tokens` that is on its way, if beyond what is known.

        Whoever waits for it instead of computing it again must stop waiting when `is_pending` turns false: the
        prefix is there, or its lease was released or computes for itself alone. Mutates nothing.
        """
        best: PendingPrefix | None = None
        for lease in self._leases.get(self._key(lineage, tokens), ()):
            most = min(common_prefix(lease.prompt, tokens[:-1]), common_reach(lease.lineage, lineage))
            shared = most // self._block_size * self._block_size
            found = PendingPrefix(lease, shared)
            if shared > max(num_known_tokens, best.num_tokens if best else 0) and found.is_pending:
                best = found
        return best

    def _key(self, lineage: Sequence[Segment], tokens: TokenArray) -> tuple[Scope, bytes]:
        return lineage[0].scope, first_block_key(tokens, self._block_size)
