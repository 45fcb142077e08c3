"""Staging: blocks that are being filled, in full, beside a pool whose layout quantizes whole blocks.

    blocks   7: full | 3: half full | 8 and 9: this step fills them whole

    layer a  | 8's  | 9's  |      | 3's  |      |      .      |
    layer b  | 8's  | 9's  |      |      .      | 3's  |      |
             |<----- passing ---->|<--- a's --->|<--- b's --->|      strips, one a layer and copy

Later steps read what is half full, so it has a strip in each layer. What one step fills whole is quantized before the
next layer is computed, so layers take the same strips in turn: a long chunk of a prompt costs as many strips as it has
blocks, and not as many for each layer.

The first token of a sequence draws more attention than all others, and has keys like none of them. So it is no part of
what its block is quantized to: it stays in full, in a pool of such tokens, and `Staging.begin` says which is whose.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from pagoda.kv.layout import KVLayout
from pagoda.kv.pool import BlockPool, part_of
from pagoda.kv.room import StagedRoom


class StagedPool(BlockPool):
    """A BlockPool with a staging area, and a pool of first tokens of sequences, one to a block.

    Args:
        layout: one that has `layout.staged` and `layout.firsts`.
        room: how many copies there is room for at first.
        num_blocks, device, progress: see BlockPool.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        room: StagedRoom,
        *,
        device: torch.device | str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(layout, num_blocks, device=device, progress=progress)
        assert layout.staged is not None, "blocks of this layout are not staged"
        assert layout.firsts is not None, "what is staged has first tokens"
        self.staging = Staging(layout.staged, num_blocks, room, self._bytes.device)
        self.firsts = BlockPool(layout.firsts, room.num_firsts(layout), device=device)
        self.num_bytes += sum(strips.numel() for strips in self.staging.strips) + self.firsts.num_bytes

    def copy_block(self, source: int, target: int) -> None:
        """Copy a whole block, and what is staged of it. Mutates block `target`."""
        super().copy_block(source, target)
        self.staging.copy(source, target)


