"""FP8: eight-bit floats (arXiv:2209.05433) with a scale per token and head, so that the largest becomes the largest.

Keys are mixed first (mixed.py).

e4m3   3 bits of mantissa, largest 448, no infinity       finer; the usual choice
e5m2   2 bits of mantissa, largest 57,344                  coarser, and never underflows
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.kv.formats.base import Arrays, Floats, PartFormat, encode_rows, from_bfloat16, scales_of
from pagoda.kv.layout import PartSpec


class FP8(PartFormat):
    """`value = code * scale`, the code a float8 with so many bits of mantissa.

    Args:
        num_codes: its positive finite codes, zero included.
    """

    def __init__(self, name: str, dtype: str, mantissa_bits: int, num_codes: int) -> None:
        self.name = name
        self.step = 2.0**-mantissa_bits
        self._dtype = dtype
        codes = np.arange(num_codes)
        fraction = (codes % (1 << mantissa_bits)) / (1 << mantissa_bits)
        exponent, bias = codes >> mantissa_bits, (1 << (6 - mantissa_bits)) - 1
        normal = (1 + fraction) * 2.0 ** (exponent - bias)
        self._values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal).astype(np.float32)
        self._between = (self._values[1:] + self._values[:-1]) / 2
        table = np.full(256, np.nan, dtype=np.float32)
        table[:num_codes], table[128 : 128 + num_codes] = self._values, -self._values
        self._table = table

    def parts(self, name: str, num_heads: int, block_size: int, width: int) -> tuple[PartSpec, ...]:
        """See PartFormat."""
        return (
            PartSpec(name, (num_heads, block_size, width), self._dtype),
            PartSpec(scales_of(name), (num_heads, block_size), "bfloat16"),
        )

    def encode(self, name: str, values: Floats) -> dict[str, npt.NDArray[Any]]:
        """See PartFormat."""
        scaled, scales = encode_rows(values, float(self._values[-1]))
        size = np.abs(scaled)
        code = np.searchsorted(self._between, size)
        tie = self._between[np.minimum(code, self._between.size - 1)] == size
        code += tie & (code % 2 == 1)
        return {name: (code | np.signbit(scaled) << 7).astype(np.uint8), scales_of(name): scales}

    def decode(self, name: str, arrays: Arrays) -> Floats:
        """See PartFormat."""
        return self._table[arrays[name]] * from_bfloat16(arrays[scales_of(name)])[..., None]

    def formula(self, row: str, width: int, block_size: int) -> str:
        """See PartFormat."""
        return f"({row} x 1 byte + 2 of scale)"


FP8_E4M3 = FP8("fp8_e4m3", "float8_e4m3fn", mantissa_bits=3, num_codes=127)
FP8_E5M2 = FP8("fp8_e5m2", "float8_e5m2", mantissa_bits=2, num_codes=124)
