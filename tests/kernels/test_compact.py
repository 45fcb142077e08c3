"""BF16 matrices in 12 bits a value: every bit comes back, and products are those of the matrix as it was."""

from __future__ import annotations

import pytest
import torch

from pagoda import kernels
from pagoda.errors import KernelError
from pagoda.kernels import CompactMatrix, native, reference
from pagoda.model.decoder import Decoder
from pagoda.model.weights import SafetensorsFolder, load_weights
from tests.kernels.test_fused import call_by_call, tokens
from tests.kernels.test_int8 import FULL_TILES
from tests.kernels.test_linear import normal
from tests.model.models import build, load, save
from tests.model.paged import PagedRun


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def compact(weight: torch.Tensor) -> CompactMatrix:
    matrix = CompactMatrix.of(weight)
    assert matrix is not None
    return matrix


def strange(num_out: int, num_in: int) -> torch.Tensor:
    """A matrix with values that have no code in their strip."""
    weight = normal(num_out, num_in, seed=1)
    values = [0.0, -0.0, 1e-38, 1e-40, 3e38, -1e30, torch.inf, -torch.inf, torch.nan]
    places = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(2))[: len(values)]
    weight.view(-1)[places] = torch.tensor(values).bfloat16()
    weight[0, 0], weight[-1, -1] = 1e-30, 1e30
    return weight


