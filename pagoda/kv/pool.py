"""BlockPool: owns the memory that holds KV. Blocks in, views out; it knows neither requests nor tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from pagoda.errors import ConfigError, InvariantError
from pagoda.kv.layout import KVLayout, PartView
from pagoda.memory import host_memory

_TOUCH_BYTES = 64 << 20


def part_of(strips: torch.Tensor, spec: PartView, start: int) -> torch.Tensor:
    """A part of strips, uint8 `[n, num_bytes]`, that begins at byte `start` of each: `[n, *part shape]`, no copy."""
    typed = strips.view(getattr(torch, spec.dtype))
    return typed.as_strided(
        (len(typed), *spec.shape),
        (typed.stride(0), *spec.strides),
        typed.storage_offset() + start // typed.itemsize,
    )


class BlockPool:
    """The planes of a KVLayout, one after the other in memory.

    The memory is touched once, here, so that no request pays for page faults and a machine that is too small says so
    at start.

    Args:
        layout: where the parts of a block are.
        num_blocks: how many blocks; all of them are allocated now.
        device: a torch device.
        progress: called with (bytes touched, bytes in all) while the memory is touched.

    Raises:
        ConfigError: the device does not have that much memory.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        device: torch.device | str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_bytes = num_blocks * layout.pool_block_bytes
        try:
            if torch.device(device).type == "cpu":
                self._bytes = torch.from_numpy(host_memory(self.num_bytes))
            else:
                self._bytes = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"cannot allocate {self.num_bytes:,} bytes of KV memory on {device}") from error
        for start in range(0, self.num_bytes, _TOUCH_BYTES):
            self._bytes[start : start + _TOUCH_BYTES].zero_()
            if progress is not None:
                progress(min(start + _TOUCH_BYTES, self.num_bytes), self.num_bytes)
        self._strips: list[torch.Tensor] = []  # each [count, num_blocks, num_bytes]
        start = 0
        for planes in layout.planes:
            memory = self._bytes[start : start + planes.count * num_blocks * planes.stride]
            start += memory.numel()
            self._strips.append(memory.view(planes.count, num_blocks, planes.stride)[:, :, : planes.num_bytes])
        # Host memory is copied by numpy, on the calling thread alone: torch wakes a thread team for each block, and
        # where other work has the cores that takes longer than the copy by two orders of magnitude.
        self._host = [strips.numpy() for strips in self._strips] if self._bytes.device.type == "cpu" else None

    def view(self, layer: int, part: str) -> torch.Tensor:
        """A layer's part in all blocks: `[num_blocks, *part shape]`, strided, sharing the pool's memory."""
        spec = self.layout.part(layer, part)
        of_size, index, start = self.layout.place(spec.offset)
        return part_of(self._strips[of_size][index], spec, start)

    def copy_block(self, source: int, target: int) -> None:
        """Copy a whole block: what copy-on-write does. Mutates block `target`."""
        if self._host is not None:
            for strips in self._host:
                for plane in strips:  # of all at once numpy would believe that they overlap, and copy them twice
                    plane[target] = plane[source]
        else:
            for blocks in self._strips:
                blocks[:, target].copy_(blocks[:, source])

    def export_block(self, block_id: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Copy a block's bytes into `buffer`, uint8 `[block_bytes]` in host memory. Mutates the buffer."""
        parts = self._parts(buffer)
        if self._host is not None:
            for part, strips in zip(parts, self._host, strict=True):
                part[:] = strips[:, block_id]
        else:
            for part, blocks in zip(parts, self._strips, strict=True):
                torch.from_numpy(part).copy_(blocks[:, block_id])

    def import_block(self, block_id: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill a block from `buffer`, uint8 `[block_bytes]` in host memory. Mutates the block."""
        parts = self._parts(buffer)
        if self._host is not None:
            for part, strips in zip(parts, self._host, strict=True):
                strips[:, block_id] = part
        else:
            for part, blocks in zip(parts, self._strips, strict=True):
                blocks[:, block_id].copy_(torch.from_numpy(part))

    def _parts(self, buffer: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.uint8]]:
        """A block's bytes as strips, `[count, num_bytes]` of each size, sharing the buffer's memory."""
        if buffer.dtype != np.uint8 or buffer.shape != (self.layout.block_bytes,):  # torch would convert, broadcast
            raise InvariantError(
                f"a block is uint8 [{self.layout.block_bytes}], got {buffer.dtype} {list(buffer.shape)}"
            )
        return [
            buffer[planes.start : planes.stop].reshape(planes.count, planes.num_bytes) for planes in self.layout.planes
        ]
