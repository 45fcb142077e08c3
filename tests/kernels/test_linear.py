"""The few-row BF16 product against float32, and which calls reach it."""

from __future__ import annotations

import pytest
import torch

from pagoda import kernels
from pagoda.errors import KernelError
from pagoda.kernels import native


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(("num_in", "num_out"), [(64, 48), (576, 960), (1536, 80), (32, 16), (100, 37), (8, 1)])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 16, 17, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(isa: str, rows: int, num_in: int, num_out: int, with_bias: bool) -> None:
    x, weight = normal(rows, num_in), normal(num_out, num_in, seed=1)
    bias = normal(num_out, seed=2) if with_bias else None
    got = native.linear_few_rows(x, weight, bias)
    want = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=8e-3, atol=1e-3 * num_in**0.5)


def test_strided_rows(isa: str) -> None:
    x, weight = normal(5, 256)[:, 64:192], normal(64, 256, seed=1)[:, 32:160]
    want = torch.nn.functional.linear(x.float(), weight.float())
    torch.testing.assert_close(native.linear_few_rows(x, weight, None).float(), want, rtol=8e-3, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 8, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_of_rows_and_dtype(isa: str, rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = normal(rows, 64).to(dtype), normal(48, 64, seed=1).to(dtype), normal(48, seed=2).to(dtype)
    want = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(kernels.linear(x, weight, bias).float(), want, rtol=8e-3, atol=1e-2)
    columns = weight.T.contiguous().T  # column-major weights are torch's business
    torch.testing.assert_close(kernels.linear(x, columns, bias).float(), want, rtol=8e-3, atol=1e-2)


def test_wrong_arguments_raise() -> None:
    x, weight = normal(2, 8), normal(4, 8)
    for args in (
        (x, weight[:, :7]),
        (x.float(), weight),
        (x[0], weight),
        (x, weight, normal(3)),
        (x, weight, normal(4).float()),
    ):
        with pytest.raises(KernelError):
            kernels.linear(*args)
