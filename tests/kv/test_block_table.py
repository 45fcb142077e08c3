"""Block tables: slots, growth, what slides out, forks."""

from __future__ import annotations

import numpy as np

from pagoda.kv.block_table import BlockTable


def table(*blocks: int, block_size: int = 4) -> BlockTable:
    return BlockTable(block_size, np.array(blocks, dtype=np.int32))


def test_slots_as_drawn_in_the_module() -> None:
    assert table(7, 3, 9, block_size=16).slots(35, 36) == [9 * 16 + 3]


def test_slots_cross_blocks() -> None:
    assert table(7, 3).slots(2, 6) == [30, 31, 12, 13]
    assert table(7).slots(2, 2) == []


def test_slots_beyond_32_bits() -> None:
    slots = table(2**31 - 1, block_size=16).slots(0, 16)
    assert slots[-1] == (2**31 - 1) * 16 + 15


def test_append_grows_and_keeps_order() -> None:
    grown = table()
    for block in range(100):
        grown.append(np.array([block], dtype=np.int32))
    assert len(grown) == 100
    assert grown.ids.tolist() == list(range(100))


def test_the_callers_array_is_not_aliased() -> None:
    source = np.array([1, 2], dtype=np.int32)
    mine = BlockTable(4, source)
    mine.replace(0, 9)
    assert source.tolist() == [1, 2]
    assert mine.ids.tolist() == [9, 2]


def test_truncate_returns_what_it_drops() -> None:
    cut = table(5, 6, 7)
    assert cut.truncate(1).tolist() == [6, 7]
    assert cut.ids.tolist() == [5]
    cut.append(np.array([8], dtype=np.int32))
    assert cut.ids.tolist() == [5, 8]


def test_slide_lets_go_once_and_keeps_indices() -> None:
    slid = table(5, 6, 7, 8)
    assert slid.slide(2).tolist() == [5, 6]
    assert slid.slide(2).tolist() == []
    assert slid.slide(1).tolist() == []  # never back
    assert slid.held.tolist() == [7, 8]
    assert slid.slots(8, 9) == [7 * 4]
    assert len(slid) == 4


def test_fork_grows_on_its_own() -> None:
    one = table(5, 6, 7)
    one.slide(1)
    two = one.fork()
    two.append(np.array([9], dtype=np.int32))
    two.replace(1, 4)
    assert (one.held.tolist(), two.held.tolist()) == ([6, 7], [4, 7, 9])


def test_what_is_packed_is_always_what_the_table_has() -> None:
    rng = np.random.default_rng(0)
    made = table()
    for _ in range(500):
        act, new = rng.integers(6), rng.integers(0, 1000, 1 + rng.integers(3), dtype=np.int32)
        if act < 2 or not len(made):
            made.append(new)
        elif act == 2:
            made.replace(int(rng.integers(len(made))), int(new[0]))
        elif act == 3:
            made.slide(int(rng.integers(len(made))))
        elif act == 4:
            made.truncate(max(made.first, len(made) - 1))
        else:
            made.repack(new, num_dropped=0)
            made = made.fork()
        assert made.packed == made.ids.tobytes()
