"""Keys that are mixed before they are quantized by row: multiplied with a Hadamard matrix (QuaRot, arXiv:2404.00456).

    key      [  0.1  -0.2  14.0   0.3  -0.1   0.2  -9.0   0.1 ]   one scale for all: what is small is lost
    mixed    [  5.4   4.6  -5.4  -4.6  23.0  23.4 -23.4 -22.2 ]   sums and differences of all: alike in size

Keys have channels that are large in every token. Mixing takes no byte, and no time when keys are read: queries are
mixed instead, once, so that their products with keys stay what they were. The matrix has the order of the greatest
power of two that divides the width; other widths have several side by side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.kv.formats.base import Arrays, Floats, PartFormat
from pagoda.kv.layout import PartSpec


class Mixed(PartFormat):
    """`value = H code * scale / order`, where `rows` is the format of the codes and the scales."""

    def __init__(self, rows: PartFormat) -> None:
        self.name, self.step = rows.name, rows.step
        self._rows = rows

    def parts(self, name: str, num_heads: int, block_size: int, width: int) -> tuple[PartSpec, ...]:
        """See PartFormat."""
        codes, *scales = self._rows.parts(name, num_heads, block_size, width)
        return replace(codes, basis="hadamard"), *scales

    def encode(self, name: str, values: Floats) -> dict[str, npt.NDArray[Any]]:
        """See PartFormat."""
        return self._rows.encode(name, _mix(values))

    def decode(self, name: str, arrays: Arrays) -> Floats:
        """See PartFormat."""
        mixed = self._rows.decode(name, arrays)
        return _mix(mixed) / np.float32(_order(mixed))

    def formula(self, row: str, width: int, block_size: int) -> str:
        """See PartFormat."""
        return self._rows.formula(row, width, block_size)


def _mix(values: Floats) -> Floats:
    """By sums and differences of values half an order apart, then a quarter: so the kernels round too."""
    mixed, apart = values, _order(values) // 2
    with np.errstate(invalid="ignore", over="ignore"):
        while apart:
            pairs = mixed.reshape(*values.shape[:-1], -1, 2, apart)
            first, second = pairs[..., 0, :], pairs[..., 1, :]
            mixed = np.stack((first + second, first - second), axis=-2).reshape(values.shape)
            apart //= 2
    return mixed


def _order(values: Floats) -> int:
    width: int = values.shape[-1]
    return width & -width
