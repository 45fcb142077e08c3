"""RadixIndex: the nodes of a radix tree and all that can be asked of them. Asking mutates nothing.

A RadixTree grows and shrinks what stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from pagoda.errors import InvariantError
from pagoda.kv.allocator import BlockIds
from pagoda.kv.keys import Scope
from pagoda.kv.lineage import Lineages
from pagoda.kv.radix_node import ABSENT, Match, Node, Root, TokenArray, common_prefix, first_block_key

Held = Callable[[BlockIds], npt.NDArray[np.bool_]]


class RadixIndex:
    """Prefixes of every scope, over blocks of `block_size` tokens and one set of ids per layer group.

    Args:
        block_size: tokens per block.
        windows: per layer group, its sliding window in tokens, or None.
        num_blocks: block ids are below this.
    """

    def __init__(self, block_size: int, windows: tuple[int | None, ...], num_blocks: int) -> None:
        self.block_size = block_size
        self.windows = windows
        self._owner: npt.NDArray[np.object_] = np.full(num_blocks, None, dtype=np.object_)  # group-0 block id -> node
        self.lineages = Lineages(block_size)
        self._roots: dict[Scope, Root] = {}

    def match(self, tokens: TokenArray, scope: Scope) -> Match:
        """The longest prefix of `tokens` that every layer group can supply."""
        path: list[tuple[Node, int]] = []
        done = 0
        for segment in self.lineages.of(tokens, scope):
            if done != segment.start:
                break
            node: Node | None = self._roots.get(segment.scope)
            end = min(segment.stop, tokens.size)
            while node is not None and done < end:
                child, shared = self._step(node, tokens[done:end])
                if child is None:
                    break
                path.append((child, shared))
                done += shared
                node = child if shared == child.tokens.size else None
        return self._usable(path, done)

    def _step(self, node: Node, tokens: TokenArray) -> tuple[Node | None, int]:
        """The child that shares most of `tokens`, and how much."""
        key = first_block_key(tokens, self.block_size)
        exact = node.children.get(key)
        if exact is not None:
            return exact, common_prefix(exact.tokens, tokens)
        best, most = None, 0
        for child in node.nearest(key):
            shared = common_prefix(child.tokens, tokens)
            if shared > most:
                best, most = child, shared
        return best, most

    def _usable(self, path: list[tuple[Node, int]], num_tokens: int) -> Match:
        """Cut a path to the longest length at which every window group still has its window."""
        if not path:
            return Match(0, (), np.empty((len(self.windows), 0), dtype=np.int32))
        size = self.block_size
        blocks = np.concatenate([node.blocks[:, : -(-shared // size)] for node, shared in path], axis=1)
        usable = self._fit(blocks, num_tokens)
        kept, left = [], usable
        for node, shared in path:
            if left > 0:
                kept.append((node, min(shared, left)))
                left -= shared
        return Match(usable, tuple(kept), blocks[:, : -(-usable // size)])

    def _fit(self, blocks: BlockIds, length: int) -> int:
        """The longest prefix, at most `length`, whose last window has no hole in any window group."""
        size = self.block_size
        fits = False
        while not fits:
            fits = True
            for group, window in enumerate(self.windows):
                if window is None:
                    continue
                first = max(0, length - window + 1) // size  # the next token looks back this far
                holes = np.flatnonzero(blocks[group, first : -(-length // size)] == ABSENT)
                if holes.size:  # a shorter window only moves left, so it must end before the first of them
                    length, fits = (first + int(holes[0])) * size, False
        return length

    def after(self, match: Match, scope: Scope, count: int) -> TokenArray:
        """Up to `count` tokens that the tree has where a match of it ends; empty where the tree ends too."""
        node, shared = match.path[-1] if match.path else (self._roots.get(scope), 0)
        if node is not None and shared == node.tokens.size:
            node, shared = next(iter(reversed(node.children.values())), None), 0
        return np.empty(0, dtype=np.int32) if node is None else node.tokens[shared : shared + count]

    def ends_at(self, block_id: int) -> bool:
        """Whether a leaf ends with this group-0 block."""
        node: Node | None = self._owner[block_id]
        return node is not None and not node.children and bool(node.blocks[0, -1] == block_id)

    def scopes(self) -> Iterator[Scope]:
        """Every scope that has a prefix, the newest first."""
        return iter(reversed(self._roots))

    def root(self, scope: Scope) -> Node:
        """The empty prefix of a scope that `scopes` has."""
        return self._roots[scope]

    def _continuation(self, node: Node, tokens: TokenArray) -> Node | None:
        """The child whose first block has all of `tokens`' first block, or is the start of it."""
        if not node.children:
            return None
        child, shared = self._step(node, tokens)
        if child is not None and shared >= min(self.block_size, tokens.size):
            return child
        key = first_block_key(tokens, self.block_size)
        tails = (node.children.get(key[:end]) for end in range(len(key) - 8, 0, -8))
        return next((tail for tail in tails if tail is not None), None)

    def subtrees(self, scope: Scope, prefix: TokenArray) -> list[tuple[Node, int]]:
        """Where everything begins that has `prefix`: nodes, and the offset of the block with its last token in each."""
        found: list[tuple[Node, int]] = []
        stack: list[tuple[Node, TokenArray]] = [(self._roots[scope], prefix)] if scope in self._roots else []
        while stack:
            node, rest = stack.pop()
            for child in node.starting_with(first_block_key(rest, self.block_size)):
                shared = common_prefix(child.tokens, rest)
                if shared == rest.size:
                    found.append((child, max(0, shared - 1) // self.block_size * self.block_size))
                elif shared == child.tokens.size:
                    stack.append((child, rest[shared:]))
        return found

    def prefix_of(self, block_id: int) -> tuple[Node, TokenArray]:
        """The node of a group-0 block, and all tokens up to the block's end."""
        node: Node | None = self._owner[block_id]
        if node is None:
            raise InvariantError(f"block {block_id} is not in the tree")
        end = (int(np.flatnonzero(node.blocks[0] == block_id)[-1]) + 1) * self.block_size
        parts, above = [node.tokens[:end]], node.parent
        while above is not None:
            parts.append(above.scope.tokens_before if isinstance(above, Root) else above.tokens)
            above = above.parent
        return node, np.concatenate(parts[::-1])

    def nodes(self) -> Iterator[Node]:
        """Every node below the roots, parents first."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def block_ids(self) -> BlockIds:
        """Every block in the tree. O(blocks)."""
        rows = [node.blocks[node.blocks != ABSENT] for node in self.nodes()]
        return np.concatenate(rows) if rows else np.empty(0, dtype=np.int32)

    def check(self, held: Held) -> None:
        """Verify the structure, and that every leaf that may go is queued. O(blocks).

        Raises:
            InvariantError: what is broken.
        """
        ids = self.block_ids()
        if np.unique(ids).size != ids.size:
            raise InvariantError("a block is in the tree twice")
        for node in self.nodes():
            node.check(self.block_size)
            own = node.blocks[0][node.blocks[0] != ABSENT]
            if any(owner is not node for owner in self._owner[own]):
                raise InvariantError("a block does not know its node")
            last = node.blocks[:, -1]
            if not node.children and not node.queued and not held(last[last != ABSENT]).any():
                raise InvariantError("an evictable leaf is not queued")
