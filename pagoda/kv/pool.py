"""BlockPool: owns the memory that holds KV. Blocks in, views out; it knows neither requests nor tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from pagoda.errors import ConfigError, InvariantError
from pagoda.kv.layout import DTYPE_BYTES, KVLayout

_TOUCH_BYTES = 64 << 20


class BlockPool:
    """Raw bytes `[num_blocks, block_stride]`, viewed through a KVLayout.

    The memory is touched once, here, so that no request pays for page faults and a machine that is too small says so
    at start. Ordinary pages: huge ones measured slower to touch and no faster to read.

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
        self.num_bytes = num_blocks * layout.block_stride
        try:
            self._bytes = torch.empty(num_blocks, layout.block_stride, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise ConfigError(f"cannot allocate {self.num_bytes:,} bytes of KV memory on {device}") from error
        # Host memory is copied by numpy, on the calling thread alone: torch wakes a thread team for each block, and
        # where other work has the cores that takes longer than the copy by two orders of magnitude.
        self._host = self._bytes.numpy() if self._bytes.device.type == "cpu" else None
        rows = max(1, _TOUCH_BYTES // layout.block_stride)
        for start in range(0, num_blocks, rows):
            self._bytes[start : start + rows].zero_()
            if progress is not None:
                progress(min(start + rows, num_blocks) * layout.block_stride, self.num_bytes)

    def view(self, layer: int, part: str) -> torch.Tensor:
        """A layer's part in all blocks: `[num_blocks, *part shape]`, strided, sharing the pool's memory."""
        spec = self.layout.part(layer, part)
        itemsize = DTYPE_BYTES[spec.dtype]
        typed = self._bytes.view(-1).view(getattr(torch, spec.dtype))
        return typed.as_strided(
            (self.num_blocks, *spec.shape),
            (self.layout.block_stride // itemsize, *spec.strides),
            spec.offset // itemsize,
        )

    def fill_from(self, other: BlockPool) -> None:
        """Copy all blocks of a smaller pool of the same layout. Mutates this pool's first blocks."""
        self._bytes[: other.num_blocks] = other._bytes

    def copy_block(self, source: int, target: int) -> None:
        """Copy a whole block: what copy-on-write does. Mutates block `target`."""
        if self._host is not None:
            self._host[target] = self._host[source]
        else:
            self._bytes[target].copy_(self._bytes[source])

    def export_block(self, block_id: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Copy a block's bytes into `buffer`, uint8 `[block_bytes]` in host memory. Mutates the buffer."""
        self._check(buffer)
        if self._host is not None:
            buffer[:] = self._host[block_id, : self.layout.block_bytes]
        else:
            torch.from_numpy(buffer).copy_(self._bytes[block_id, : self.layout.block_bytes])

    def import_block(self, block_id: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill a block from `buffer`, uint8 `[block_bytes]` in host memory. Mutates the block."""
        self._check(buffer)
        if self._host is not None:
            self._host[block_id, : self.layout.block_bytes] = buffer
        else:
            self._bytes[block_id, : self.layout.block_bytes].copy_(torch.from_numpy(buffer))

    def _check(self, buffer: npt.NDArray[np.uint8]) -> None:
        if buffer.dtype != np.uint8 or buffer.shape != (self.layout.block_bytes,):  # torch would convert, broadcast
            raise InvariantError(
                f"a block is uint8 [{self.layout.block_bytes}], got {buffer.dtype} {list(buffer.shape)}"
            )
