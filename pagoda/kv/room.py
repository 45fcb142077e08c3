"""Room: how the bytes of a pool are split between its blocks and full copies of those that are being filled.

| block | block | block | ...          | passing | lasting | lasting |         | first | first |
  num_blocks, of the pool's layout       of `layout.staged`: only where         of `layout.firsts`, the same
                                         whole blocks are quantized
"""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.kv.layout import KVLayout

_STAGED_SHARE = 16  # copies take no more than a 16th of the memory ...
_LEAST_RUNNING = 8  # ... as long as so many samples run


@dataclass(frozen=True, slots=True)
class StagedRoom:
    """Copies that there is room for: of blocks that one step fills whole, a strip each, and of the others."""

    num_passing: int
    num_lasting: int

    def num_firsts(self, layout: KVLayout) -> int:
        """First tokens of sequences that there is room for: one for each that fills a block of each layer group."""
        return max(1, self.num_lasting // len(layout.groups))

    def num_bytes(self, layout: KVLayout) -> int:
        """What they take beside a pool of this layout."""
        if layout.staged is None or layout.firsts is None:
            return 0
        strips = sum(planes.stride for planes in layout.staged.planes)
        blocks = self.num_passing * strips + self.num_lasting * layout.staged.pool_block_bytes
        return blocks + self.num_firsts(layout) * layout.firsts.pool_block_bytes


def bytes_of_sample(layout: KVLayout) -> int:
    """What a running sample takes beside the pool: a copy of a block of each layer group, and its first token."""
    return StagedRoom(0, len(layout.groups)).num_bytes(layout)


def most_running(layout: KVLayout, num_bytes: int, wanted: int) -> int:
    """How many samples may run at once in a pool, at most `wanted`: each is filling a block of each layer group."""
    if layout.staged is None:
        return wanted
    return min(wanted, max(_LEAST_RUNNING, num_bytes // _STAGED_SHARE // bytes_of_sample(layout) - 1))


def staged_room(layout: KVLayout, num_running: int, step_tokens: int) -> StagedRoom:
    """Copies for so many running samples, one of which may end a block and begin another within a step."""
    num_groups = len(layout.groups)
    return StagedRoom(num_groups * -(-step_tokens // layout.block_size), num_groups * (num_running + 1))


def split_room(layout: KVLayout, num_bytes: int, room: StagedRoom) -> tuple[int, StagedRoom]:
    """How many blocks, and how many copies of them, so many bytes are: `room` for copies, or for all blocks'."""
    all_staged = num_bytes // (layout.pool_block_bytes + StagedRoom(1, 1).num_bytes(layout))
    num_blocks = max(all_staged, (num_bytes - room.num_bytes(layout)) // layout.pool_block_bytes)
    return num_blocks, StagedRoom(min(num_blocks, room.num_passing), min(num_blocks, room.num_lasting))
