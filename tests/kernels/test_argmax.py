"""The largest value of each row, native and reference against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagoda import kernels
from pagoda.errors import KernelError
from pagoda.kernels import native, reference

INF, NAN = float("inf"), float("nan")
WIDTHS = [1, 5, 16, 63, 64, 65, 1000, 49152]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_the_first_of_the_largest(isa: str, rows: int, width: int) -> None:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(width)).mul(8).round()  # many are equal
    want = values.numpy().argmax(axis=1).tolist()
    assert native.argmax(values).tolist() == want
    assert reference.argmax(values).tolist() == want


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_that_is_not_finite_has_none(isa: str, width: int) -> None:
    for place in {0, width // 2, width - 1}:
        values = torch.full((4, width), -INF)
        values[0, place] = NAN
        values[1] = 3.0
        values[1, place] = INF
        values[3, place] = -2.5  # the others may be as small as can be
        for backend in (native, reference):
            assert backend.argmax(values).tolist() == [-1, -1, -1, place]


def test_one_nan_among_larger_values(isa: str) -> None:
    values = torch.from_numpy(np.arange(300, dtype=np.float32)[None].repeat(300, axis=0))
    values[range(300), range(300)] = NAN
    assert native.argmax(values).tolist() == [-1] * 300


@pytest.mark.parametrize(
    "values", [torch.zeros(3), torch.zeros(2, 0), torch.zeros(2, 3).double(), torch.zeros(4, 6)[:, :3]]
)
def test_wrong_arguments_raise(values: torch.Tensor) -> None:
    with pytest.raises(KernelError, match="argmax needs"):
        kernels.argmax(values)
