"""The sketch counts about right, never too little, forgets, and takes what does not fit a byte."""

from __future__ import annotations

import hashlib

import numpy as np

from pagoda.kv.frequency import FrequencySketch


def keys(count: int, first: int = 0) -> list[bytes]:
    return [hashlib.blake2b(number.to_bytes(4, "big")).digest() for number in range(first, first + count)]


def test_counts_are_never_too_small_and_seldom_too_large() -> None:
    sketch = FrequencySketch()
    for _ in range(3):
        sketch.add(keys(1000))
    sketch.add(keys(20_000, first=1000))
    counts = sketch.count(keys(1000))
    assert counts.min() == 3
    assert np.count_nonzero(counts > 3) < 30
    assert np.count_nonzero(sketch.count(keys(1000, first=50_000))) < 30


def test_the_count_comes_back_with_the_use() -> None:
    sketch = FrequencySketch()
    assert sketch.add(keys(2)).tolist() == [1, 1]
    assert sketch.add(keys(1)).tolist() == [2]
    assert sketch.add([]).tolist() == []


def test_old_uses_fade() -> None:
    sketch = FrequencySketch(halve_after=10)
    for _ in range(9):
        sketch.add(keys(1))
    assert sketch.count(keys(1)).tolist() == [9]
    sketch.add(keys(1, first=1))
    assert sketch.count(keys(2)).tolist() == [4, 0]


def test_a_count_stays_at_its_end() -> None:
    sketch = FrequencySketch()
    for _ in range(300):
        sketch.add(keys(1))
    assert sketch.count(keys(1)).tolist() == [255]