@pytest.mark.parametrize(("num_out", "num_in"), [(16, 32), (16, 576), (96, 64), (80, 1536)])
def test_every_bit_comes_back(num_out: int, num_in: int) -> None:
    # One exception in 64 values is the most that a matrix may have.
    weight = strange(num_out, num_in) if num_out * num_in > 2000 else normal(num_out, num_in)
    matrix = compact(weight)
    assert matrix.shape == weight.shape
    assert torch.equal(bits(matrix.expand()), bits(weight))
    some = torch.tensor([num_out - 1, 0, 3, 3, num_out // 2])
    assert torch.equal(bits(matrix.rows(some)), bits(weight[some]))
    assert matrix.rows(some[:0]).shape == (0, num_in)


def test_strips_choose_their_own_high_bytes() -> None:
    weight = normal(64, 64) * torch.logspace(-30, 30, 64).bfloat16()[:, None]
    matrix = compact(weight.view(4, 16, 64)[:, :1].expand(4, 16, 64).reshape(64, 64))
    assert len(matrix.exceptions) == 0
    assert matrix.high_bytes[:, :8].unique().numel() > 8


def test_a_matrix_takes_three_quarters_of_its_bytes() -> None:
    weight = normal(1024, 512)
    matrix = compact(weight)
    assert 0.75 <= matrix.nbytes / weight.nbytes < 0.76
    assert len(matrix.exceptions) < weight.numel() / 1000


def test_zeros_cost_nothing() -> None:
    """A pruned matrix is compact, too."""
    weight = normal(64, 64)
    weight[torch.rand(64, 64, generator=torch.Generator().manual_seed(1)) < 0.7] = 0
    matrix = compact(weight)
    assert len(matrix.exceptions) < 8
    assert torch.equal(bits(matrix.expand()), bits(weight))
    assert len(compact(torch.zeros(16, 32, dtype=torch.bfloat16)).exceptions) == 0


def test_what_would_gain_nothing_stays_as_it_is() -> None:
    assert CompactMatrix.of(normal(24, 64)) is None
    assert CompactMatrix.of(normal(32, 48)) is None
    noise = torch.randint(-(2**15), 2**15, (32, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int16)
    assert CompactMatrix.of(noise.view(torch.bfloat16)) is None


def test_what_does_not_lie_in_one_piece_is_refused() -> None:
    for wrong in (normal(64, 32).T, normal(64, 64)[::2], normal(32, 64)[:, ::2], normal(32, 64).float()):
        with pytest.raises(KernelError, match="contiguous bfloat16"):
            CompactMatrix.of(wrong)


def test_whole_strips_are_views_and_other_rows_tensors() -> None:
    weight = strange(96, 64)
    matrix = compact(weight)
    view = matrix[32:80]
    assert isinstance(view, CompactMatrix)
    assert view.strips.data_ptr() == matrix.strips[2:].data_ptr()
    assert view.shape == (48, 64)
    assert torch.equal(bits(view.expand()), bits(weight[32:80]))
    for other in (slice(8, 32), slice(0, 20), slice(0, 32, 2), slice(-3, None)):
        some = matrix[other]
        assert isinstance(some, torch.Tensor)
        assert torch.equal(bits(some), bits(weight[other]))


@pytest.mark.parametrize(("num_in", "num_out"), [(32, 16), (576, 80), (1536, 48), (64, 176)])
@pytest.mark.parametrize("rows", [0, 1, 2, 16, 17, 32, 33, 64, 65, 200, 1000])
def test_products_are_those_of_the_same_matrix(isa: str, rows: int, num_in: int, num_out: int) -> None:
    x, weight, bias = normal(rows, num_in), normal(num_out, num_in, seed=1), normal(num_out, seed=2)
    weight.view(-1)[:: num_in * 5 + 1] = 1e-20
    matrix = compact(weight)
    for offset in (None, bias):
        got = kernels.linear(x, matrix, offset)
        if isa == "amx":
            assert torch.equal(got, native.linear_few_rows(x, weight, offset))
        want = reference.linear(x.float(), weight.float(), None if offset is None else offset.float())
        torch.testing.assert_close(got.float(), want, rtol=8e-3, atol=1e-3 * num_in**0.5)


def test_a_view_has_products_of_its_own(isa: str) -> None:
    x, weight = normal(5, 64), normal(96, 64, seed=1)
    weight[40, 7] = 1e-25
    for outputs in (slice(32, 64), slice(30, 65)):
        got, want = kernels.linear(x, compact(weight)[outputs]), kernels.linear(x, weight)[:, outputs]
        torch.testing.assert_close(got, want, rtol=8e-3, atol=1e-2)


def test_wrong_arguments_raise() -> None:
    matrix = compact(normal(32, 64))
    for wrong in (normal(2, 32), normal(2, 64).float(), normal(64)):
        with pytest.raises(KernelError):
            kernels.linear(wrong, matrix)
    with pytest.raises(KernelError):
        kernels.linear(normal(2, 64), matrix, normal(31))


@pytest.fixture(scope="module", params=["llama", "llama-biased-tied", "qwen3"])
def pair(request, tmp_path_factory) -> tuple[Decoder, Decoder]:
    """One model with its matrices as they were saved, and compact; some values of each matrix are exceptions."""
    model = build(request.param, **FULL_TILES).bfloat16()
    for weight in (w for w in model.parameters() if w.dim() == 2):
        weight.data.view(-1)[::1013] = 1e-20
    folder = save(model, tmp_path_factory.mktemp("model"))
    plain = load(folder, torch.bfloat16)
    if not plain._can_fuse:
        pytest.skip("no matrix tiles on this machine")
    weights = load_weights(
        plain.spec, SafetensorsFolder(folder), dtype=torch.bfloat16, device=torch.device("cpu"), compacts=True
    )
    assert isinstance(weights.embedding, CompactMatrix)
    assert all(isinstance(layer.gate_up, CompactMatrix) for layer in weights.layers)
    return plain, Decoder(plain.spec, weights)


@pytest.mark.parametrize("sizes", [[200], [7, 1, 13, 1, 40, 1], [33, 16, 1]], ids=str)
def test_a_fused_model_computes_the_same_bits(pair: tuple[Decoder, Decoder], sizes: list[int]) -> None:
    plain, packed = (PagedRun(decoder, seed=3).chunked(tokens(200), sizes) for decoder in pair)
    assert torch.equal(plain, packed)


def test_call_by_call_as_well(pair: tuple[Decoder, Decoder]) -> None:
    plain, packed = (PagedRun(call_by_call(decoder), seed=3).chunked(tokens(60), [30, 1, 29]) for decoder in pair)
    assert torch.equal(plain, packed)


def test_only_bfloat16_in_host_memory_is_made_compact(tmp_path) -> None:
    folder = save(build("llama", **FULL_TILES), tmp_path)
    wide = load(folder)
    again = load_weights(
        wide.spec, SafetensorsFolder(folder), dtype=torch.float32, device=torch.device("cpu"), compacts=True
    )
    assert isinstance(again.lm_head, torch.Tensor)
