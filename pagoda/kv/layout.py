"""KVLayout: where every byte of a block is. The one place that knows the order of axes.

    block    | layer a: keys | layer a: values | layer b: keys | layer b: values | ...      as tiers and codecs know it
             |<------------ strip ----------->|<------------ strip ----------->|
    keys     [num_kv_heads, block_size, head_dim], contiguous; values the same

    pool     plane a | block 0 | block 1 | block 2 | ...      the strips of layer a
             plane b | block 0 | block 1 | block 2 | ...      the strips of layer b

A block is a string of bytes over all layers of its group, cut into strips, one a layer; a plane holds the same strip of
all blocks, one after the other. Attention reads one layer at a time, so blocks with neighbouring ids are one run of
memory to it. Layers are described by named parts, not by "K and V": multi-head latent attention is one part, a scale
array for a quantized format another, with no new code path.

Layers of one attention kind (full, or sliding with window W) form groups of equally many layers, whatever the dtypes of
their parts. All groups draw blocks of equal size from the one pool, and each request has one block table per group. Any
block may be any group's, so blocks are cut only where no group has the midst of a layer:

    group 0  | layer a        | layer c        |
    group 1  | layer b | layer d | (unused)    |      where groups' layers differ in size: maybe fewer strips, or one
             |<------------ strip ------------>|
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise

from pagoda.errors import ConfigError

DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
ALIGNMENT = 64  # bytes: a cache line and the widest vector
_SETS_BYTES = 4096  # addresses that far apart share a cache set


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A named array that a block holds for one layer: its shape in one block, and its dtype (a key of DTYPE_BYTES).

    `basis` names what its rows were multiplied with, if they were: blocks in another basis are other blocks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    basis: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"part {self.name!r}: unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(f"part {self.name!r}: every dimension must be at least 1, got {self.shape}")

    @property
    def num_bytes(self) -> int:
        """Bytes in one block."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer keeps in a block, and how far back it looks (`window` tokens; None: everything).

    `staged` are the parts of a block that is being filled, kept outside the pool until it is full: for formats that
    quantize whole blocks. These say nothing of the first token of a sequence, which is kept apart for good.
    """

    parts: tuple[PartSpec, ...]
    window: int | None = None
    staged: tuple[PartSpec, ...] = ()

    def __post_init__(self) -> None:
        for parts in (self.parts, self.staged):
            names = [part.name for part in parts]
            if len(set(names)) != len(names):
                raise ConfigError(f"a layer's parts need different names, got {', '.join(names)}")


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share block tables. `layers` are model layer indices, in the order of their bytes in a block."""

    layers: tuple[int, ...]
    window: int | None


