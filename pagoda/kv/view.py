"""A look at the tree: which prefixes are cached for whom, how large and how often hit. For people, not for lookups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pagoda.kv.keys import Scope
from pagoda.kv.radix import RadixTree
from pagoda.kv.radix_index import Held
from pagoda.kv.radix_node import ABSENT, Node

HEAD_TOKENS = 32


@dataclass(frozen=True, slots=True)
class PrefixView:
    """A run of tokens in the tree, after the runs above it.

    Attributes:
        level: how many runs are above it; the run before it of one level less is its parent.
        start: tokens before it.
        head: its first tokens, at most 32.
        num_blocks: blocks of all layer groups; of those, requests and leases hold `num_held`.
        num_hits: requests that hit all of it.
    """

    scope: Scope
    level: int
    start: int
    num_tokens: int
    head: tuple[int, ...]
    num_blocks: int
    num_held: int
    num_hits: int


def prefixes(tree: RadixTree, held: Held, namespace: str | None = None) -> Iterator[PrefixView]:
    """Every run of a namespace, or of all: parents first, and of siblings the last used first. Mutates nothing.

    Lazy: the tree must not change before the last is taken.
    """
    for scope in tree.scopes():
        if namespace not in (None, scope.namespace):
            continue
        stack = [(child, 0) for child in _by_use(tree.root(scope))]
        while stack:
            node, level = stack.pop()
            ids = node.blocks[node.blocks != ABSENT]
            yield PrefixView(
                scope=scope,
                level=level,
                start=node.depth,
                num_tokens=int(node.tokens.size),
                head=tuple(node.tokens[:HEAD_TOKENS].tolist()),
                num_blocks=int(ids.size),
                num_held=int(np.count_nonzero(held(ids))),
                num_hits=node.num_hits,
            )
            stack.extend((child, level + 1) for child in _by_use(node))


def _by_use(node: Node) -> list[Node]:
    """Children, the last used last: where a stack takes first."""
    return sorted(node.children.values(), key=lambda child: child.last_access)
