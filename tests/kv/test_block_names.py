from __future__ import annotations

import numpy as np

from pagoda.kv.eviction import S3FIFO, ReuseRate
from pagoda.kv.eviction.names import BlockNames, Names
from pagoda.kv.keys import Scope
from pagoda.kv.radix import RadixTree
from pagoda.kv.radix_node import ABSENT, Node, TokenArray

SIZE = 2
TOKENS = np.arange(10, 22)  # six blocks


def tree_of(policy: ReuseRate | S3FIFO, windows: tuple[int | None, ...] = (None,)) -> RadixTree:
    return RadixTree(SIZE, windows, 64, policy)


def insert(
    tree: RadixTree, tokens: TokenArray, first_id: int, after: int | None = None, scope: Scope = Scope()
) -> None:
    ids = np.arange(first_id, first_id + -(-tokens.size // SIZE), dtype=np.int32)
    tree.insert(scope, after, tokens, ids[None])
    tree.offer(int(ids[-1]))


def names_along(tree: RadixTree, tokens: TokenArray) -> list[int]:
    """Of the blocks of a prefix that the tree has."""
    path = tree.match(tokens, Scope()).path
    return [int(name) for node, shared in path for name in node.names[: -(-shared // SIZE)]]


def fresh(tokens: TokenArray, scope: Scope = Scope()) -> list[int]:
    """The names of a sequence that is inserted at once."""
    tree = tree_of(ReuseRate())
    insert(tree, tokens, 0, scope=scope)
    return [int(name) for node in tree.nodes() for name in node.names]


def test_a_block_has_one_name_however_its_sequence_was_put_in() -> None:
    expected = fresh(TOKENS)
    assert len(set(expected)) == 6
    grown = tree_of(ReuseRate())
    for block in range(6):
        insert(grown, TOKENS[SIZE * block : SIZE * block + SIZE], block, after=block - 1 if block else None)
    assert names_along(grown, TOKENS) == expected
    forked = tree_of(S3FIFO())
    insert(forked, np.concatenate([TOKENS[:6], [1, 2, 3, 4]]), 0)
    insert(forked, TOKENS[6:], 10, after=2)  # splits the first node
    assert names_along(forked, TOKENS) == expected
    forked.evict(1, held=lambda ids: np.zeros(ids.shape, dtype=np.bool_))
    forked.check(held=lambda ids: np.zeros(ids.shape, dtype=np.bool_))


def test_a_name_tells_tokens_places_and_all_before_apart() -> None:
    swapped = np.concatenate([TOKENS[2:4], TOKENS[:2], TOKENS[4:]])
    assert not set(fresh(TOKENS)) & set(fresh(swapped))
    assert fresh(TOKENS)[:2] == fresh(TOKENS[:4])
    assert fresh(TOKENS[:3])[1] != fresh(TOKENS[:4])[1]  # a partial block is another one


def test_a_name_tells_scopes_apart() -> None:
    scopes = [
        Scope(),
        Scope("acme"),
        Scope("acme", "salt"),
        Scope("acme", adapter="a"),
        Scope("acme", after=np.arange(2).tobytes()),
    ]
    assert len({name for scope in scopes for name in fresh(TOKENS, scope)}) == 6 * len(scopes)


def test_a_block_behind_one_that_slid_out_of_a_window_is_named_behind_it() -> None:
    policy = ReuseRate()
    tree = tree_of(policy, windows=(4, None))
    window_row = np.array([ABSENT, ABSENT, ABSENT, 3, 4, 5], dtype=np.int32)
    blocks = np.stack([window_row, np.arange(10, 16, dtype=np.int32)])
    tree.insert(Scope(), None, TOKENS[:6], blocks[:, :3])  # restored: nothing reads the window blocks of the front
    top = next(tree.nodes())
    child = Node(TOKENS[6:].copy(), blocks[:, 3:].copy(), top, 6, 0)
    assert [*top.names, *BlockNames(SIZE).extend(child, 0)] == fresh(TOKENS)


def evicted_and_back(tree: RadixTree, scope: Scope) -> Node:
    """The node of TOKENS[4:] after it left and came back in a scope, behind the four tokens before it."""
    insert(tree, TOKENS[:4], 0)
    insert(tree, TOKENS[:4], 50, scope=Scope("other"))
    insert(tree, np.array([1, 2]), 20, after=1)
    insert(tree, TOKENS[4:], 10, after=1)
    node = next(node for node in tree.nodes() if node.tokens[0] == TOKENS[4])
    tree.cut(node, 0)
    insert(tree, TOKENS[4:], 30, after=1 if scope == Scope() else 51, scope=scope)
    return tree.match(TOKENS, scope).path[-1][0]


def test_s3fifo_knows_a_ghost_by_all_before_it_and_its_scope() -> None:
    assert evicted_and_back(tree_of(S3FIFO()), Scope()).note == 1
    insert(tree := tree_of(S3FIFO()), np.array([1, 2]), 60, scope=Scope("other"))
    node = evicted_and_back(tree, Scope("other"))
    assert node.note == 0


def test_the_default_knows_a_ghost_in_its_scope_only() -> None:
    for scope, num_uses in (Scope(), 2), (Scope("other"), 1):
        policy = ReuseRate()
        evicted_and_back(tree_of(policy), scope)
        assert policy._monitor._uses[30:34].tolist() == [num_uses] * 4


def test_what_is_purged_is_known_when_it_comes_back() -> None:
    """A purge takes what is above first; what was below was named behind it, and is known again behind it."""
    for policy in ReuseRate(), S3FIFO():
        tree = tree_of(policy)
        insert(tree, TOKENS[:4], 0)
        insert(tree, np.array([1, 2]), 20, after=1)
        insert(tree, TOKENS[4:], 10, after=1)
        before: Names = next(node for node in tree.nodes() if node.tokens[0] == TOKENS[4]).names.copy()
        top = next(node for node in tree.nodes() if node.tokens[0] == TOKENS[0])
        assert tree.cut(top, 0).size == 7
        insert(tree, TOKENS[:4], 0)
        insert(tree, np.array([1, 2]), 20, after=1)
        insert(tree, TOKENS[4:], 10, after=1)
        node = next(node for node in tree.nodes() if node.tokens[0] == TOKENS[4])
        assert node.names.tolist() == before.tolist() == fresh(TOKENS)[2:]
        if isinstance(policy, S3FIFO):
            assert node.note == 1
        else:
            assert policy._monitor._uses[10:14].tolist() == [2] * 4
