"""Codecs: how a tier stores the blocks of a pool that keeps them in full.

    int8, int4 (or any kv_format)   lossy      its codes and scales: 0.5, 0.3 of the bytes
    split                           lossless   each number's bytes apart, the one with sign and exponent compressed

Signs and exponents are much alike from value to value, the ends of mantissas are noise: compressed together neither
shrinks much. zlib is in every Python; a faster library would save a few milliseconds on threads that wait for disks.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod

import numpy as np

from pagoda.errors import ConfigError, CorruptRecord
from pagoda.kv.formats import FORMATS, parse_format
from pagoda.kv.formats.blocks import Bytes, recode_block
from pagoda.kv.layout import DTYPE_BYTES, KVLayout, LayerSpec, PartSpec

_FLOATS = ("float32", "bfloat16", "float16")


class BlockCodec(ABC):
    """Stores blocks of one layout as other bytes. Stateless, so any thread may use it.

    Attributes:
        name: as a tier's SPEC gives it.
        stored_as: what decides the meaning of the bytes, within 64 bytes of ASCII; names of records depend on it.
        is_lossy: whether a block comes back changed.
        most_bytes: of a stored block.
    """

    name: str
    stored_as: str
    is_lossy: bool
    most_bytes: int

    @abstractmethod
    def encode(self, group: int, block: Bytes) -> Bytes:
        """What to store of a block of a layer group, uint8 `[block_bytes]`."""

    @abstractmethod
    def decode(self, group: int, stored: Bytes, block: Bytes) -> None:
        """Fill `block` from what was stored of it. CorruptRecord if that is not possible."""


class FormatCodec(BlockCodec):
    """Blocks in a kv_format, quantized once, from what was computed."""

    is_lossy = True

    def __init__(self, layout: KVLayout, kv_format: str) -> None:
        self.name = kv_format
        self._layout = layout
        self._stored = KVLayout([_stored_layer(layer, kv_format) for layer in layout.layers], layout.block_size)
        bases = {part.basis for layer in self._stored.layers for part in layer.parts} - {""}
        self.stored_as = " ".join([kv_format, *sorted(bases)])
        self.most_bytes = self._stored.block_bytes

    def encode(self, group: int, block: Bytes) -> Bytes:
        """See BlockCodec."""
        stored = np.zeros(self.most_bytes, dtype=np.uint8)
        recode_block(self._layout, self._stored, group, block, stored)
        return stored

    def decode(self, group: int, stored: Bytes, block: Bytes) -> None:
        """See BlockCodec."""
        if stored.size != self.most_bytes:
            raise CorruptRecord(f"a block in {self.name} has {self.most_bytes} bytes, not {stored.size}")
        recode_block(self._stored, self._layout, group, stored, block)


def _stored_layer(layer: LayerSpec, kv_format: str) -> LayerSpec:
    chosen = parse_format(kv_format)
    parts: list[PartSpec] = []
    for part in layer.parts:
        num_heads, block_size, width = part.shape if len(part.shape) == 3 else (1, *part.shape)
        part_format = chosen.keys if part.name == "keys" else chosen.values
        parts += part_format.parts(part.name, num_heads, block_size, width)
    return LayerSpec(tuple(parts), layer.window)


class SplitCodec(BlockCodec):
    """Blocks without loss: the first bytes of all numbers, then the second, and so on; the last compressed.

    stored   a flag and a length for each plane | plane | plane | ...
    """

    name = stored_as = "split"
    is_lossy = False
    _head = np.dtype([("is_packed", "<u4"), ("num_bytes", "<u4")])

    def __init__(self, layout: KVLayout) -> None:
        self._num_planes = max(DTYPE_BYTES[part.dtype] for layer in layout.layers for part in layer.parts)
        self._head_bytes = self._num_planes * self._head.itemsize
        self.most_bytes = layout.block_bytes + self._head_bytes

    def encode(self, group: int, block: Bytes) -> Bytes:
        """See BlockCodec."""
        head = np.zeros(self._num_planes, dtype=self._head)
        *noise, exponents = np.ascontiguousarray(block.reshape(-1, self._num_planes).T)
        packed = np.frombuffer(zlib.compress(exponents, level=1), dtype=np.uint8)
        pieces = [*noise, min(packed, exponents, key=len)]
        head["num_bytes"] = [piece.size for piece in pieces]
        head["is_packed"][-1] = packed.size < exponents.size
        return np.concatenate([head.view(np.uint8), *pieces])

    def decode(self, group: int, stored: Bytes, block: Bytes) -> None:
        """See BlockCodec."""
        try:
            head = stored[: self._head_bytes].view(self._head)
            size, at = block.size // self._num_planes, self._head_bytes
            planes = []
            for is_packed, num_bytes in head.tolist():
                piece = stored[at : at + num_bytes]
                plane = np.frombuffer(zlib.decompress(piece.data, bufsize=size), dtype=np.uint8) if is_packed else piece
                if plane.size != size:
                    raise ValueError(f"a plane has {plane.size} bytes, not {size}")
                planes.append(plane)
                at += num_bytes
            if at != stored.size:
                raise ValueError(f"{stored.size - at} bytes are left over")
        except (ValueError, zlib.error) as error:
            raise CorruptRecord(f"not a block that was split: {error}") from error
        block.reshape(-1, self._num_planes).T[...] = planes


def make_codec(name: str, layout: KVLayout) -> BlockCodec:
    """The codec that a tier's SPEC names, for blocks of this layout.

    Raises:
        ConfigError: there is no such codec, or the pool does not keep its blocks in full.
    """
    if not all(part.dtype in _FLOATS for layer in layout.layers for part in layer.parts):
        raise ConfigError(f"codec={name} is for a pool in full precision; a quantized one is stored as it is")
    if name == SplitCodec.name:
        return SplitCodec(layout)
    if name.partition("/")[0] not in FORMATS:
        raise ConfigError(f"no codec is called {name!r}; there are {SplitCodec.name}, {', '.join(FORMATS)}")
    return FormatCodec(layout, name)
