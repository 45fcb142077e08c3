"""Allocator: which blocks are free, and how many requests hold each of the others.

    free     no request holds it and the tree does not have it; on the free list
    held     ref_count > 0; the tree may have it as well
    cached   ref_count == 0 and the tree has it: it may be evicted

Every block is in exactly one of the three. The allocator never matches tokens and never chooses what to evict. A block
that is not free has a label: whose it is. Used and cached blocks are counted by label, once there are two.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagoda.errors import ConfigError, InvariantError, OutOfBlocks

BlockIds = npt.NDArray[np.int32]


class Allocator:
    """Free list and reference counts of `num_blocks` blocks. Not thread-safe: the engine's thread owns it.

    Arguments named `ids` never contain one block twice. They are widened to `intp` before they index anything: numpy
    takes several times as long to index with any other type. Freed blocks are reused last-in first-out; those that are
    taken together come in ascending order, since neighbours are one run of memory to attention.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._stack: BlockIds = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self._num_cached = 0
        self._refs = np.zeros(num_blocks, dtype=np.int32)
        self._in_tree = np.zeros(num_blocks, dtype=np.bool_)
        self._label = np.zeros(num_blocks, dtype=np.int32)
        self._num_labels = 0
        self._used_by: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self._cached_by: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)

    def add_label(self) -> int:
        """A new label, counted up from 0; blocks allocated without one have the first."""
        self._num_labels += 1
        if self._num_labels == 2:  # what was there is the first's
            self._used_by[0], self._cached_by[0] = self.num_blocks - self._num_free, self._num_cached
        if self._num_labels > self._used_by.size:
            self._used_by = np.concatenate([self._used_by, np.zeros_like(self._used_by)])
            self._cached_by = np.concatenate([self._cached_by, np.zeros_like(self._cached_by)])
        return self._num_labels - 1

    def num_used_by(self, label: int) -> int:
        """Blocks of a label that are not free."""
        return int(self._used_by[label]) if self._num_labels > 1 else self.num_blocks - self._num_free

    def num_cached_by(self, label: int) -> int:
        """Blocks of a label that only the tree has."""
        return int(self._cached_by[label]) if self._num_labels > 1 else self._num_cached

    def labels(self, ids: BlockIds) -> list[int]:
        """The label of each block, whether it is used or not."""
        labels: list[int] = self._label[ids.astype(np.intp)].tolist()
        return labels

    def count_by_label(self, ids: BlockIds) -> npt.NDArray[np.int64]:
        """How many of the blocks have each label, int64 `[labels]`."""
        if self._num_labels < 2:
            return np.array([ids.size])
        return np.bincount(self._label[ids.astype(np.intp)], minlength=self._num_labels)

    def _count(self, counts: npt.NDArray[np.int64], at: npt.NDArray[np.intp], sign: int) -> None:
        if self._num_labels > 1 and at.size:
            by_label = np.bincount(self._label[at])
            counts[: by_label.size] += sign * by_label

    @property
    def num_free(self) -> int:
        """Blocks on the free list."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks that only the tree has."""
        return self._num_cached

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - self._num_free - self._num_cached

    def held(self, ids: BlockIds) -> npt.NDArray[np.bool_]:
        """For each block, whether a request holds it."""
        return self._refs[ids.astype(np.intp)] > 0

    def ref_count(self, block_id: int) -> int:
        """How many requests hold the block."""
        return int(self._refs[block_id])

    def ref_counts(self) -> npt.NDArray[np.int32]:
        """How many requests hold each block of the pool. O(blocks)."""
        return self._refs.copy()

    def every(self, step: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.int32]]:
        """Of every `step`-th block, from the first: its references, whether the tree has it, and its label."""
        return self._refs[::step], self._in_tree[::step], self._label[::step]

    def ids_in_tree(self) -> npt.NDArray[np.intp]:
        """The blocks that the tree has, in order. O(blocks)."""
        return np.flatnonzero(self._in_tree)

    def in_tree(self, block_id: int) -> bool:
        """Whether the tree has the block."""
        return bool(self._in_tree[block_id])

    def allocate(self, count: int, label: int = 0) -> BlockIds:
        """Take `count` free blocks, in ascending order, each with one reference and this label.

        Raises:
            OutOfBlocks: fewer are free; nothing is taken.
        """
        if count < 0:
            raise InvariantError(f"cannot allocate {count} blocks")
        if count > self._num_free:
            raise OutOfBlocks(count, self._num_free)
        top = self._num_free - count
        ids = np.sort(self._stack[top : self._num_free])
        self._num_free = top
        self._refs[ids] = 1
        if self._num_labels > 1:
            self._label[ids] = label
            self._used_by[label] += count
        return ids

    def retain(self, ids: BlockIds) -> None:
        """Add a reference to each block; none of them may be free."""
        at = ids.astype(np.intp)
        refs = self._refs[at]
        idle = at[refs == 0]
        if not self._in_tree[idle].all():
            raise InvariantError("a free block cannot be retained")
        self._num_cached -= idle.size
        self._count(self._cached_by, idle, -1)
        self._refs[at] = refs + 1

    def release(self, ids: BlockIds) -> None:
        """Drop a reference of each block; those without any left become cached if the tree has them, else free."""
        at = ids.astype(np.intp)
        refs = self._refs[at] - 1
        if refs.size and refs.min() < 0:
            raise InvariantError("a block was released more often than it was retained")
        self._refs[at] = refs
        idle = at[refs == 0]
        in_tree = self._in_tree[idle]
        cached = idle[in_tree]
        self._num_cached += cached.size
        self._count(self._cached_by, cached, 1)
        self._push(idle[~in_tree])

    def enter_tree(self, ids: BlockIds) -> None:
        """Note that the tree now has these blocks, which requests hold."""
        at = ids.astype(np.intp)
        if not (self._refs[at] > 0).all():
            raise InvariantError("a block enters the tree while a request holds it")
        self._in_tree[at] = True

    def relabel(self, ids: BlockIds, label: int) -> None:
        """Count blocks that requests hold as another's from now on."""
        at = ids.astype(np.intp)
        self._count(self._used_by, at, -1)
        self._label[at] = label
        self._count(self._used_by, at, 1)

    def leave_tree(self, ids: BlockIds) -> None:
        """Note that the tree gave these blocks up; those that no request holds become free."""
        at = ids.astype(np.intp)
        if not self._in_tree[at].all():
            raise InvariantError("a block left the tree that was not in it")
        self._in_tree[at] = False
        idle = at[self._refs[at] == 0]
        self._num_cached -= idle.size
        self._count(self._cached_by, idle, -1)
        self._push(idle)

    def _push(self, ids: npt.NDArray[np.intp]) -> None:
        self._stack[self._num_free : self._num_free + ids.size] = ids[::-1]
        self._num_free += ids.size
        self._count(self._used_by, ids, -1)

    def check(self) -> None:
        """Verify conservation: free + held + cached == total, each block in one state.

        Raises:
            InvariantError: the books do not balance.
        """
        free = np.zeros(self.num_blocks, dtype=np.int64)
        np.add.at(free, self._stack[: self._num_free], 1)
        expected = (self._refs == 0) & ~self._in_tree
        if not np.array_equal(free, expected.astype(np.int64)):
            raise InvariantError("the free list and the reference counts disagree")
        if self._num_cached != int(np.count_nonzero((self._refs == 0) & self._in_tree)):
            raise InvariantError("the count of cached blocks is wrong")
        if (self._refs < 0).any():
            raise InvariantError("a reference count is negative")
        if self._num_labels > 1:
            used = self._label[(self._refs > 0) | self._in_tree]
            cached = self._label[(self._refs == 0) & self._in_tree]
            for counts, labels in ((self._used_by, used), (self._cached_by, cached)):
                if not np.array_equal(counts, np.bincount(labels, minlength=counts.size)):
                    raise InvariantError("the counts by label are wrong")