class Staging:
    """The copies of the blocks that are being filled.

    A copy is dropped when its block is full. Those of requests that ended before are dropped when room is short:
    `open_blocks` tells then what is still being filled, and until that is set, every copy that lasts is.

    Args:
        layout: of the copies.
        num_blocks: of the pool.
        room: how many copies there is room for at first.
        device: the pool's.

    Attributes:
        strips: for each of the layout's planes uint8 `[n, stride]`; other tensors once there was no room.
        slot_of: int32 `[most layers of planes, num_blocks]`: which of the strips is a block's, in each layer.
        row_of: int32 `[num_blocks]`: which first token the sequence has that begins with a block; -1: none begins.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, room: StagedRoom, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        num_layers = max(planes.count for planes in layout.planes)
        self._layers = torch.arange(num_layers, dtype=torch.int32, device=device)[:, None]
        self.slot_of = torch.full((num_layers, num_blocks), -1, dtype=torch.int32, device=device)
        self.row_of = torch.full((num_blocks,), -1, dtype=torch.int32, device=device)
        self._rows: Mapping[int, int] = {}
        self._nowhere = torch.tensor(-1, dtype=torch.int32, device=device)
        self._slots: dict[int, int] = {}  # of the copies that last, from 0
        self._free = list(reversed(range(room.num_lasting)))
        self._passing: Collection[int] = ()
        self.open_blocks: Callable[[], Iterable[int]] = self._slots.keys
        self.room = room
        self.strips = self._allocate()

    @property
    def num_lasting(self) -> int:
        """Blocks that have a copy beyond one step."""
        return len(self._slots)

    def views(self, layer: int, part: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's part in all strips, `[n, *part shape]`, and which is a block's, int32 `[num_blocks]`."""
        spec = self._layout.part(layer, part)
        of_size, index, start = self._layout.place(spec.offset)
        return part_of(self.strips[of_size], spec, start), self.slot_of[index]

    def begin(self, rows: Mapping[int, int]) -> None:
        """Say which first token each sequence of a step has, by the block it begins with; all other blocks begin none.

        A block may have been a sequence's first and be another's tenth now: it is quantized as what it is in this step.
        """
        if rows == self._rows:  # as in most steps
            return
        for blocks, values in ((self._rows, [-1] * len(self._rows)), (rows, list(rows.values()))):
            if blocks:
                index = torch.tensor(list(blocks), device=self._device)
                self.row_of[index] = torch.tensor(values, dtype=torch.int32, device=self._device)
        self._rows = rows

    def open(self, passing: Sequence[int], lasting: Iterable[int]) -> None:
        """See that the blocks that a step writes to have copies.

        Args:
            passing: those that it fills from the first slot to the last.
            lasting: the others. What is in a copy that one has already stays.
        """
        self.close([*self._passing, *passing])
        wanted = set(lasting)
        missing = wanted - self._slots.keys()
        self._make_room(len(missing), wanted)
        if len(passing) > self.room.num_passing:
            self._grow(replace(self.room, num_passing=len(passing)))
        self._put(missing)
        self._passing = passing
        self._point(passing, torch.arange(len(passing), dtype=torch.int32, device=self._device))

    def close(self, blocks: Collection[int]) -> None:
        """Drop the copies of blocks."""
        self._free += [slot for block in blocks if (slot := self._slots.pop(block, None)) is not None]
        self._point(blocks, self._nowhere)

    def copy(self, source: int, target: int) -> None:
        """Copy the copy of a block to another block, if it has one."""
        if source not in self._slots:
            return
        if target not in self._slots:
            self._make_room(1, {source})
            self._put([target])
        for planes, strips in zip(self._layout.planes, self.strips, strict=True):
            copies = self._lasting(strips, planes.count)
            copies[:, self._slots[target]] = copies[:, self._slots[source]]

    def _put(self, blocks: Collection[int]) -> None:
        """Give blocks copies that last."""
        self._slots.update((block, self._free.pop()) for block in blocks)
        self._point_lasting(blocks)

    def _point_lasting(self, blocks: Collection[int]) -> None:
        if not blocks:
            return  # as in most steps
        slots = torch.tensor([self._slots[block] for block in blocks], dtype=torch.int32, device=self._device)
        self._point(blocks, self.room.num_passing + self._layers * self.room.num_lasting + slots)

    def _point(self, blocks: Collection[int], slots: torch.Tensor) -> None:
        if blocks:
            self.slot_of[:, torch.tensor(list(blocks), device=self._device)] = slots

    def _lasting(self, strips: torch.Tensor, num_layers: int) -> torch.Tensor:
        """What lasts, `[num_layers, num_lasting, stride]`."""
        first, count = self.room.num_passing, self.room.num_lasting
        return strips[first : first + num_layers * count].view(num_layers, count, -1)

    def _make_room(self, count: int, keep: set[int]) -> None:
        if count > len(self._free):
            self.close(self._slots.keys() - keep - set(self.open_blocks()))
        if count > len(self._free):
            self._grow(replace(self.room, num_lasting=self.room.num_lasting + count - len(self._free)))

    def _grow(self, room: StagedRoom) -> None:
        """Move to more memory. What passes has gone before."""
        old, count, planes = self.strips, self.room.num_lasting, self._layout.planes
        kept = [self._lasting(strips, each.count) for strips, each in zip(old, planes, strict=True)]
        self.room = room
        self.strips = self._allocate()
        for strips, each, copies in zip(self.strips, planes, kept, strict=True):
            self._lasting(strips, each.count)[:, :count] = copies
        self._free += range(count, room.num_lasting)
        self._point_lasting(self._slots)

    def _allocate(self) -> list[torch.Tensor]:
        shapes = [
            (self.room.num_passing + planes.count * self.room.num_lasting, planes.stride)
            for planes in self._layout.planes
        ]
        return [torch.empty(shape, dtype=torch.uint8, device=self._device).zero_() for shape in shapes]
