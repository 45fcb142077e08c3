"""SparseMemory: a request's KV entries, read and moved one layer at a time.

    entry j of a request in a layer    block table[j // block_size], offset j % block_size, for every KV head
    keep [num_kv_heads, n]             entry keep[h, i] becomes entry i of head h: one gather, one scatter

An entry that is quantized by itself is moved as its codes and scales, and so never quantized again. A key can be
turned to another rotary position, because rotations add up; what YaRN multiplies them with stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagoda.kernels import KVView
from pagoda.kv.allocator import BlockIds
from pagoda.kv.layout import KVLayout
from pagoda.sparse.host import RecallMemory


@dataclass(frozen=True, slots=True)
class SparseMemory:
    """The pool's layers, and what turns their keys.

    Attributes:
        layout: of the pool.
        views: one per layer, of all blocks.
        frequencies: per layer, radians per position of each pair of dimensions, float32 `[head_dim / 2]`.
        max_positions: rotary positions that the model can compute with.
        recall: what recalling policies need; None: there are none.
    """

    layout: KVLayout
    views: Sequence[KVView]
    frequencies: Sequence[torch.Tensor]
    max_positions: int
    recall: RecallMemory | None = None

    @property
    def full_layers(self) -> list[int]:
        """The layers that see the whole context: those of which a policy chooses entries."""
        return [layer for layer, spec in enumerate(self.layout.layers) if spec.window is None]

    def keys(self, layer: int, table: BlockIds, keep: torch.Tensor) -> torch.Tensor:
        """A copy of some keys, as they are rotated: `[num_kv_heads, n, head_dim]`.

        Args:
            keep: int64 `[num_kv_heads, n]`, entries of each head.
        """
        return self._gather(self.views[layer].keys, table, keep)

    def values(self, layer: int, table: BlockIds, keep: torch.Tensor) -> torch.Tensor:
        """A copy of some values, as `keys` gives."""
        return self._gather(self.views[layer].values, table, keep)

    def _gather(self, part: torch.Tensor, table: BlockIds, keep: torch.Tensor) -> torch.Tensor:
        blocks, offsets = self._at(table, keep)
        return _indexable(part)[blocks, torch.arange(len(keep), device=keep.device)[:, None], offsets]

    def write_keys(self, layer: int, table: BlockIds, first: int, keys: torch.Tensor) -> None:
        """Overwrite the keys of entries from `first` on with `[num_kv_heads, n, head_dim]`. Mutates the pool."""
        self._scatter(self.views[layer].keys, table, first, keys)

    def _scatter(self, part: torch.Tensor, table: BlockIds, first: int, rows: torch.Tensor) -> None:
        blocks, offsets = self._at(table, torch.arange(first, first + rows.shape[1], device=rows.device))
        heads = torch.arange(rows.shape[0], device=rows.device)[:, None]
        part = _indexable(part)
        part[blocks[None], heads, offsets[None]] = rows.to(part.dtype)

    def _at(self, table: BlockIds, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks and offsets of entries."""
        size = self.layout.block_size
        ids = torch.from_numpy(table.astype(np.int64)).to(entries.device)
        return ids[entries // size], entries % size

    def move(self, layer: int, old: BlockIds, new: BlockIds, keep: torch.Tensor, first: int = 0) -> None:
        """Let entry `first + i` of head `h` in table `new` be what entry `keep[h, i]` is in `old`. Mutates the pool.

        The tables may have blocks in common: all is read before anything is written. Keys must not be staged.
        """
        parts = self.views[layer].parts()
        rows = [self._gather(part, old, keep) for part in parts]
        for part, moved in zip(parts, rows, strict=True):
            self._scatter(part, new, first, moved)

    def turned(self, layer: int, keys: torch.Tensor, by: torch.Tensor | int) -> torch.Tensor:
        """Keys turned by so many rotary positions, in float32.

        Args:
            keys: `[num_kv_heads, n, head_dim]`.
            by: one number, or int64 `[n]`: one for each entry.
        """
        frequencies = self.frequencies[layer].double()
        steps = torch.as_tensor(by, dtype=torch.float64, device=keys.device).reshape(-1, 1)
        angles = (steps * frequencies).remainder(2 * torch.pi)
        cos, sin = angles.cos().float(), angles.sin().float()
        first, second = keys.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def turn_blocks(self, layer: int, blocks: BlockIds, by: int) -> None:
        """Turn every key in these blocks of a layer. Mutates the pool."""
        keys = self.views[layer].keys
        ids = torch.from_numpy(blocks.astype(np.int64)).to(keys.device)
        old = keys[ids]  # [blocks, heads, block_size, head_dim]
        turned = self.turned(layer, old.flatten(0, 1), by)
        keys[ids] = turned.view(old.shape).to(keys.dtype)


def _indexable(part: torch.Tensor) -> torch.Tensor:
    """The same memory: torch indexes no float8."""
    return part.view(torch.uint8) if part.is_floating_point() and part.itemsize == 1 else part
