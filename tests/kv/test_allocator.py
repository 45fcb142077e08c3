"""Free, held, cached: the states of a block and what may not happen to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.errors import ConfigError, InvariantError, OutOfBlocks
from pagoda.kv.allocator import Allocator


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.int32)


def counts(allocator: Allocator) -> tuple[int, int, int]:
    allocator.check()
    return allocator.num_free, allocator.num_held, allocator.num_cached


def test_the_block_freed_last_is_reused_first() -> None:
    allocator = Allocator(6)
    assert allocator.allocate(4).tolist() == [0, 1, 2, 3]
    allocator.release(ids(1))
    allocator.release(ids(3))
    assert [allocator.allocate(1).tolist() for _ in range(3)] == [[3], [1], [4]]


def test_blocks_taken_together_ascend() -> None:
    allocator = Allocator(6)
    allocator.allocate(5)
    allocator.release(ids(4, 0, 2))
    allocator.release(ids(3))
    assert allocator.allocate(4).tolist() == [0, 2, 3, 4]


def test_all_or_nothing() -> None:
    allocator = Allocator(4)
    allocator.allocate(2)
    with pytest.raises(OutOfBlocks) as caught:
        allocator.allocate(3)
    assert (caught.value.needed, caught.value.available) == (3, 2)
    assert counts(allocator) == (2, 2, 0)
    assert allocator.allocate(2).tolist() == [2, 3]
    assert allocator.allocate(0).size == 0


def test_a_block_is_free_when_the_last_reference_goes() -> None:
    allocator = Allocator(3)
    block = allocator.allocate(1)
    allocator.retain(block)
    allocator.release(block)
    assert (allocator.ref_count(0), counts(allocator)) == (1, (2, 1, 0))
    allocator.release(block)
    assert (allocator.ref_count(0), counts(allocator)) == (0, (3, 0, 0))


def test_the_tree_keeps_a_block_that_nobody_holds() -> None:
    allocator = Allocator(3)
    block = allocator.allocate(1)
    allocator.enter_tree(block)
    assert counts(allocator) == (2, 1, 0)
    allocator.release(block)
    assert counts(allocator) == (2, 0, 1)
    allocator.retain(block)
    assert counts(allocator) == (2, 1, 0)
    assert allocator.held(ids(0, 1)).tolist() == [True, False]


def test_leaving_the_tree_frees_what_is_not_held() -> None:
    allocator = Allocator(3)
    blocks = allocator.allocate(2)
    allocator.enter_tree(blocks)
    allocator.release(blocks[:1])
    allocator.leave_tree(blocks)
    assert counts(allocator) == (2, 1, 0)
    assert not allocator.in_tree(0)
    allocator.release(blocks[1:])
    assert counts(allocator) == (3, 0, 0)


def misuse_double_free(allocator: Allocator) -> None:
    allocator.release(ids(0))
    allocator.release(ids(0))


def misuse_free_in_part(allocator: Allocator) -> None:
    allocator.release(ids(0, 2))  # 2 is free: neither may go


@pytest.mark.parametrize(
    "misuse",
    [
        misuse_double_free,
        misuse_free_in_part,
        lambda allocator: allocator.retain(ids(0, 2)),
        lambda allocator: allocator.enter_tree(ids(0, 2)),
        lambda allocator: allocator.leave_tree(ids(0)),
        lambda allocator: allocator.allocate(-1),
    ],
    ids=["double free", "release of a free block", "retain of a free block", "tree", "leave", "negative count"],
)
def test_misuse_is_an_invariant_error_and_changes_nothing(misuse: object) -> None:
    allocator = Allocator(4)
    allocator.allocate(1)
    with pytest.raises(InvariantError):
        misuse(allocator)  # type: ignore[operator]
    free, held, cached = counts(allocator)
    assert free + held + cached == 4
    assert allocator.ref_count(2) == 0


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError):
        Allocator(0)


def test_check_sees_a_lost_block() -> None:
    allocator = Allocator(3)
    allocator._num_free -= 1
    with pytest.raises(InvariantError, match="disagree"):
        allocator.check()
    allocator = Allocator(3)
    allocator._num_cached += 1
    with pytest.raises(InvariantError, match="cached"):
        allocator.check()


@given(st.lists(st.tuples(st.sampled_from("arRel"), st.integers(0, 7)), max_size=60))
def test_conservation_under_random_use(steps: list[tuple[str, int]]) -> None:
    """Against a model of two dictionaries."""
    allocator = Allocator(8)
    refs = dict.fromkeys(range(8), 0)
    tree: set[int] = set()
    for action, block in steps:
        one = ids(block)
        if action == "a" and any(refs[b] == 0 and b not in tree for b in refs):
            (got,) = allocator.allocate(1).tolist()
            assert refs[got] == 0
            assert got not in tree
            refs[got] = 1
        elif action == "r" and refs[block]:
            allocator.release(one)
            refs[block] -= 1
        elif action == "R" and (refs[block] or block in tree):
            allocator.retain(one)
            refs[block] += 1
        elif action == "e" and refs[block]:
            allocator.enter_tree(one)
            tree.add(block)
        elif action == "l" and block in tree:
            allocator.leave_tree(one)
            tree.remove(block)
        held = sum(count > 0 for count in refs.values())
        cached = sum(refs[b] == 0 for b in tree)
        assert counts(allocator) == (8 - held - cached, held, cached)
        assert [allocator.ref_count(b) for b in refs] == list(refs.values())
