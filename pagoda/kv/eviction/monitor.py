"""ReuseMonitor: from the latest uses of blocks, how likely a block is to be used again, and how soon.

    use ──> sketch      how often each block was used, in or out of the cache: 2^20 saturating counters, halved in time
        └─> ring        the last 2^14 uses of a sample of blocks: (class, tick, tick of the block's next use if it came)

A class is a number of uses so far, 1 to 5 or more. A use without a next one counts as "not yet" at its present age, so
young uses do not look like failures (the product-limit estimate of Kaplan and Meier, 1958). Blocks are sampled by their
hash (SHARDS, Waldspurger et al., FAST 2015); the larger the cache, the fewer, so that the ring spans its residents.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

NUM_CLASSES = 5
NUM_AGES = 48  # two to an octave of ticks
RING_SIZE = 1 << 14
SKETCH_SIZE = 1 << 20
SPAN = 8  # the ring covers this many times the blocks in the cache
PRIOR_USES = 20.0  # a class is taken for the average one until it has many more uses than this
PRIOR_CHANCE = 0.02
WIDTHS = np.diff(2.0 ** (np.arange(NUM_AGES + 1) / 2))

_PLACE = np.uint64(SKETCH_SIZE - 1)
_CLASS_OF_COUNT = np.clip(np.arange(256) - 1, 0, NUM_CLASSES - 1).astype(np.uint8)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def age_bucket(age: int) -> int:
    """The bucket of an age in ticks."""
    return min(int(2 * math.log2(age)), NUM_AGES - 1) if age > 1 else 0


class ReuseMonitor:
    """Counts uses of blocks and estimates their rate of reuse by class and age."""

    def __init__(self, block_size: int) -> None:
        self._weights = _mix(np.arange(1, block_size + 1, dtype=np.uint64)) | np.uint64(1)
        self._counters = np.zeros(SKETCH_SIZE, dtype=np.uint8)
        self._num_counted = 0
        self._classes = np.zeros(RING_SIZE, dtype=np.int64)
        self._born = np.zeros(RING_SIZE, dtype=np.int64)
        self._reused = np.zeros(RING_SIZE, dtype=np.int64)  # 0: not yet
        self._blocks = [0] * RING_SIZE
        self._latest: dict[int, int] = {}  # block -> where in the ring its last use is
        self._num_uses = 0
        self._sampled_bits = np.uint64(0)

    def classes(self, tokens: npt.NDArray[np.integer], depth: int) -> npt.NDArray[np.uint8]:
        """The class of each block of `tokens`, which begin at a block boundary, `depth` tokens into their sequence."""
        return self._classify(self._hash(tokens, depth))

    def use(self, tokens: npt.NDArray[np.integer], depth: int, now: int) -> None:
        """Count a use of each block."""
        hashes = self._hash(tokens, depth)
        places = hashes & _PLACE
        self._counters[places] = np.minimum(self._counters[places], 254) + 1
        self._num_counted += hashes.size
        if self._num_counted > 4 * SKETCH_SIZE:
            self._counters >>= 1
            self._num_counted = 0
        sampled = hashes[(hashes >> np.uint64(32)) & self._sampled_bits == 0]
        for block, kind in zip(sampled.tolist(), self._classify(sampled).tolist(), strict=True):
            before = self._latest.get(block)
            if before is not None:
                self._reused[before] = now
            at = self._num_uses % RING_SIZE
            if self._latest.get(self._blocks[at]) == at:
                del self._latest[self._blocks[at]]
            self._blocks[at], self._latest[block] = block, at
            self._classes[at], self._born[at], self._reused[at] = kind, now, 0
            self._num_uses += 1

    def chances(self, now: int) -> npt.NDArray[np.float64]:
        """For each class and age bucket, the chance that a block that old is used before it is older than the bucket.

        Returns `[NUM_CLASSES, NUM_AGES]`. Classes with few uses lean on the average of all.
        """
        num = min(self._num_uses, RING_SIZE)
        came = self._reused[:num] > 0
        age = np.where(came, self._reused[:num], now) - self._born[:num]
        cell = self._classes[:num] * NUM_AGES + (2 * np.log2(np.maximum(age, 1))).astype(np.int64)
        shape = NUM_CLASSES, NUM_AGES
        left = np.bincount(cell, minlength=NUM_CLASSES * NUM_AGES).reshape(shape)
        reuses = np.bincount(cell[came], minlength=NUM_CLASSES * NUM_AGES).reshape(shape)
        exposed = left[:, ::-1].cumsum(axis=1)[:, ::-1] - 0.5 * (left - reuses)
        average = (reuses.sum(axis=0) + PRIOR_USES * PRIOR_CHANCE) / (exposed.sum(axis=0) + PRIOR_USES)
        return np.asarray((reuses + PRIOR_USES * average) / (exposed + PRIOR_USES))

    def span(self, num_blocks: int) -> None:
        """Sample so that the ring spans a cache of `num_blocks` blocks."""
        self._sampled_bits = np.uint64((1 << max(0, (SPAN * num_blocks // RING_SIZE).bit_length() - 1)) - 1)

    def _classify(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
        kinds: npt.NDArray[np.uint8] = _CLASS_OF_COUNT[self._counters[hashes & _PLACE]]
        return kinds

    def _hash(self, tokens: npt.NDArray[np.integer], depth: int) -> npt.NDArray[np.uint64]:
        """64 bits for each block, from its tokens and its place: enough to tell statistics apart, not for identity."""
        size = self._weights.size
        num_blocks = -(-tokens.size // size)
        padded = tokens.astype(np.uint64)
        if tokens.size < num_blocks * size:
            padded = np.concatenate([padded, np.zeros(num_blocks * size - tokens.size, dtype=np.uint64)])
        places = np.arange(depth // size, depth // size + num_blocks, dtype=np.uint64)
        return _mix(padded.reshape(num_blocks, size) @ self._weights + places * _MULTIPLIER)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection that spreads every bit over the upper and the lower half."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
