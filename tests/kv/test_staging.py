"""Staged copies: given, kept, copied and dropped, and never more of them than are needed."""

from __future__ import annotations

import pytest
import torch

from pagoda.kv.formats import parse_format
from pagoda.kv.layout import KVLayout
from pagoda.kv.staging import StagedPool


@pytest.fixture
def pool() -> StagedPool:
    layout = KVLayout([parse_format("int4").attention(2, 8, 4, None, "float32")] * 3, 4)
    assert layout.staged is not None
    return StagedPool(layout, layout.staged, num_blocks=20, num_staged=4)


def keys_of(pool: StagedPool, block: int) -> torch.Tensor:
    slot = int(pool.staging.slot_of[block])
    assert slot >= 0, "the block has no copy"
    return pool.staging.copies.view(1, "keys")[slot]


def test_a_copy_stays_until_its_block_is_full(pool: StagedPool) -> None:
    pool.staging.open([7, 3])
    keys_of(pool, 7).fill_(1.5)
    pool.staging.open([7, 9])
    assert (keys_of(pool, 7) == 1.5).all()
    assert len({int(pool.staging.slot_of[block]) for block in (7, 3, 9)}) == 3
    pool.staging.close([7, 3, 11])
    assert pool.staging.num_staged == 1
    assert sorted(torch.nonzero(pool.staging.slot_of >= 0).flatten().tolist()) == [9]


def test_what_is_filled_no_more_makes_room_before_memory_grows(pool: StagedPool) -> None:
    pool.staging.open_blocks = lambda: [1]
    pool.staging.open([0, 1, 2, 3])
    keys_of(pool, 1).fill_(2.0)
    pool.staging.open([4, 5])
    assert pool.staging.copies.num_blocks == 4
    assert (keys_of(pool, 1) == 2.0).all()
    assert pool.staging.num_staged == 3
    pool.staging.open([4, 5, 6, 7, 8])
    assert pool.staging.copies.num_blocks == 8
    assert (keys_of(pool, 1) == 2.0).all()


def test_until_it_is_told_otherwise_everything_staged_is_being_filled(pool: StagedPool) -> None:
    pool.staging.open(range(4))
    keys_of(pool, 0).fill_(3.0)
    pool.staging.open([9])
    assert pool.staging.num_staged == 5
    assert (keys_of(pool, 0) == 3.0).all()


def test_copying_a_block_copies_what_is_staged_of_it(pool: StagedPool) -> None:
    pool.staging.open_blocks = lambda: [2]
    pool.staging.open([2])
    keys_of(pool, 2).fill_(4.0)
    pool.view(0, "key_zeros")[2] = 5.0
    for target in range(3, 10):
        pool.copy_block(2, target)
        assert (keys_of(pool, target) == 4.0).all()
        assert (pool.view(0, "key_zeros")[target] == 5.0).all()
    assert pool.staging.copies.num_blocks == 4
    pool.copy_block(15, 16)
    assert int(pool.staging.slot_of[16]) == -1
