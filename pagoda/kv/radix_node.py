"""The nodes of the radix tree, and what a lookup finds.

Children are kept in the order of their first block. Those that share the longest prefix with a query are neighbours of
the place where the query would stand: a bisection finds them however many children there are.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from pagoda.errors import InvariantError
from pagoda.kv.allocator import BlockIds
from pagoda.kv.eviction import DEFAULT_PRIORITY
from pagoda.kv.keys import Scope

TokenArray = npt.NDArray[np.integer]
ABSENT = np.int32(-1)
NO_NAMES = np.empty(0, dtype=np.int64)


class Node:
    """A run of tokens and its blocks: `blocks` is int32 `[num_groups, ceil(len(tokens) / block_size)]`."""

    __slots__ = (
        "_keys",
        "account",
        "blocks",
        "children",
        "created",
        "depth",
        "expires_at",
        "key",
        "last_access",
        "names",
        "note",
        "num_hits",
        "parent",
        "priority",
        "queued",
        "tokens",
    )

    def __init__(self, tokens: TokenArray, blocks: BlockIds, parent: Node | None, depth: int, now: int) -> None:
        self.tokens = tokens
        self.blocks = blocks
        self.parent = parent
        self.depth = depth
        self.key = b""
        self.children: dict[bytes, Node] = {}
        self._keys: list[bytes] = []
        self.created = self.last_access = now
        self.num_hits = 0
        self.queued = False
        self.names = NO_NAMES
        self.note = 0.0
        self.account: int = 0 if parent is None else parent.account
        self.priority = DEFAULT_PRIORITY
        self.expires_at = math.inf

    def attach(self, key: bytes, child: Node) -> None:
        """Make `child` a child under the key of its first block."""
        if key not in self.children:
            insort(self._keys, key)
        self.children[key] = child
        child.key, child.parent = key, self

    def detach(self, child: Node) -> None:
        """Remove a child."""
        del self.children[child.key]
        del self._keys[bisect_left(self._keys, child.key)]

    def starting_with(self, key: bytes) -> list[Node]:
        """The children whose first block starts with the tokens of `key`."""
        at = bisect_left(self._keys, key)
        return [self.children[near] for near in takewhile(lambda near: near.startswith(key), self._keys[at:])]

    def detach_all(self) -> list[Node]:
        """Remove all children; returns them."""
        gone = list(self.children.values())
        self.children.clear()
        self._keys.clear()
        return gone

    def check(self, block_size: int) -> None:
        """Verify this node against its own rules.

        Raises:
            InvariantError: what is broken.
        """
        if not self.tokens.size or self.blocks.shape[1] != -(-self.tokens.size // block_size):
            raise InvariantError("a node's tokens and blocks disagree")
        if self.children and self.tokens.size % block_size:
            raise InvariantError("an inner node ends in a partial block")
        if sorted(self.children) != self._keys:
            raise InvariantError("a node's keys and children disagree")
        if self.key != first_block_key(self.tokens, block_size):
            raise InvariantError("a child stands under the wrong key")

    def nearest(self, key: bytes) -> list[Node]:
        """The children whose first blocks share most with `key`: at most two, unordered."""
        at = bisect_left(self._keys, key)
        return [self.children[near] for near in self._keys[max(0, at - 1) : at + 1]]


class Root(Node):
    """The empty prefix of a scope."""

    __slots__ = ("scope",)

    def __init__(self, scope: Scope, num_groups: int, now: int, account: int) -> None:
        super().__init__(np.empty(0, dtype=np.int32), np.empty((num_groups, 0), dtype=np.int32), None, 0, now)
        self.scope = scope
        self.account = account
        self.names = np.frombuffer(blake2b(scope.to_bytes(), digest_size=8).digest(), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known prefix of a query.

    Attributes:
        num_tokens: its length.
        path: nodes from below the root, with the tokens matched in each; only the last may be matched in part.
        blocks: int32 `[num_groups, ceil(num_tokens / block_size)]`, ABSENT where a window group has none.
    """

    num_tokens: int
    path: tuple[tuple[Node, int], ...]
    blocks: BlockIds


def as_tokens(tokens: Sequence[int] | TokenArray) -> TokenArray:
    """Token ids as the narrowest array that holds them: int32, or int64 when pseudo-tokens of images are among them."""
    array = np.asarray(tokens, dtype=np.int64)
    small = np.iinfo(np.int32)
    fits = not array.size or (small.min <= array.min() and array.max() <= small.max)
    return array.astype(np.int32) if fits else array


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """How many leading elements are equal."""
    length = min(a.size, b.size)
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def first_block_key(tokens: TokenArray, block_size: int) -> bytes:
    """The bytes that order children: the first block's tokens, fixed-width and big-endian."""
    return tokens[:block_size].astype(">i8").tobytes()
