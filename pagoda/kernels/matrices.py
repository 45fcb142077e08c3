"""What a weight matrix `[out, in]` may be, and where its parts are."""

from __future__ import annotations

import torch

from pagoda.kernels.compact_matrix import CompactMatrix
from pagoda.kernels.int8_matrix import Int8Matrix

__all__ = ["CompactMatrix", "Int8Matrix", "Matrix", "matrix_at"]

Matrix = torch.Tensor | Int8Matrix | CompactMatrix


def matrix_at(matrix: Matrix) -> tuple[int, int, int, int, int]:
    """Where the parts of a matrix are, as the native kernels take them; 0 for those that it has not."""
    return (matrix.data_ptr(), 0, 0, 0, 0) if isinstance(matrix, torch.Tensor) else matrix.addresses()
