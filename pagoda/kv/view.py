"""A look at the tree: which prefixes are cached for whom, how large and how often hit. For people, not for lookups."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from pagoda.kv.keys import Scope
from pagoda.kv.radix import RadixTree
from pagoda.kv.radix_index import Held
from pagoda.kv.radix_node import ABSENT, Node

HEAD_TOKENS = 32
MAX_SCOPES = 64
_MAX_CHILDREN = 32
_MAX_LOOKED_AT = 2048


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
            yield _view(scope, node, level, held)
            stack.extend((child, level + 1) for child in _by_use(node))


def outline(tree: RadixTree, held: Held, namespace: str | None, limit: int) -> list[PrefixView]:
    """At most `limit` runs of a namespace, or of all, in the order of `prefixes`: level by level those hit most.

    Of a run with very many children only the first and the last ones are considered, and of scopes the newest, so that
    it takes no longer however large the tree is. Mutates nothing.
    """
    scopes = [scope for scope in tree.scopes() if namespace in (None, scope.namespace)][:MAX_SCOPES]
    chosen: dict[Node, list[Node]] = {}
    todo = deque(tree.root(scope) for scope in scopes)
    room = limit
    while todo and room:
        node = todo.popleft()
        chosen[node] = _most_hit(node, min(room, _MAX_CHILDREN))
        room -= len(chosen[node])
        todo.extend(chosen[node])
    views = []
    for scope in scopes:
        stack = [(child, 0) for child in reversed(chosen.get(tree.root(scope), ()))]
        while stack:
            node, level = stack.pop()
            views.append(_view(scope, node, level, held))
            stack.extend((child, level + 1) for child in reversed(chosen.get(node, ())))
    return views


def _most_hit(node: Node, count: int) -> list[Node]:
    children = node.children.values()
    if len(children) > 2 * _MAX_LOOKED_AT:
        ends = [*islice(children, _MAX_LOOKED_AT), *islice(reversed(children), _MAX_LOOKED_AT)]
    else:
        ends = list(children)
    return heapq.nlargest(count, ends, key=lambda child: (child.num_hits, child.last_access))


def _view(scope: Scope, node: Node, level: int, held: Held) -> PrefixView:
    ids = node.blocks[node.blocks != ABSENT]
    return PrefixView(
        scope=scope,
        level=level,
        start=node.depth,
        num_tokens=int(node.tokens.size),
        head=tuple(node.tokens[:HEAD_TOKENS].tolist()),
        num_blocks=int(ids.size),
        num_held=int(np.count_nonzero(held(ids))),
        num_hits=node.num_hits,
    )


def _by_use(node: Node) -> list[Node]:
    """Children, the last used last: where a stack takes first."""
    return sorted(node.children.values(), key=lambda child: child.last_access)
