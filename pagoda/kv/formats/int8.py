"""INT8: a scale per token and head, keys mixed first (mixed.py).

What the largest magnitude is divided by is 127, so that codes are symmetric.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.kv.formats.base import Arrays, Floats, PartFormat, encode_rows, from_bfloat16, scales_of
from pagoda.kv.layout import PartSpec


class Int8(PartFormat):
    """`value = code * scale`."""

    name = "int8"
    step = 1 / 127

    def parts(self, name: str, num_heads: int, block_size: int, width: int) -> tuple[PartSpec, ...]:
        """See PartFormat."""
        return (
            PartSpec(name, (num_heads, block_size, width), "int8"),
            PartSpec(scales_of(name), (num_heads, block_size), "bfloat16"),
        )

    def encode(self, name: str, values: Floats) -> dict[str, npt.NDArray[Any]]:
        """See PartFormat."""
        scaled, scales = encode_rows(values, 127)
        return {name: np.rint(scaled).astype(np.int8), scales_of(name): scales}

    def decode(self, name: str, arrays: Arrays) -> Floats:
        """See PartFormat."""
        return arrays[name].astype(np.float32) * from_bfloat16(arrays[scales_of(name)])[..., None]

    def formula(self, row: str, width: int, block_size: int) -> str:
        """See PartFormat."""
        return f"({row} x 1 byte + 2 of scale)"


INT8 = Int8()
