"""Memory in huge pages: zeroed, aligned, writable, and kept as long as a view of it."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from pagoda import memory
from pagoda.memory import Shelf, host_memory


@pytest.mark.parametrize("num_bytes", [0, 1, 4097, 2 << 20, (5 << 20) + 3])
@pytest.mark.parametrize("has_huge_pages", [True, False])
def test_host_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int, has_huge_pages: bool) -> None:
    monkeypatch.setattr(memory, "_HAS_HUGE_PAGES", has_huge_pages and memory._HAS_HUGE_PAGES)
    got = host_memory(num_bytes)
    assert got.dtype == np.uint8
    assert got.shape == (num_bytes,)
    assert not got.any()
    assert got.ctypes.data % 4096 == 0
    got[:] = 7
    view = got[-1:]
    del got
    gc.collect()
    assert (view == 7).all()


def test_a_kernel_without_huge_pages_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapping(memory.mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(memory.mmap, "mmap", Mapping)
    got = host_memory(3 << 20)
    got[:] = 1
    assert got.shape == (3 << 20,)


def test_a_shelf_keeps_pieces_together_and_apart() -> None:
    shelf = Shelf()
    pieces = [shelf.take(size) for size in (100, 64, 0, 1, 5000)]
    for value, piece in enumerate(pieces):
        assert piece.ctypes.data % 64 == 0
        assert not piece.any()
        piece[:] = value
    assert [set(piece.tolist()) for piece in pieces] == [{0}, {1}, set(), {3}, {4}]
    assert [len(piece) for piece in pieces] == [100, 64, 0, 1, 5000]
    assert pieces[4].ctypes.data - pieces[0].ctypes.data == 128 + 64 + 64


def test_a_shelf_takes_more_memory_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shelf, "_CHUNK_BYTES", 256)
    shelf = Shelf()
    pieces = [shelf.take(size) for size in (200, 100, 1000, 8)]
    for value, piece in enumerate(pieces):
        piece[:] = value
    assert [(len(piece), set(piece.tolist())) for piece in pieces] == [(200, {0}), (100, {1}), (1000, {2}), (8, {3})]
