"""Keys and values as they are: float32, bfloat16 or float16."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.kv.formats.base import Arrays, Floats, PartFormat, from_bfloat16, to_bfloat16
from pagoda.kv.layout import DTYPE_BYTES, PartSpec


class Plain(PartFormat):
    """Values in one dtype, a key of DTYPE_BYTES."""

    def __init__(self, name: str, dtype: str, mantissa_bits: int) -> None:
        self.name = name
        self.dtype = dtype
        self.step = 2.0**-mantissa_bits

    def parts(self, name: str, num_heads: int, block_size: int, width: int) -> tuple[PartSpec, ...]:
        """See PartFormat."""
        return (PartSpec(name, (num_heads, block_size, width), self.dtype),)

    def encode(self, name: str, values: Floats) -> dict[str, npt.NDArray[Any]]:
        """See PartFormat."""
        return {name: to_bfloat16(values) if self.dtype == "bfloat16" else values.astype(self.dtype)}

    def decode(self, name: str, arrays: Arrays) -> Floats:
        """See PartFormat."""
        stored = arrays[name]
        return from_bfloat16(stored) if self.dtype == "bfloat16" else stored.astype(np.float32)

    def formula(self, row: str, width: int, block_size: int) -> str:
        """See PartFormat."""
        return f"{row} x {DTYPE_BYTES[self.dtype]} bytes"


FP32, BF16, FP16 = Plain("fp32", "float32", 23), Plain("bf16", "bfloat16", 7), Plain("fp16", "float16", 10)
