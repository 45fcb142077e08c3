"""PartFormat: how keys, or values, are stored: which arrays of a block, and what their bytes mean.

Arrays of dtypes that numpy has not are their bits: bfloat16 as uint16, float8 as uint8.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.kv.layout import PartSpec

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]
Arrays = Mapping[str, npt.NDArray[Any]]


class PartFormat(ABC):
    """One format of keys or values. What is named `keys` comes with `key_scales` and `key_zeros`, if it has any.

    Attributes:
        name: as a kv_format is called.
        step: how far neighbouring numbers are apart, relative to the largest of their row or to themselves.
    """

    name: str
    step: float

    @abstractmethod
    def parts(self, name: str, num_heads: int, block_size: int, width: int) -> tuple[PartSpec, ...]:
        """The arrays that hold `name`, `[num_heads, block_size, width]`, in a block. ConfigError if it cannot."""

    @abstractmethod
    def encode(self, name: str, values: Floats) -> dict[str, npt.NDArray[Any]]:
        """The arrays of `parts` that hold values `[num_heads, block_size, width]`, all of them written."""

    @abstractmethod
    def decode(self, name: str, arrays: Arrays) -> Floats:
        """The values that the arrays hold."""

    @abstractmethod
    def formula(self, row: str, width: int, block_size: int) -> str:
        """The bytes of one head of a token as a product for people, `row` naming its width."""


def scales_of(name: str) -> str:
    """What the scales of `name` are called."""
    return f"{name.removesuffix('s')}_scales"


def zeros_of(name: str) -> str:
    """What the zeros of `name` are called."""
    return f"{name.removesuffix('s')}_zeros"


def to_bfloat16(values: Floats) -> Bits:
    """Round to bfloat16, to the nearest, ties to even; every NaN becomes the same."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bfloat16(bits: Bits) -> Floats:
    """The float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encode_rows(values: Floats, largest: float) -> tuple[Floats, Bits]:
    """Values over their row's scale, within +-`largest` and not yet rounded, and the scales as bfloat16 bits."""
    least = np.float32(2.0**-126)  # the least normal float32: its reciprocal is finite
    with np.errstate(invalid="ignore", over="ignore"):
        scales = to_bfloat16(np.maximum(np.abs(values).max(-1) / np.float32(largest), least))
        wide = from_bfloat16(scales)
        finite = np.isfinite(wide)
        scaled = np.where(finite[..., None], values * (np.float32(1) / wide)[..., None], np.float32(0))
    return np.clip(scaled, -largest, largest), np.where(finite, scales, np.uint16(0x7FC0))
