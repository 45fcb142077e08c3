"""Staged copies: given, kept, copied and dropped, and never more of them than are needed."""

from __future__ import annotations

import pytest
import torch

from pagoda.kv.formats import parse_format
from pagoda.kv.layout import KVLayout
from pagoda.kv.room import StagedRoom
from pagoda.kv.staging import StagedPool

LAYERS = range(3)


@pytest.fixture
def pool() -> StagedPool:
    layout = KVLayout([parse_format("int4").attention(2, 8, 4, None, "float32")] * len(LAYERS), 4)
    return StagedPool(layout, 20, StagedRoom(num_passing=2, num_lasting=4))


def copy_of(pool: StagedPool, block: int, layer: int, part: str) -> torch.Tensor:
    parts, slot_of = pool.staging.views(layer, part)
    assert slot_of[block] >= 0, "the block has no copy"
    return parts[slot_of[block]]


def fill(pool: StagedPool, block: int, value: float) -> None:
    """A copy that differs in every layer and part."""
    for layer in LAYERS:
        copy_of(pool, block, layer, "keys").fill_(value + layer)
        copy_of(pool, block, layer, "values").fill_(-value - layer)


def holds(pool: StagedPool, block: int, value: float) -> bool:
    keys = all((copy_of(pool, block, layer, "keys") == value + layer).all() for layer in LAYERS)
    return keys and all((copy_of(pool, block, layer, "values") == -value - layer).all() for layer in LAYERS)


def staged(pool: StagedPool) -> list[int]:
    """The blocks that have copies, the same in all layers."""
    found = [torch.nonzero(slots >= 0).flatten().tolist() for slots in pool.staging.slot_of]
    assert found.count(found[0]) == len(LAYERS)
    return sorted(found[0])


def test_a_copy_lasts_until_its_block_is_full(pool: StagedPool) -> None:
    pool.staging.open([], [7, 3])
    fill(pool, 7, 1.5)
    fill(pool, 3, 2.5)
    pool.staging.open([], [7, 9])
    fill(pool, 9, 3.5)
    assert holds(pool, 7, 1.5)
    assert holds(pool, 3, 2.5)
    pool.staging.close([7, 3, 11])
    assert staged(pool) == [9]
    assert pool.staging.num_lasting == 1


def test_what_a_step_fills_whole_is_staged_a_layer_at_a_time(pool: StagedPool) -> None:
    pool.staging.open([], [1])
    fill(pool, 1, 1.0)
    pool.staging.open([5, 6], [1, 2])
    assert staged(pool) == [1, 2, 5, 6]
    memory = pool.staging.room
    for layer in LAYERS:
        for block in (5, 6):
            copy_of(pool, block, layer, "keys").fill_(10.0 * block + layer)
        assert (copy_of(pool, 5, layer, "keys") == 50.0 + layer).all()
    assert holds(pool, 1, 1.0), "what lasts is nobody else's"
    pool.staging.close([5, 6])
    assert staged(pool) == [1, 2]
    assert pool.staging.room == memory == StagedRoom(2, 4)


def test_a_step_that_failed_leaves_no_copy_of_what_it_was_to_fill(pool: StagedPool) -> None:
    pool.staging.open([5, 6], [])
    pool.staging.open([8], [5])
    assert staged(pool) == [5, 8]
    fill(pool, 5, 1.0)
    copy_of(pool, 8, 2, "keys").fill_(9.0)
    assert holds(pool, 5, 1.0)


def test_a_block_that_was_begun_before_and_is_filled_whole_by_another_gives_its_copy_back(pool: StagedPool) -> None:
    pool.staging.open([], [5])
    pool.staging.open([5], [])
    assert pool.staging.num_lasting == 0
    assert staged(pool) == [5]


def test_what_is_filled_no_more_makes_room_before_memory_grows(pool: StagedPool) -> None:
    pool.staging.open_blocks = lambda: [1]
    pool.staging.open([], [0, 1, 2, 3])
    fill(pool, 1, 2.0)
    pool.staging.open([], [4, 5])
    assert pool.staging.room == StagedRoom(2, 4)
    assert holds(pool, 1, 2.0)
    assert staged(pool) == [1, 4, 5]
    pool.staging.open([11, 12, 13], [4, 5, 6, 7, 8])
    assert pool.staging.room == StagedRoom(3, 6), "as much as is needed"
    assert holds(pool, 1, 2.0)
    assert staged(pool) == [1, 4, 5, 6, 7, 8, 11, 12, 13]


def test_until_it_is_told_otherwise_everything_that_lasts_is_being_filled(pool: StagedPool) -> None:
    pool.staging.open([], range(4))
    fill(pool, 0, 3.0)
    pool.staging.open([], [9])
    assert pool.staging.num_lasting == 5
    assert holds(pool, 0, 3.0)


def test_copying_a_block_copies_what_is_staged_of_it(pool: StagedPool) -> None:
    pool.staging.open_blocks = lambda: [2]
    pool.staging.open([], [2])
    fill(pool, 2, 4.0)
    pool.view(0, "key_zeros")[2] = 5.0
    for target in range(3, 10):
        pool.copy_block(2, target)
        assert holds(pool, target, 4.0)
        assert (pool.view(0, "key_zeros")[target] == 5.0).all()
    assert pool.staging.room == StagedRoom(2, 4)
    pool.copy_block(15, 16)
    assert 16 not in staged(pool)


def test_a_block_begins_the_sequence_that_a_step_has_it_begin(pool: StagedPool) -> None:
    row_of = pool.staging.row_of
    assert (row_of == -1).all()
    pool.staging.begin({7: 0, 3: 2})
    assert (row_of[7], row_of[3], int((row_of >= 0).sum())) == (0, 2, 2)
    pool.staging.begin({3: 1, 9: 0})
    assert (row_of[3], row_of[9], int((row_of >= 0).sum())) == (1, 0, 2)
    pool.staging.begin({})
    assert (row_of == -1).all()


def test_first_tokens_are_as_many_as_sequences_and_part_of_the_memory(pool: StagedPool) -> None:
    assert pool.firsts.num_blocks == 4
    assert [pool.firsts.view(layer, "keys").shape for layer in LAYERS] == [(4, 2, 1, 8)] * 3
    blocks = 20 * pool.layout.pool_block_bytes
    assert pool.num_bytes == blocks + StagedRoom(2, 4).num_bytes(pool.layout)
    assert pool.layout.firsts is not None
    assert pool.layout.firsts.block_bytes == 3 * 2 * 64, "2 heads of 8 float32, of keys and of values in each layer"


def test_layers_of_other_formats_and_sizes_have_copies_of_their_own() -> None:
    int4, plain = parse_format("int4"), parse_format("fp32")
    kinds = [plain.attention(2, 8, 4, None, "float32"), int4.attention(2, 8, 4, None, "float32")]
    kinds += [int4.attention(1, 8, 4, None, "float32"), int4.attention(2, 8, 4, None, "float32")]
    pool = StagedPool(KVLayout(kinds, 4), 20, StagedRoom(1, 2))
    assert pool.firsts.view(0, "keys").shape == (2, 2, 1, 8), "of layers that are stored as computed as well"
    pool.staging.open([3], [4])
    for layer in (1, 2, 3):
        for block in (3, 4):
            copy_of(pool, block, layer, "keys").fill_(10.0 * layer + block)
            copy_of(pool, block, layer, "values").fill_(0.5)
        assert (copy_of(pool, 3, layer, "keys") == 10.0 * layer + 3).all()
    assert all((copy_of(pool, 4, layer, "keys") == 10.0 * layer + 4).all() for layer in (1, 2, 3))
