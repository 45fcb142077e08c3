"""The pool's bytes: what its views share, what copies move, and that offsets are 64-bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagoda.errors import ConfigError, InvariantError
from pagoda.kv.layout import KVLayout
from pagoda.kv.pool import BlockPool
from tests.kv.test_layout import LAYOUTS, attention

POISON = 0xA5
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


def poisoned(layout: KVLayout, num_blocks: int) -> BlockPool:
    pool = BlockPool(layout, num_blocks)
    pool._bytes.fill_(POISON)
    return pool


def by_block(pool: BlockPool) -> torch.Tensor:
    """All bytes of a pool, `[num_blocks, pool_block_bytes]`, those after a strip included."""
    planes = pool.layout.planes
    memory = pool._bytes.split([each.count * each.stride * pool.num_blocks for each in planes])
    of_size = [part.view(each.count, pool.num_blocks, each.stride) for part, each in zip(memory, planes, strict=True)]
    return torch.cat([part.transpose(0, 1).flatten(1) for part in of_size], dim=1)


def num_poisoned(pool: BlockPool) -> list[int]:
    return (by_block(pool) == POISON).sum(dim=1).tolist()


def fill(pool: BlockPool, group: int, block: int, seed: int) -> dict[tuple[int, str], torch.Tensor]:
    """Write random bytes through every view of a block; return what was written."""
    generator = torch.Generator().manual_seed(seed)
    written = {}
    for layer in pool.layout.groups[group].layers:
        for part in pool.layout.layers[layer].parts:
            view = pool.view(layer, part.name)
            raw = torch.randint(
                0, 128, (part.num_bytes,), dtype=torch.uint8, generator=generator
            )  # no NaN in any dtype
            values = raw.view(view.dtype).view(part.shape)
            view[block] = values
            written[layer, part.name] = values
    return written


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@each_layout
def test_views_read_back_what_was_written_and_write_nothing_else(layout: KVLayout) -> None:
    for group in range(len(layout.groups)):
        pool = poisoned(layout, 5)
        written = fill(pool, group, 2, seed=1)
        for (layer, part), values in written.items():
            assert same(pool.view(layer, part)[2], values)
        num_written = sum(values.nbytes for values in written.values())  # below 128: none of them is like poison
        expected = [layout.pool_block_bytes] * 5
        expected[2] -= num_written
        assert num_poisoned(pool) == expected


@each_layout
def test_views_share_the_pools_memory(layout: KVLayout) -> None:
    pool = BlockPool(layout, 3)
    for layer, spec in enumerate(layout.layers):
        for part in spec.parts:
            view = pool.view(layer, part.name)
            assert view.shape == (3, *part.shape)
            assert view.untyped_storage().data_ptr() == pool._bytes.untyped_storage().data_ptr()


@each_layout
def test_copy_block_copies_all_of_it_and_nothing_more(layout: KVLayout) -> None:
    pool = poisoned(layout, 4)
    written = fill(pool, 0, 1, seed=2)
    pool.copy_block(1, 2)
    for (layer, part), values in written.items():
        assert same(pool.view(layer, part)[2], values)
        assert same(pool.view(layer, part)[1], values)
    assert num_poisoned(pool)[0] == num_poisoned(pool)[3] == layout.pool_block_bytes
    assert torch.equal(by_block(pool)[1], by_block(pool)[2])


@each_layout
def test_export_and_import_round_trip(layout: KVLayout) -> None:
    pool, other = poisoned(layout, 4), poisoned(layout, 4)
    written = fill(pool, 0, 3, seed=3)
    buffer = np.empty(layout.block_bytes, dtype=np.uint8)
    pool.export_block(3, buffer)
    other.import_block(1, buffer)
    for (layer, part), values in written.items():
        assert same(other.view(layer, part)[1], values)
    assert torch.equal(by_block(pool)[3], by_block(other)[1])
    assert [num_poisoned(other)[block] for block in (0, 2, 3)] == [layout.pool_block_bytes] * 3


@each_layout
def test_exported_bytes_are_the_parts_of_all_layers_in_order(layout: KVLayout) -> None:
    """What tiers have stored is read by whoever has the same fingerprint, whatever the order of axes in the pool."""
    for group, kind in enumerate(layout.groups):
        pool = poisoned(layout, 3)
        written = fill(pool, group, 1, seed=4)
        buffer = np.zeros(layout.block_bytes, dtype=np.uint8)
        pool.export_block(1, buffer)
        expected = bytearray()
        for layer in kind.layers:
            for part in layout.layers[layer].parts:
                expected += written[layer, part.name].contiguous().view(torch.uint8).numpy().tobytes()
                expected += bytes([POISON]) * (-len(expected) % 64)
        assert buffer.tobytes() == expected + bytes([POISON]) * (layout.block_bytes - len(expected))


def test_neighbours_are_one_run_of_a_layers_memory() -> None:
    layout = LAYOUTS["attention"]
    pool = BlockPool(layout, 4)
    (planes,) = layout.planes
    keys, values = pool.view(1, "keys"), pool.view(1, "values")
    for block in range(4):
        assert keys[block].data_ptr() == keys.data_ptr() + block * planes.num_bytes
        assert values[block].data_ptr() == keys[block].data_ptr() + planes.num_bytes // 2


@pytest.mark.parametrize("length", [1, -1, 1024])
def test_a_buffer_of_the_wrong_size_is_refused(length: int) -> None:
    """A one-byte buffer would broadcast over the block without a word."""
    layout = attention(1, 1, 16, "float32")
    assert layout.block_bytes != 1024
    pool = poisoned(layout, 2)
    buffer = np.zeros(length if length > 0 else layout.block_bytes - 1, dtype=np.uint8)
    with pytest.raises(InvariantError, match="uint8"):
        pool.import_block(0, buffer)
    with pytest.raises(InvariantError, match="uint8"):
        pool.export_block(0, buffer)
    with pytest.raises(InvariantError, match="uint8"):
        pool.import_block(0, np.zeros(layout.block_bytes, dtype=np.int16))
    assert (pool._bytes == POISON).all()


def test_offsets_beyond_32_bits() -> None:
    """A pool of 1 TiB on torch's meta device, which computes strides and holds no memory."""
    layout = attention(32, 8, 128, "bfloat16")
    num_blocks = 2**40 // layout.pool_block_bytes
    pool = BlockPool(layout, num_blocks, device="meta")
    assert pool.num_bytes > 2**39
    last = pool.view(31, "values")[num_blocks - 1, 7, 15]
    plane = num_blocks * layout.planes[0].stride
    assert (
        last.storage_offset() * 2
        == 31 * plane + plane - layout.planes[0].stride + 2 * 8 * 16 * 128 + 2 * (7 * 16 + 15) * 128
    )
    assert last.storage_offset() * 2 + 2 * 128 <= pool.num_bytes


def test_pages_are_touched_once_and_progress_is_told() -> None:
    layout = attention(4, 4, 64, "float32")
    calls: list[tuple[int, int]] = []
    pool = BlockPool(layout, 2 * (64 << 20) // layout.pool_block_bytes + 3, progress=lambda *call: calls.append(call))
    done = [d for d, _ in calls]
    assert done == sorted(set(done))
    assert calls[-1] == (pool.num_bytes, pool.num_bytes)
    assert len(calls) == 3
    assert not pool._bytes.any()


def test_too_much_memory_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="bytes of KV memory"):
        BlockPool(attention(1, 1, 16, "float32"), 2**50)