@dataclass(frozen=True, slots=True)
class PartView:
    """How to view one part of one layer in a block.

    `offset` is in bytes from the start of the block; `shape` and `strides` (in elements) are those inside it.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Planes:
    """Planes of strips of one size that follow each other in a block: uint8 `[count, num_blocks, stride]` in the pool.

    Attributes:
        start: where the first of the strips begins, in bytes from the start of a block.
        num_bytes: of a strip.
        stride: bytes from a block's strip to the next block's.
    """

    start: int
    count: int
    num_bytes: int
    stride: int

    @property
    def stop(self) -> int:
        """Where the last of the strips ends."""
        return self.start + self.count * self.num_bytes


def attention_parts(num_kv_heads: int, head_dim: int, block_size: int, dtype: str) -> tuple[PartSpec, ...]:
    """Keys and values of multi-head or grouped-query attention."""
    shape = (num_kv_heads, block_size, head_dim)
    return PartSpec("keys", shape, dtype), PartSpec("values", shape, dtype)


def latent_parts(latent_dim: int, block_size: int, dtype: str) -> tuple[PartSpec, ...]:
    """The single compressed row per token of multi-head latent attention (DeepSeek-V2), rotary part included."""
    return (PartSpec("latent", (block_size, latent_dim), dtype),)


class KVLayout:
    """The layout of a model's KV in blocks of `block_size` tokens.

    Args:
        layers: one LayerSpec per model layer.
        block_size: tokens per block.
    """

    def __init__(self, layers: Sequence[LayerSpec], block_size: int) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {block_size}")
        if not layers:
            raise ConfigError("a KV layout needs at least one layer")
        if any(layer.window is not None and layer.window < 1 for layer in layers):
            raise ConfigError("a sliding window must be at least 1 token")
        self.layers = tuple(layers)
        self.block_size = block_size
        self.groups = _group(self.layers)

    @classmethod
    def for_attention(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: str,
        windows: Sequence[int | None] | None = None,
    ) -> KVLayout:
        """The layout of a decoder whose layers all keep keys and values of one shape."""
        parts = attention_parts(num_kv_heads, head_dim, block_size, dtype)
        per_layer = windows if windows is not None else [None] * num_layers
        if len(per_layer) != num_layers:
            raise ConfigError(f"{len(per_layer)} windows for {num_layers} layers")
        return cls([LayerSpec(parts, window) for window in per_layer], block_size)

    @cached_property
    def _views(self) -> dict[tuple[int, str], PartView]:
        views: dict[tuple[int, str], PartView] = {}
        for group in self.groups:
            offset = 0
            for layer in group.layers:
                for part in self.layers[layer].parts:
                    strides = tuple(math.prod(part.shape[axis + 1 :]) for axis in range(len(part.shape)))
                    views[layer, part.name] = PartView(offset, part.shape, strides, part.dtype)
                    offset += round_up(part.num_bytes, ALIGNMENT)
        return views

    def part(self, layer: int, name: str) -> PartView:
        """Where `name` of `layer` lies in the bytes of a block of the layer's group."""
        return self._views[layer, name]

    @cached_property
    def group_of_layer(self) -> tuple[int, ...]:
        """For each model layer, the index of its group."""
        of = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        return tuple(of[layer] for layer in range(len(self.layers)))

    def _layer_bytes(self, layer: int) -> int:
        return sum(round_up(part.num_bytes, ALIGNMENT) for part in self.layers[layer].parts)

    @cached_property
    def _edges(self) -> tuple[tuple[int, ...], ...]:
        """For each group, where its layers begin in a block, and where the last one ends."""
        return tuple(tuple(accumulate(map(self._layer_bytes, group.layers), initial=0)) for group in self.groups)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block that carry data or alignment, over all layers of one group."""
        return max(edges[-1] for edges in self._edges)

    @cached_property
    def planes(self) -> tuple[Planes, ...]:
        """The pool, in the order of the bytes of a block; strips of one size that follow each other are taken together.

        A stride is not a multiple of the distance at which addresses share cache sets: the same head of many blocks
        would compete for a few of them.
        """
        cuts = sorted(
            at
            for at in {at for edges in self._edges for at in edges}
            if all(at in edges or at > edges[-1] for edges in self._edges)
        )
        planes, start = [], 0
        for num_bytes, strips in groupby(stop - start for start, stop in pairwise(cuts)):
            count = sum(1 for _ in strips)
            stride = num_bytes + ALIGNMENT * (num_bytes % _SETS_BYTES == 0)
            planes.append(Planes(start, count, num_bytes, stride))
            start += count * num_bytes
        return tuple(planes)

    def place(self, offset: int) -> tuple[int, int, int]:
        """Where a byte of a block is in the pool: which of `planes`, which plane of those, and where in its strip."""
        index = next(index for index, planes in enumerate(self.planes) if offset < planes.stop)
        planes = self.planes[index]
        return index, *divmod(offset - planes.start, planes.num_bytes)

    @cached_property
    def pool_block_bytes(self) -> int:
        """Bytes that a block takes of the pool, padding included."""
        return sum(planes.count * planes.stride for planes in self.planes)

    @cached_property
    def staged(self) -> KVLayout | None:
        """The layout, in the same groups, of blocks that are being filled; None if they are filled in the pool.

        Where there is one, a block means something only when it is full: hits end where blocks end.
        """
        if not any(layer.staged for layer in self.layers):
            return None
        return KVLayout([LayerSpec(layer.staged, layer.window) for layer in self.layers], self.block_size)

    @cached_property
    def firsts(self) -> KVLayout | None:
        """The layout of tokens that sequences begin with, in full, where blocks are staged: blocks of one token.

        All layers are one group: there is nothing in such a block that a window could leave behind. Layers that are not
        staged have a part in it too, which nobody reads: the pass that computes a first token writes in all of them.
        """
        if self.staged is None:
            return None
        kept = [layer.staged or layer.parts for layer in self.layers]
        one = [[replace(part, shape=(part.shape[0], 1, *part.shape[2:])) for part in parts] for parts in kept]
        return KVLayout([LayerSpec(tuple(parts)) for parts in one], 1)

    @cached_property
    def bytes_per_token(self) -> float:
        """KV bytes of one token over all layers, padding excluded.

        For attention: `2 * num_layers * num_kv_heads * head_dim * bytes_per_value`.
        """
        return sum(part.num_bytes for layer in self.layers for part in layer.parts) / self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, over all groups, nothing shared and nothing slid out."""
        return len(self.groups) * -(-num_tokens // self.block_size)

    def fingerprint(self, identity: Mapping[str, str]) -> bytes:
        """32 bytes that differ whenever stored blocks are not interchangeable.

        Args:
            identity: what else decides the bytes: content hashes of weights and adapter, RoPE parameters, kv_format.
        """
        described = [
            [[_described(part) for part in layer.parts], layer.window, *(["first apart"] if layer.staged else [])]
            for layer in self.layers
        ]
        canonical = json.dumps([self.block_size, described, dict(identity)], sort_keys=True)
        return hashlib.sha256(canonical.encode()).digest()


def _described(part: PartSpec) -> tuple[object, ...]:
    """What of a part decides the meaning of its bytes."""
    plain = part.name, part.shape, part.dtype
    return (*plain, part.basis) if part.basis else plain


def _group(layers: tuple[LayerSpec, ...]) -> tuple[LayerGroup, ...]:
    """Split layers by kind, then into groups of equally many layers (the greatest size that divides every kind)."""
    kinds: dict[int | None, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault(layer.window, []).append(index)
    size = math.gcd(*(len(members) for members in kinds.values()))
    return tuple(
        LayerGroup(tuple(members[start : start + size]), window)
        for window, members in kinds.items()
        for start in range(0, len(members), size)
    )
