"""ReuseMonitor: from the latest uses of blocks, how likely a block of some kind is to be used again, and how soon.

    insert, hit ──> per block   how often it was used, its kind, the number of its latest use
               └──> ring        the last 2^16 uses: kind, tick, tick of the same block's next use if it came
    evict ────────> ghosts      by its name: the same of a block that left, so that coming back counts

A use without a next one counts as "not yet" at its present age, so young uses do not look like failures (the
product-limit estimate of Kaplan and Meier, 1958). A block's kind says what could be known when it was last used:

    new      by how many blocks the prompt was the first to have: a pasted document comes back less often than the line
             that continues a conversation
    the end  of a new prompt: what continues it rarely has its last block, which was not full
    reused   used 2, 3, 4, 5 or more times

A large cache notes one use in so many, so that the ring spans several times what it holds.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pagoda.kv.eviction.names import Names

NUM_AGES = 48  # two to an octave of ticks
RING_SIZE = 1 << 16
NUM_GHOSTS = 1 << 19
SPAN = 8  # the ring covers this many times the blocks in the cache
PRIOR_USES = 20.0  # a kind's chances have the shape of the average one's until it has many more uses than this
PRIOR_REUSES = 5.0
PRIOR_CHANCE = 0.02
WIDTHS = np.diff(2.0 ** (np.arange(NUM_AGES + 1) / 2))

END = 0
NUM_SIZES = 8  # of what is new; one and a half octaves of blocks each
MOST_USES = 5
NUM_KINDS = 1 + NUM_SIZES + MOST_USES - 1

BlockIds = npt.NDArray[np.int32]
_RING = RING_SIZE - 1
_GHOST = NUM_GHOSTS - 1
_NONE = -RING_SIZE - 1  # the number of no use


def age_bucket(age: int) -> int:
    """The bucket of an age in ticks."""
    return min(int(2 * math.log2(age)), NUM_AGES - 1) if age > 1 else 0


def kind_of_new(num_blocks: int) -> int:
    """The kind of a block among `num_blocks` that its prompt was the first to have."""
    return 1 + min(int(math.log2(num_blocks) / 1.5), NUM_SIZES - 1)


def kind_of_reused(num_uses: int) -> int:
    """The kind of a block used at least twice."""
    return NUM_SIZES + min(num_uses, MOST_USES) - 1


class ReuseMonitor:
    """Counts uses of the blocks of a pool and estimates their chance of reuse by kind and age.

    Attributes:
        kind: of each block by id, uint8; the entry at -1, of absent blocks, which have no uses, means nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        self.kind = np.zeros(num_blocks + 1, dtype=np.uint8)
        self._blocks = np.zeros((num_blocks + 1, 2), dtype=np.int64)
        self._uses, self._latest = self._blocks.T  # views
        self._latest[:] = _NONE  # the number of the block's latest use
        self._kinds = np.zeros(RING_SIZE, dtype=np.uint8)
        self._born = np.zeros(RING_SIZE, dtype=np.int64)
        self._reused = np.zeros(RING_SIZE, dtype=np.int64)  # 0: not yet
        self._num_uses = 0
        self._stride = max(1, SPAN * num_blocks // RING_SIZE)
        self._skip = 0
        self._ghosts = np.zeros(NUM_GHOSTS, dtype=np.int64)  # names, each where it says
        self._ghost_blocks = np.zeros((NUM_GHOSTS, 2), dtype=np.int64)  # as above

    def insert(self, ids: BlockIds, start: int, names: Names, now: int) -> None:
        """Count a first use, or one after eviction, of the last blocks of a node.

        Args:
            ids: of the whole node.
            start: the first of them that is new to the cache.
            names: of the blocks from there on.
            now: the tick.
        """
        entered = ids[start:]
        at = names & _GHOST
        known = (self._ghosts[at] == names).nonzero()[0]
        self._uses[entered] = 1
        self._uses[-1] = 0
        if known.size:
            uses, latest = self._ghost_blocks[at[known]].T
            self._end(latest, now)
            self._reuse(entered[known], uses)
        old = (self._uses[ids] > 1).nonzero()[0]
        new = ids[old[-1] + 1 :] if old.size else ids
        if new.size:
            self.kind[new] = kind_of_new(new.size)
            self.kind[new[-1]] = END
        self._begin(entered, now)
        if new.size > entered.size:  # it grows piece by piece: what came before was of a smaller part until now
            latest = self._latest[new]
            noted = latest >= self._num_uses - RING_SIZE
            self._kinds[latest[noted] & _RING] = self.kind[new[noted]]

    def hit(self, ids: BlockIds, now: int) -> None:
        """Count a use of each block."""
        self._end(self._latest[ids], now)
        self._reuse(ids, self._uses[ids])
        self._begin(ids, now)

    def _reuse(self, ids: BlockIds, before: npt.NDArray[np.int64]) -> None:
        self._uses[ids] = before + 1
        self._uses[-1] = 0
        self.kind[ids] = np.minimum(before, MOST_USES - 1) + NUM_SIZES

    def evict(self, ids: BlockIds, names: Names) -> None:
        """Remember blocks that leave."""
        at = names & _GHOST
        self._ghosts[at] = names
        self._ghost_blocks[at] = self._blocks[ids]

    def chances(self, now: int) -> npt.NDArray[np.float64]:
        """For each kind and age bucket, the chance that a block that old is used before it is older than the bucket.

        Returns `[NUM_KINDS, NUM_AGES]`. A kind with few uses is taken for the average of all, scaled.
        """
        num = min(self._num_uses, RING_SIZE)
        came = self._reused[:num] > 0
        age = np.where(came, self._reused[:num], now) - self._born[:num]
        cell = self._kinds[:num] * np.int64(NUM_AGES) + (2 * np.log2(np.maximum(age, 1))).astype(np.int64)
        shape = NUM_KINDS, NUM_AGES
        left = np.bincount(cell, minlength=NUM_KINDS * NUM_AGES).reshape(shape)
        reuses = np.bincount(cell[came], minlength=NUM_KINDS * NUM_AGES).reshape(shape)
        exposed = left[:, ::-1].cumsum(axis=1)[:, ::-1] - 0.5 * (left - reuses)
        average = (reuses.sum(axis=0) + PRIOR_USES * PRIOR_CHANCE) / (exposed.sum(axis=0) + PRIOR_USES)
        scale = (reuses.sum(axis=1) + PRIOR_REUSES) / ((exposed * average).sum(axis=1) + PRIOR_REUSES)
        prior = np.minimum(scale[:, None] * average, 0.95)
        return np.asarray((reuses + PRIOR_USES * prior) / (exposed + PRIOR_USES))

    def _begin(self, ids: BlockIds, now: int) -> None:
        ids = ids[ids >= 0]
        if self._stride > 1:
            self._latest[ids] = _NONE
            chosen = ids[self._skip :: self._stride]
            self._skip = (self._skip - ids.size) % self._stride
            ids = chosen
        numbers = np.arange(self._num_uses, self._num_uses + ids.size)
        self._num_uses += ids.size
        self._latest[ids] = numbers
        at = numbers & _RING
        self._kinds[at] = self.kind[ids]
        self._born[at] = now
        self._reused[at] = 0

    def _end(self, numbers: npt.NDArray[np.int64], now: int) -> None:
        self._reused[numbers[numbers >= self._num_uses - RING_SIZE] & _RING] = now
