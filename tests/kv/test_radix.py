"""The tree alone: matching, growing, splitting, holes, the order of eviction. Blocks are numbers, nothing is held."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pagoda.errors import InvariantError
from pagoda.kv.keys import Scope
from pagoda.kv.radix import RadixTree
from pagoda.kv.radix_node import ABSENT, Node, common_prefix

SCOPE = Scope("tenant")
SIZE = 4


def tokens(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], dtype=np.int32)


def nothing_held(ids: np.ndarray) -> np.ndarray:
    return np.zeros(ids.shape, dtype=np.bool_)


def holding(*blocks: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda ids: np.isin(ids, blocks)


class Forest:
    """A tree of texts that numbers blocks as they come."""

    def __init__(self, windows: tuple[int | None, ...] = (None,), num_blocks: int = 200) -> None:
        self.tree = RadixTree(SIZE, windows, num_blocks)
        self.next = 0

    def blocks(self, length: int) -> np.ndarray:
        count = -(-length // SIZE)
        groups = len(self.tree.windows)
        ids = np.arange(self.next, self.next + groups * count, dtype=np.int32).reshape(groups, count)
        self.next += ids.size
        return ids

    def add(self, text: str, scope: Scope = SCOPE) -> list[int]:
        """Insert what a request would that matched the whole blocks it could; return its group-0 blocks."""
        match = self.tree.match(tokens(text), scope)
        full = match.num_tokens // SIZE
        after = int(match.blocks[0, full - 1]) if full else None
        rest = tokens(text)[full * SIZE :]
        kept, _ = self.tree.insert(scope, after, rest, self.blocks(rest.size))
        self.tree.offer(int(kept[0, -1]))
        self.tree.check(nothing_held)
        return [*match.blocks[0, :full].tolist(), *kept[0].tolist()]

    def match(self, text: str, scope: Scope = SCOPE) -> tuple[int, list[int]]:
        match = self.tree.match(tokens(text), scope)
        assert match.num_tokens == sum(shared for _, shared in match.path)
        return match.num_tokens, match.blocks[0].tolist()

    def evict(self, count: int, held: Callable[[np.ndarray], np.ndarray] = nothing_held) -> list[int]:
        ids = self.tree.evict(count, held).tolist()
        self.tree.check(held)
        return ids

    def shape(self) -> list[str]:
        """The tree as text: one line a node, indented by depth."""

        def lines(node: Node, indent: str) -> list[str]:
            text = "".join(map(chr, node.tokens))
            own = [f"{indent}{text} {node.blocks.tolist()}"] if node.parent else []
            below = [line for key in node._keys for line in lines(node.children[key], indent + " " * bool(own))]
            return own + below

        return [line for root in self.tree._roots.values() for line in lines(root, "")]


@pytest.mark.parametrize("length", range(1, 12))
def test_a_hit_ends_at_any_token(length: int) -> None:
    forest = Forest()
    forest.add("abcdefghijkl")
    query = "abcdefghijkl"[:length] + "#"
    assert forest.match(query) == (length, list(range(-(-length // SIZE))))


def test_nothing_matches_in_an_empty_tree_or_by_another_first_token() -> None:
    forest = Forest()
    assert forest.match("abcd") == (0, [])
    forest.add("abcd")
    assert forest.match("zbcd") == (0, [])
    assert forest.match("") == (0, [])


def test_scopes_share_nothing() -> None:
    forest = Forest()
    forest.add("abcdefgh")
    assert forest.match("abcdefgh", Scope("other")) == (0, [])
    assert forest.match("abcdefgh", Scope("tenant", salt="s")) == (0, [])
    assert forest.add("abcdefgh", Scope("other")) == [2, 3]
    assert forest.match("abcdefgh") == (8, [0, 1])


def test_the_sibling_that_shares_most_wins() -> None:
    forest = Forest()
    for text in ("abXX....", "abcX....", "aXXX....", "bXXX....", "abd....."):
        forest.add(text)
    assert forest.match("abcd") == (3, [2])
    assert forest.match("abYY")[0] == 2
    assert forest.match("aZZZ")[0] == 1
    assert forest.match("bXX")[0] == 3
    assert forest.match("c")[0] == 0


def test_children_are_bisected() -> None:
    """Thousands of siblings: the one that shares most is found, and by looking at two of them at most."""
    forest = Forest(num_blocks=5000)
    rng = np.random.default_rng(0)
    known = rng.integers(0, 9, (3000, SIZE), dtype=np.int32)
    for index, block in enumerate(known):
        forest.tree.insert(SCOPE, None, block, np.array([[index]], dtype=np.int32))
    root = forest.tree._roots[SCOPE]
    assert len(root.children) == np.unique(known, axis=0).shape[0]
    for query in rng.integers(0, 10, (200, SIZE), dtype=np.int32):
        best = int(np.cumprod(known == query, axis=1).sum(axis=1).max())
        assert forest.tree.match(query, SCOPE).num_tokens == best
        assert len(root.nearest(query.astype(">i8").tobytes())) <= 2


def test_nodes_split_at_block_boundaries_only() -> None:
    forest = Forest()
    forest.add("abcdefghijkl")
    assert forest.add("abcdefgXijkl") == [0, 3, 4]
    assert forest.shape() == ["abcd [[0]]", " efgXijkl [[3, 4]]", " efghijkl [[1, 2]]"]
    assert forest.match("abcdefgX") == (8, [0, 3])
    assert forest.match("abcdefgh") == (8, [0, 1])
    assert forest.match("abcdefg?")[0] == 7


def test_a_split_keeps_statistics_and_depth() -> None:
    forest = Forest()
    forest.add("abcdefghijkl")
    forest.tree.touch(forest.tree.match(tokens("abcdefghijkl"), SCOPE))
    forest.add("abcdefghXXXX")
    upper, *lower = sorted(forest.tree.nodes(), key=lambda node: node.depth)
    old = next(node for node in lower if node.num_hits)
    assert (upper.depth, [node.depth for node in lower]) == (0, [8, 8])
    assert (upper.num_hits, old.num_hits) == (1, 1)
    assert upper.last_access >= old.last_access


def test_a_leaf_grows_in_place() -> None:
    forest = Forest()
    forest.add("abcd")
    forest.add("abcdefgh")
    assert forest.shape() == ["abcdefgh [[0, 1]]"]


def test_a_partial_tail_is_superseded_by_more_of_the_same_block() -> None:
    forest = Forest()
    forest.add("abcdef")
    kept, superseded = forest.tree.insert(SCOPE, 0, tokens("efgh"), np.array([[9]], dtype=np.int32))
    assert (kept.tolist(), superseded.tolist()) == ([[9]], [1])
    assert forest.shape() == ["abcdefgh [[0, 9]]"]
    forest.tree.check(nothing_held)


def test_a_partial_tail_that_grew_in_place_is_not_given_up() -> None:
    forest = Forest()
    forest.add("abcdef")
    kept, superseded = forest.tree.insert(SCOPE, 0, tokens("efgh"), np.array([[1]], dtype=np.int32))
    assert (kept.tolist(), superseded.tolist()) == ([[1]], [])
    assert forest.shape() == ["abcdefgh [[0, 1]]"]


def test_a_partial_first_block_is_superseded_under_its_new_key() -> None:
    forest = Forest()
    forest.add("ab")
    forest.add("aX")
    _, superseded = forest.tree.insert(SCOPE, None, tokens("abcdef"), np.array([[7, 8]], dtype=np.int32))
    assert superseded.tolist() == [0]
    assert forest.shape() == ["aX [[1]]", "abcdef [[7, 8]]"]
    forest.tree.check(nothing_held)


@pytest.mark.parametrize("known", ["abcdefgh", "abcdef"])
def test_a_tail_that_the_tree_has_already_changes_nothing(known: str) -> None:
    forest = Forest()
    forest.add(known)
    before = forest.shape()
    kept, superseded = forest.tree.insert(SCOPE, 0, tokens("ef"), np.array([[9]], dtype=np.int32))
    assert (kept.tolist(), superseded.tolist()) == ([[1]], [])
    assert forest.shape() == before


def test_tails_that_differ_are_siblings() -> None:
    forest = Forest()
    forest.add("abcdef")
    assert forest.add("abcdeX") == [0, 2]
    assert forest.shape() == ["abcd [[0]]", " eX [[2]]", " ef [[1]]"]
    assert forest.match("abcdeX") == (6, [0, 2])


def test_whoever_is_first_keeps_the_block() -> None:
    forest = Forest()
    forest.add("abcdefgh")
    kept, _ = forest.tree.insert(SCOPE, None, tokens("abcdefghij"), np.array([[7, 8, 9]], dtype=np.int32))
    assert kept.tolist() == [[0, 1, 9]]
    assert forest.shape() == ["abcdefghij [[0, 1, 9]]"]


def test_queries_do_not_mutate() -> None:
    forest = Forest(windows=(None, 5))
    for text in ("abcdefghijkl", "abcdefXX", "abYY", "abcdefghijklmn"):
        forest.add(text)

    def everything() -> list[object]:
        nodes = [{slot: repr(getattr(node, slot)) for slot in Node.__slots__} for node in forest.tree.nodes()]
        return [forest.shape(), forest.tree._now, list(forest.tree._slid), nodes]

    before = everything()
    for text in ("abcdefghijklmn", "abcdefX", "abY", "zz", "", "abcdefghijkl####"):
        forest.match(text)
        forest.match(text, Scope("unknown"))
    assert everything() == before


def test_a_match_survives_changes_of_the_tree() -> None:
    forest = Forest()
    forest.add("abcdefgh")
    match = forest.tree.match(tokens("abcdefgh"), SCOPE)
    forest.add("abcdXXXX")
    forest.evict(3)
    assert match.blocks.tolist() == [[0, 1]]


# -- window groups and holes -----------------------------------------------------------------------------------------


def windowed(window: int, holes: list[int], num_blocks: int = 5) -> Forest:
    """`num_blocks` blocks of one sequence, in a full group and a window group that lacks some."""
    forest = Forest(windows=(None, window))
    blocks = forest.blocks(num_blocks * SIZE)
    blocks[1, holes] = ABSENT
    forest.tree.insert(SCOPE, None, tokens(TEXT[: num_blocks * SIZE]), blocks)
    return forest


TEXT = "abcdefghijklmnopqrst"


@pytest.mark.parametrize(
    ("window", "holes", "usable"),
    [
        (5, [], 20),
        (5, [0], 20),  # the token at 20 looks back to 16
        (5, [0, 1, 2, 3], 20),
        (6, [0, 1, 2, 3], 0),  # it looks back to 15, in block 3; and no shorter prefix has its window
        (5, [4], 16),
        (5, [3], 20),
        (9, [3], 12),
        (9, [1, 4], 16),  # the token at 16 looks back to 8
        (10, [1, 4], 4),
        (5, [0, 4], 16),
        (100, [2], 8),
        (100, [0], 0),
    ],
)
def test_a_hit_needs_the_last_window_of_every_group(window: int, holes: list[int], usable: int) -> None:
    forest = windowed(window, holes)
    assert forest.match(TEXT)[0] == usable
    assert usable == brute_usable(window, holes, 20)


def brute_usable(window: int, holes: list[int], length: int) -> int:
    """The definition: the longest prefix whose next token finds every position it looks back to."""
    return next(
        n
        for n in range(length, -1, -1)
        if not any(position // SIZE in holes for position in range(max(0, n - window + 1), n))
    )


@pytest.mark.parametrize("window", [5, 6, 7, 9, 12, 13])
def test_usable_length_against_its_definition(window: int) -> None:
    for mask in range(32):
        holes = [block for block in range(5) if mask >> block & 1]
        forest = windowed(window, holes)
        for length in (20, 19, 13, 8, 3):
            assert forest.match(TEXT[:length])[0] == brute_usable(window, holes, length), (holes, length)


def test_holes_are_filled_by_who_computes_them_again() -> None:
    forest = windowed(100, [0, 2])
    fresh = np.array([[50, 51, 52, 53, 54], [60, 61, 62, 63, 64]], dtype=np.int32)
    kept, _ = forest.tree.insert(SCOPE, None, tokens(TEXT), fresh)
    assert kept.tolist() == [[0, 1, 2, 3, 4], [60, 6, 62, 8, 9]]
    assert forest.match(TEXT)[0] == 20


def test_a_partial_tail_does_not_fill_a_hole() -> None:
    """It lacks tokens that the block in the tree stands for."""
    forest = windowed(100, [4])
    tail = np.array([[50], [60]], dtype=np.int32)
    kept, _ = forest.tree.insert(SCOPE, 3, tokens("qr"), tail)
    assert kept.tolist() == [[4], [ABSENT]]
    assert forest.match(TEXT)[0] == 16


# -- eviction --------------------------------------------------------------------------------------------------------


def test_leaves_go_first_and_from_their_ends() -> None:
    forest = Forest()
    forest.add("abcdefghijkl")
    assert forest.evict(1) == [2]
    assert forest.match("abcdefghijkl")[0] == 8
    assert forest.evict(2) == [1, 0]
    assert forest.shape() == []
    assert forest.tree._roots == {}


def test_least_recently_used_leaf_first_then_its_parent() -> None:
    forest = Forest()
    forest.add("abcdXXXX")
    forest.add("abcdYYYY")
    forest.add("zzzz")
    forest.tree.touch(forest.tree.match(tokens("abcdXXXX"), SCOPE))
    assert [forest.evict(1) for _ in range(4)] == [[2], [3], [1], [0]]


def test_evicting_all_visits_parents_last() -> None:
    forest = Forest()
    forest.add("abcdefghAAAA")
    forest.add("abcdefghBBBB")
    forest.add("abcdCCCC")
    order = forest.evict(100)
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert order.index(0) > max(order.index(block) for block in (1, 4))
    assert order.index(1) > max(order.index(block) for block in (2, 3))


def test_held_blocks_and_what_is_before_them_stay() -> None:
    forest = Forest()
    forest.add("abcdefghijkl")
    assert forest.evict(100, holding(0, 1)) == [2]
    assert forest.evict(100, holding(0, 1)) == []
    forest.tree.offer(1)
    assert forest.evict(100) == [1, 0]


def test_evict_gives_no_more_than_asked_in_one_group() -> None:
    forest = Forest()
    forest.add("abcdefghijklmnop")
    forest.add("ABCDEFGHIJKLMNOP")
    assert len(forest.evict(5)) == 5
    assert len(forest.evict(2)) == 2


def test_blocks_behind_the_window_go_before_any_hit_is_lost() -> None:
    forest = windowed(5, [])
    forest.tree.offer(4)
    assert forest.evict(4) == [5, 6, 7, 8]
    assert forest.match(TEXT)[0] == 20
    assert forest.evict(2) == [4, 9]


def test_blocks_behind_the_window_are_still_known_after_a_split() -> None:
    forest = windowed(5, [])
    forest.tree.offer(4)
    match = forest.tree.match(tokens(TEXT[:16]), SCOPE)
    forest.tree.touch(match)  # splits the node after four blocks
    assert forest.tree.match(tokens(TEXT), SCOPE).path[0][1] == 16
    assert forest.evict(3) == [5, 6, 7]
    assert forest.match(TEXT)[0] == 20
    assert forest.match(TEXT[:16])[0] == 16


def test_the_memory_of_an_evicted_tail_is_returned() -> None:
    forest = Forest(num_blocks=2000)
    forest.tree.insert(SCOPE, None, np.arange(4000, dtype=np.int32), np.arange(1000, dtype=np.int32)[None])
    forest.tree.offer(999)
    forest.evict(900)
    (leaf,) = forest.tree.nodes()
    whole = leaf.tokens if leaf.tokens.base is None else leaf.tokens.base
    assert leaf.tokens.size == 400
    assert whole.size <= 800


def test_many_scopes_are_forgotten_one_by_one() -> None:
    forest = Forest()
    scopes = [Scope("tenant", salt=str(index)) for index in range(20)]
    for scope in scopes:
        forest.add("abcd", scope)
    roots = forest.tree._roots
    assert forest.evict(5) == [0, 1, 2, 3, 4]
    assert list(roots) == scopes[5:]
    assert forest.tree._roots is roots  # not made anew for each of what may be a million salts


# -- misuse ----------------------------------------------------------------------------------------------------------


def test_an_unknown_block_is_an_invariant_error() -> None:
    forest = Forest()
    with pytest.raises(InvariantError, match="block 3 is not in the tree"):
        forest.tree.offer(3)
    with pytest.raises(InvariantError, match="block 3 is not in the tree"):
        forest.tree.insert(SCOPE, 3, tokens("abcd"), np.array([[0]], dtype=np.int32))
    assert forest.shape() == []


def break_owner(tree: RadixTree) -> None:
    tree._owner[0] = None


def break_key(tree: RadixTree) -> None:
    next(tree.nodes()).tokens[0] += 1


def break_queue(tree: RadixTree) -> None:
    next(tree.nodes()).queued = False


def break_blocks(tree: RadixTree) -> None:
    next(tree.nodes()).blocks[0, 1] = 0


@pytest.mark.parametrize("damage", [break_owner, break_key, break_queue, break_blocks])
def test_check_sees_damage(damage: Callable[[RadixTree], None]) -> None:
    forest = Forest()
    forest.add("abcdefgh")
    damage(forest.tree)
    with pytest.raises(InvariantError):
        forest.tree.check(nothing_held)


@pytest.mark.parametrize(
    ("a", "b", "shared"), [("", "abc", 0), ("abc", "abc", 3), ("abc", "abcd", 3), ("abX", "abc", 2), ("x", "abc", 0)]
)
def test_common_prefix(a: str, b: str, shared: int) -> None:
    assert common_prefix(tokens(a), tokens(b)) == common_prefix(tokens(b), tokens(a)) == shared


@pytest.mark.parametrize("length", [63, 64, 65, 1000, 5000])
def test_common_prefix_of_long_sequences(length: int) -> None:
    a = np.arange(length, dtype=np.int32)
    assert common_prefix(a, a.copy()) == length
    for at in (0, 1, 63, length // 2, length - 1):
        b = a.copy()
        b[min(at, length - 1)] = -5
        assert common_prefix(a, b) == min(at, length - 1)
        assert common_prefix(a, b.astype(np.int64)) == min(at, length - 1)
