"""Matrices of int8 codes: how they are rounded, and their products on every instruction set against float32."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pagoda import kernels
from pagoda.errors import KernelError
from pagoda.kernels import Int8Matrix, native, reference
from pagoda.model.decoder import Decoder
from tests.kernels.test_fused import SIZES, assert_alone_as_among_others, assert_as_good, call_by_call, tokens
from tests.kernels.test_linear import normal
from tests.model.models import build, load, save
from tests.model.paged import PagedRun

# The last inputs of the tiles, of a vector, and of neither.
SHAPES = [(64, 48), (576, 960), (1536, 80), (128, 16), (96, 32), (100, 37), (8, 1)]


def test_codes_are_the_nearest_and_the_largest_weight_is_exact() -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 40)[:, None]
    weight[7] = 0
    matrix = Int8Matrix.quantize(weight)
    wide = matrix.rows(torch.arange(40))
    assert ((wide - weight).abs() <= matrix.scales[:, None] * 0.501).all()
    torch.testing.assert_close(wide.abs().amax(1), weight.abs().amax(1))
    assert matrix.codes.abs().max() == 127
    assert (wide[7] == 0).all()
    assert matrix.nbytes == 40 * (96 + 4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_quantized(value: float) -> None:
    weight = torch.ones(4, 8)
    weight[2, 3] = value
    with pytest.raises(KernelError, match="not finite"):
        Int8Matrix.quantize(weight)


@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 16, 17, 33, 130])
def test_linear(isa: str, rows: int, num_in: int, num_out: int) -> None:
    x, bias = normal(rows, num_in), normal(num_out, seed=2)
    matrix = Int8Matrix.quantize(normal(num_out, num_in, seed=1))
    for offset in (None, bias):
        got = native.linear_few_rows(x, matrix, offset)
        want = reference.linear(x.float(), matrix, offset)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), want, rtol=4e-3, atol=1e-4 * num_in**0.5)


@pytest.mark.parametrize("outlier", [1.0, 300.0, 1e5])
def test_values_far_below_the_largest_are_off_by_half_a_unit(isa: str, outlier: float) -> None:
    """The fixed point's unit is at most 2^-14 of the row's largest value."""
    x, matrix = normal(20, 192), Int8Matrix.quantize(normal(64, 192, seed=1))
    x[:, 5] = outlier
    x[3:6] *= 1e-20
    x[6] *= 1e20
    got, want = native.linear_few_rows(x, matrix, None).float(), reference.linear(x.float(), matrix, None)
    half_unit = x.float().abs().amax(1, keepdim=True) * 2**-15
    bound = want.abs() * 2**-8 + half_unit * matrix.rows(torch.arange(64)).abs().sum(1)
    assert ((got - want).abs() <= bound).all()
    assert (got[3:6] != 0).all()


def test_rows_do_not_depend_on_their_company(isa: str) -> None:
    x, matrix = normal(40, 128), Int8Matrix.quantize(normal(48, 128, seed=1))
    together = native.linear_few_rows(x, matrix, None)
    for row in (0, 15, 16, 39):
        alone = native.linear_few_rows(x[row : row + 1], matrix, None)
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=0 if isa == "amx" else 1e-2)


def test_rows_that_are_not_finite_stay_so_and_harm_no_other(isa: str) -> None:
    x, matrix = normal(6, 128), Int8Matrix.quantize(normal(48, 128, seed=1))
    clean = native.linear_few_rows(x, matrix, None)
    x[1, 4], x[3, 60], x[4] = torch.nan, torch.inf, 0
    got = native.linear_few_rows(x, matrix, None)
    assert not got[[1, 3]].isfinite().any()
    assert (got[4] == 0).all()
    assert torch.equal(got[[0, 2, 5]], clean[[0, 2, 5]])


@pytest.mark.parametrize("rows", [1, 8, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_of_rows_and_dtype(isa: str, rows: int, dtype: torch.dtype) -> None:
    x, bias = normal(rows, 64).to(dtype), normal(48, seed=2).to(dtype)
    matrix = Int8Matrix.quantize(normal(48, 64, seed=1))
    got = kernels.linear(x, matrix, bias)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), reference.linear(x.float(), matrix, bias.float()), rtol=4e-3, atol=1e-2)


def test_wrong_arguments_raise() -> None:
    x, codes, scales = normal(2, 8), torch.ones(4, 8, dtype=torch.int8), torch.ones(4)
    for wrong_x, wrong_codes, wrong_scales in (
        (x, codes[:, :7], scales),
        (x, codes.float(), scales),
        (x, codes.T.contiguous().T, scales),
        (x, codes, scales[:3]),
        (x, codes, scales.double()),
        (x, codes, torch.ones(8)[::2]),
        (x[:, :7], codes, scales),
        (x.int(), codes, scales),
    ):
        with pytest.raises(KernelError):
            kernels.linear(wrong_x, Int8Matrix(wrong_codes, wrong_scales))


FULL_TILES = {**SIZES, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.fixture(scope="module", params=["llama", "llama-biased-tied", "qwen3"])
def trio(request, tmp_path_factory):
    """The same codes: in BF16 fused, in BF16 call by call, and with float32 activations."""
    folder = save(build(request.param, **FULL_TILES).bfloat16(), tmp_path_factory.mktemp("model"))
    fused = load(folder, torch.bfloat16, "int8")
    if not fused._can_fuse:
        pytest.skip("no matrix tiles on this machine")
    return fused, call_by_call(fused), load(folder, torch.float32, "int8")


@pytest.mark.parametrize("sizes", [[200], [7, 1, 13, 1, 40, 1], [33, 16, 1]], ids=str)
def test_fused_is_as_near_to_float32_as_call_by_call(trio, sizes):
    assert_as_good(*(PagedRun(decoder, seed=3).chunked(tokens(200), sizes) for decoder in trio))


def test_a_row_does_not_depend_on_its_company(trio):
    assert_alone_as_among_others(trio[0])


def test_some_matrices_may_be_codes_and_others_not(tmp_path):
    folder = save(build("llama", **FULL_TILES).bfloat16(), tmp_path)
    full, quantized = load(folder, torch.bfloat16), load(folder, torch.bfloat16, "int8")
    if not full._can_fuse:
        pytest.skip("no matrix tiles on this machine")
    layers = tuple(
        dataclasses.replace(layer, down=codes.down, qkv=codes.qkv)
        for layer, codes in zip(full.weights.layers, quantized.weights.layers, strict=True)
    )
    mixed = Decoder(full.spec, dataclasses.replace(full.weights, layers=layers, lm_head=quantized.weights.lm_head))
    assert mixed._can_fuse
    assert_as_good(
        *(PagedRun(decoder).chunked(tokens(50), [30, 1]) for decoder in (mixed, call_by_call(mixed))),
        PagedRun(_with_float_activations(mixed)).chunked(tokens(50), [30, 1]),
    )


def _with_float_activations(decoder):
    def wide(weights):
        fields = {field.name: getattr(weights, field.name) for field in dataclasses.fields(weights)}
        return {name: t.float() if isinstance(t, torch.Tensor) else t for name, t in fields.items()}

    layers = tuple(type(layer)(**wide(layer)) for layer in decoder.weights.layers)
    return Decoder(decoder.spec, type(decoder.weights)(**{**wide(decoder.weights), "layers": layers}))


def test_inputs_that_do_not_fill_tiles_go_call_by_call(tmp_path):
    decoder = load(save(build("llama", **{**FULL_TILES, "hidden_size": 96}), tmp_path), torch.bfloat16, "int8")
    assert not decoder._can_fuse
    assert PagedRun(decoder).chunked(tokens(9), [9]).isfinite().all()
