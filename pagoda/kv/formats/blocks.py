"""Whole blocks as numbers and back: what tiers' codecs and audits do with the bytes of a block.

Neighbouring layers that keep the same are taken together, `[layers, num_heads, block_size, width]`: of most models all.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.kv.formats import PART_FORMATS, PartFormat
from pagoda.kv.formats.base import Floats
from pagoda.kv.layout import KVLayout

Bytes = npt.NDArray[np.uint8]

_NUMPY: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
    "int8": np.int8,
    "uint8": np.uint8,
}


class Numbers(NamedTuple):
    """The keys, the values or whatever a part is of some layers: float32 `[layers, ...]`, and how they were stored."""

    layers: tuple[int, ...]
    name: str
    format: PartFormat
    values: Floats


def decode_block(layout: KVLayout, group: int, block: Bytes) -> Iterator[Numbers]:
    """All numbers in the bytes of a block of a layer group. Mutates nothing."""
    for layers in _runs(layout, group):
        spec = layout.layers[layers[0]]
        arrays = {part.name: _array(layout, layers, part.name, block) for part in spec.parts}
        for part in spec.parts:
            if not part.name.endswith(("_scales", "_zeros")):
                part_format = PART_FORMATS[part.name == "keys", part.dtype]
                yield Numbers(layers, part.name, part_format, part_format.decode(part.name, arrays))


def recode_block(source: KVLayout, target: KVLayout, group: int, block: Bytes, out: Bytes) -> None:
    """Write the numbers of a block of one layout to a block of another layout of the same layers. Mutates `out`."""
    for layers, name, _, values in decode_block(source, group, block):
        dtype = next(part.dtype for part in target.layers[layers[0]].parts if part.name == name)
        for part, array in PART_FORMATS[name == "keys", dtype].encode(name, values).items():
            _array(target, layers, part, out)[...] = array


def _runs(layout: KVLayout, group: int) -> Iterator[tuple[int, ...]]:
    """Neighbours in a block of a group that keep the same parts."""
    for _, layers in groupby(layout.groups[group].layers, key=lambda layer: layout.layers[layer].parts):
        yield tuple(layers)


def _array(layout: KVLayout, layers: tuple[int, ...], name: str, block: Bytes) -> npt.NDArray[Any]:
    """One part of neighbouring layers as a view of a block's bytes."""
    first, last = (layout.part(layer, name) for layer in (layers[0], layers[-1]))
    dtype = np.dtype(_NUMPY[first.dtype])
    step = (last.offset - first.offset) // max(1, len(layers) - 1)
    strides = (step, *(stride * dtype.itemsize for stride in first.strides))
    return np.ndarray((len(layers), *first.shape), dtype, block.data, first.offset, strides)
