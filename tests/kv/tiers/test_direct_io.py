"""Direct reads into buffers of any alignment and size."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from pagoda.kv.tiers.direct_io import BLOCK, BouncePool, align_up, open_direct, read_run
from pagoda.kv.tiers.records import aligned_empty

FILE_BLOCKS = 64


@pytest.fixture
def content(tmp_path: Path) -> np.ndarray:
    data = np.random.default_rng(0).integers(0, 256, FILE_BLOCKS * BLOCK, dtype=np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    return data


def unaligned(num_bytes: int) -> np.ndarray:
    return aligned_empty(num_bytes + 24)[24:]


@pytest.mark.parametrize("num_bounce_blocks", [2, 64])
@pytest.mark.parametrize("seed", range(5))
def test_every_mix_of_buffers_is_filled(tmp_path: Path, content: np.ndarray, num_bounce_blocks: int, seed: int) -> None:
    """Small bounce buffers make one run several calls, and cut what is larger than they are."""
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.choice([0, 1, 100, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK - 7, 5 * BLOCK], 8)]
    outs = [aligned_empty(size) if rng.random() < 0.5 else unaligned(size) for size in sizes]
    read_run(open_direct(tmp_path / "file"), 2 * BLOCK, outs, BouncePool(num_bounce_blocks * BLOCK))
    offset = 2 * BLOCK
    for out in outs:
        np.testing.assert_array_equal(out, content[offset : offset + out.size])
        offset += align_up(out.size)


@pytest.mark.parametrize("make", [aligned_empty, unaligned])
def test_a_file_that_ends_early_is_an_error(tmp_path: Path, content: np.ndarray, make) -> None:
    with pytest.raises(OSError, match="early") as caught:
        read_run(open_direct(tmp_path / "file"), (FILE_BLOCKS - 2) * BLOCK, [make(4 * BLOCK)], BouncePool())
    assert caught.value.errno == errno.EIO


def test_aligned_memory_is_aligned() -> None:
    for size in (1, BLOCK, 3 << 20):
        memory = aligned_empty(size)
        assert memory.size == size
        assert memory.ctypes.data % BLOCK == 0
