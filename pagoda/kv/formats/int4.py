"""INT4 in the way of KIVI (arXiv:2402.02750): keys by channel over a block's tokens, values by token.

    value = zero + code * scale,   code 0..15

Keys have channels that are large in every token, so a scale for each channel costs them least; values have none. Two
codes are in a byte: dimension i in the low four bits, i + width / 2 in the high ones, so that a kernel unpacks a byte
vector into two runs of neighbours. A zero is a bfloat16; a scale is the upper half of a positive float16, five bits of
exponent and three of mantissa: with two bytes, blocks of 32 tokens would not be 3.4 times smaller than in bfloat16. It
is the nearest to a 15th of the spread, so it may fall short by a sixteenth; then both ends are cut off alike, which
costs less than steps that are a sixteenth wider.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.errors import ConfigError
from pagoda.kv.formats.base import Arrays, Floats, PartFormat, from_bfloat16, scales_of, to_bfloat16, zeros_of
from pagoda.kv.layout import PartSpec

_SCALE_AND_ZERO = 3  # bytes


class Int4(PartFormat):
    """Codes of four bits, with a scale and a zero by token (`axis` -1) or by channel of a block (-2)."""

    name = "int4"
    step = 1 / 15

    def __init__(self, axis: int) -> None:
        self._axis = axis

    def parts(self, name: str, num_heads: int, block_size: int, width: int) -> tuple[PartSpec, ...]:
        """See PartFormat."""
        if width % 2:
            raise ConfigError(f"int4 keeps two values in a byte: it cannot hold heads of {width} values")
        shape = num_heads, block_size if self._axis == -1 else width
        return (
            PartSpec(name, (num_heads, block_size, width // 2), "uint8"),
            PartSpec(scales_of(name), shape, "uint8"),
            PartSpec(zeros_of(name), shape, "bfloat16"),
        )

    def encode(self, name: str, values: Floats) -> dict[str, npt.NDArray[Any]]:
        """See PartFormat."""
        finite = np.isfinite(values).all(self._axis)
        with np.errstate(invalid="ignore", over="ignore"):
            least = values.min(self._axis)
            spread = values.max(self._axis) - least
            scales = _scale_codes(spread / np.float32(15))
            step = _scales(scales)
            # Where the scale was rounded down, by less than a step in all, both ends are cut off alike.
            short = np.clip(spread - np.float32(15) * step, np.float32(0), step)
            zeros = to_bfloat16(least + short / np.float32(2))
            offset = from_bfloat16(zeros)
            inverse = np.expand_dims(np.float32(1) / step, self._axis)
            scaled = (values - np.expand_dims(offset, self._axis)) * inverse
        whole = np.where(np.expand_dims(finite, self._axis), scaled, np.float32(0))
        codes = np.clip(np.rint(whole), 0, 15).astype(np.uint8)
        low, high = np.split(codes, 2, axis=-1)
        zeros = np.where(finite, zeros, np.uint16(0x7FC0))
        return {name: low | high << 4, scales_of(name): scales, zeros_of(name): zeros}

    def decode(self, name: str, arrays: Arrays) -> Floats:
        """See PartFormat."""
        packed = arrays[name]
        codes = np.concatenate((packed & 15, packed >> 4), axis=-1).astype(np.float32)
        scales, zeros = _scales(arrays[scales_of(name)]), from_bfloat16(arrays[zeros_of(name)])
        values: Floats = np.expand_dims(zeros, self._axis) + codes * np.expand_dims(scales, self._axis)
        return values

    def formula(self, row: str, width: int, block_size: int) -> str:
        """See PartFormat."""
        beside = _SCALE_AND_ZERO if self._axis == -1 else _SCALE_AND_ZERO * width / block_size
        return f"({row} / 2 bytes + {beside:g} of scales)"


def _scales(codes: npt.NDArray[np.uint8]) -> Floats:
    return (codes.astype(np.uint16) << 7).view(np.float16).astype(np.float32)


def _scale_codes(scales: Floats) -> npt.NDArray[np.uint8]:
    """The codes of the scales nearest to these as float16, of two the greater; never 0."""
    most = float(np.finfo(np.float16).max)
    clipped = np.clip(np.nan_to_num(scales, nan=0.0, posinf=most), 0, most)
    bits = clipped.astype(np.float16).view(np.uint16).astype(np.int32)
    codes: npt.NDArray[np.uint8] = np.clip((bits + 0x40) >> 7, 1, 0x7BFF >> 7).astype(np.uint8)
    return codes


INT4_CHANNELS, INT4_ROWS = Int4(axis=-2), Int4(axis=-1)
