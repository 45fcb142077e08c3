"""vLLM's cache as blocks of bytes: a `BlockIO` over the tensors that it registers.

    vLLM     layer 0: [page of block 0 | page of block 1 | ...]   layer 1: [page of block 0 | ...]   ...
    record   of a block: | its page of layer 0 | its page of layer 1 | ... |

A page holds a layer's keys and values of one block, in the order its attention backend likes; we never look inside, so
whatever that packs is packed when it comes back. What makes two pages interchangeable is in the fingerprint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from pagoda.errors import ConfigError


class VllmBlocks:
    """Blocks of vLLM's cache, on the host or on a device.

    Args:
        caches: each layer's tensor, `[num_blocks * k, ...]` with k kernel blocks in a block; blocks may be strided, the
            bytes of one may not. Layers that share memory are taken once.
        num_blocks: how many blocks there are.

    Raises:
        ConfigError: a block of a layer is not one range of bytes, or there are no layers.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        pages: dict[int, torch.Tensor] = {}
        for name, cache in caches.items():
            page = _pages(name, cache, num_blocks)
            pages.setdefault(page.data_ptr(), page)
        if not pages:
            raise ConfigError("vLLM registered no cache to keep blocks of")
        self.num_blocks = num_blocks
        self._pages = list(pages.values())
        sizes = [page.shape[1] for page in self._pages]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.block_bytes = sum(sizes)
        # Host memory is copied by numpy: torch would wake a thread team for each page.
        self._host = [page.numpy() for page in self._pages] if all(page.is_cpu for page in self._pages) else None

    def copy_block(self, source: int, target: int) -> None:
        """Copy a whole block. Mutates block `target`."""
        for page in self._pages:
            page[target].copy_(page[source])

    def export_block(self, block_id: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Copy a block's bytes into `buffer`, uint8 `[block_bytes]`. Mutates the buffer."""
        self.export_blocks([block_id], buffer[None])

    def import_block(self, block_id: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill a block from `buffer`, uint8 `[block_bytes]`. Mutates the block."""
        self.import_blocks([block_id], buffer[None])

    def export_blocks(self, block_ids: Sequence[int], rows: npt.NDArray[np.uint8]) -> None:
        """Copy blocks into `rows`, uint8 `[len(block_ids), block_bytes]`: on a device, one copy a layer."""
        if self._host is not None:
            for start, page in zip(self._starts, self._host, strict=True):
                for row, block_id in zip(rows, block_ids, strict=True):
                    row[start : start + page.shape[1]] = page[block_id]
            return
        for start, pages in zip(self._starts, self._pages, strict=True):
            ids = torch.tensor(block_ids, device=pages.device)
            rows[:, start : start + pages.shape[1]] = pages.index_select(0, ids).cpu().numpy()

    def import_blocks(self, block_ids: Sequence[int], rows: npt.NDArray[np.uint8]) -> None:
        """Fill blocks from `rows`: the reverse of `export_blocks`. Mutates the blocks."""
        if self._host is not None:
            for start, page in zip(self._starts, self._host, strict=True):
                for row, block_id in zip(rows, block_ids, strict=True):
                    page[block_id] = row[start : start + page.shape[1]]
            return
        for start, pages in zip(self._starts, self._pages, strict=True):
            ids = torch.tensor(block_ids, device=pages.device)
            part = np.ascontiguousarray(rows[:, start : start + pages.shape[1]])
            pages.index_copy_(0, ids, torch.from_numpy(part).to(pages.device))


def _pages(name: str, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A layer's cache as bytes, uint8 `[num_blocks, page]`, sharing its memory."""
    if cache.shape[0] % num_blocks:
        raise ConfigError(f"the cache of {name} has {cache.shape[0]} blocks, which {num_blocks} does not divide")
    if cache.shape[0] != num_blocks:
        cache = cache.view(num_blocks, -1, *cache.shape[1:])
    values = math.prod(cache.shape[1:])
    # One range of bytes has strides that, from the smallest on, are each the product of the sizes before.
    expected = 1
    for stride, size in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
        if size > 1 and stride != expected:
            raise ConfigError(
                f"a block of {name} is not one range of bytes: shape {tuple(cache.shape)}, strides {cache.stride()}"
            )
        expected *= size
    flat = cache.as_strided((num_blocks, values), (cache.stride(0), 1))
    return flat.view(torch.uint8)
