"""Weights in INT8: half of BF16's bytes, rounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagoda.errors import KernelError

_MAX_CODE = 127


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A matrix `[out, in]` as codes: the weight of output `o` for input `i` is `codes[o, i] * scales[o]`.

    Attributes:
        codes: int8 `[out, in]`, contiguous.
        scales: float32 `[out]`.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @classmethod
    def quantize(cls, weight: torch.Tensor) -> Int8Matrix:
        """Round a float matrix to 255 steps per output, the largest weight of each exact.

        Raises:
            KernelError: a weight is not finite.
        """
        wide = weight.float()
        largest = wide.abs().amax(dim=1)
        if not largest.isfinite().all():
            raise KernelError("a matrix with weights that are not finite cannot be quantized")
        scales = torch.where(largest > 0, largest / _MAX_CODE, 1.0)
        return cls((wide / scales[:, None]).round_().to(torch.int8), scales)

    def addresses(self) -> tuple[int, int, int, int, int]:
        """As `matrix_at` has it."""
        return self.codes.data_ptr(), self.scales.data_ptr(), 0, 0, 0

    def __getitem__(self, outputs: slice) -> Int8Matrix:
        """The rows of some outputs, as a view."""
        return Int8Matrix(self.codes[outputs], self.scales[outputs])

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """The chosen outputs' weights, float32 `[len(index), in]`."""
        return self.codes[index].float() * self.scales[index, None]
