"""Norms, SwiGLU, rotary embedding and the KV write, native against the float32 reference."""

from __future__ import annotations

import pytest
import torch

from pagoda import kernels
from pagoda.errors import KernelError
from pagoda.kernels import KVView, native, reference
from tests.kernels.pools import make_view

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One rounding of the result apart, or of an input for the norm of a sum.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=TOLERANCE[got.dtype], atol=TOLERANCE[got.dtype] / 10)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 7, 64, 100, 576])
@pytest.mark.parametrize("rows", [0, 1, 5, 130])
def test_rms_norm(isa: str, rows: int, dim: int, dtype: torch.dtype) -> None:
    x, weight = normal(rows, dim, dtype=dtype), normal(dim, dtype=dtype, seed=1)
    close(native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    residual = normal(rows, dim, dtype=dtype, seed=2)
    inputs = x.clone(), residual.clone()
    got, total = native.add_rms_norm(x, residual, weight, 1e-5)
    want, want_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, want_total)
    close(got, want)
    assert torch.equal(x, inputs[0])
    assert torch.equal(residual, inputs[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_in_a_wider_tensor(isa: str, dtype: torch.dtype) -> None:
    q = normal(40, 9, 64, dtype=dtype)[:, 2:7]
    weight = normal(64, dtype=dtype, seed=1)
    got = native.rms_norm(q, weight, 1e-6)
    assert got.is_contiguous()
    close(got, reference.rms_norm(q, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inter"), [(0, 8), (1, 1536), (3, 5), (200, 500)])
@pytest.mark.parametrize("product", ["silu_mul", "gelu_mul"])
def test_gated_products(isa: str, rows: int, inter: int, dtype: torch.dtype, product: str) -> None:
    gate_up = normal(rows, 2 * inter, dtype=dtype) * 8
    close(getattr(native, product)(gate_up), getattr(reference, product)(gate_up))


@pytest.mark.parametrize("product", ["silu_mul", "gelu_mul"])
def test_gates_of_extremes(isa: str, product: str) -> None:
    gate_up = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4, torch.nan, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    got = getattr(native, product)(gate_up)
    close(got[:, :5], getattr(reference, product)(gate_up)[:, :5])
    assert got[0, 5].isnan()


def test_bf16_rounds_to_nearest_even(isa: str) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=generator)
    x = bits.to(torch.int32).view(torch.float32).to(torch.bfloat16)
    other = x.roll(1)
    got, _ = torch.zeros(0), None
    _, got = native.add_rms_norm(x[None], other[None], torch.ones_like(x), 1e-5)
    want = (x.float() + other.float()).to(torch.bfloat16)[None]
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


class Rows:
    """Fresh rows for a poisoned pool, all slots different."""

    def __init__(self, dtype: torch.dtype, *, rows: int = 21, block_size: int = 7, head_dim: int = 64) -> None:
        generator = torch.Generator().manual_seed(3)
        self.pool, self.view = make_view(9, 2, block_size, head_dim, dtype)
        qkv = normal(rows, 6 + 2 + 2, head_dim, dtype=dtype)
        self.q, self.k, self.v = qkv.split((6, 2, 2), dim=1)
        self.slots = torch.randperm(9 * block_size, generator=generator)[:rows]
        self.positions = torch.randint(0, 500, (rows,), generator=generator)
        angles = torch.outer(torch.arange(500.0), 10000 ** -torch.arange(0, 1, 2 / head_dim))
        self.cos, self.sin = angles.cos(), angles.sin()

    def rope(self, backend: object) -> torch.Tensor:
        args = (self.q, self.k, self.v, self.cos, self.sin, self.positions, self.view, self.slots)
        result: torch.Tensor = backend.rope_write_kv(*args)  # type: ignore[attr-defined]
        return result


def assert_same_pool(got: torch.Tensor, want: torch.Tensor, *, exact: bool) -> None:
    """Equal where written, and poison in the same places: nothing else was touched."""
    assert torch.equal(got.isnan(), want.isnan())
    if exact:
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
    else:
        close(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_write_kv(isa: str, block_size: int, dtype: torch.dtype) -> None:
    got = Rows(dtype, block_size=block_size, rows=9)
    want = Rows(dtype, block_size=block_size, rows=9)
    native.write_kv(got.view, got.k, got.v, got.slots)
    reference.write_kv(want.view, want.k, want.v, want.slots)
    assert int((~want.pool.isnan()).sum()) == 2 * 9 * 2 * 64
    assert_same_pool(got.pool, want.pool, exact=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 24, 64, 128])
@pytest.mark.parametrize("rows", [0, 1, 200])
def test_turn_kv(isa: str, rows: int, head_dim: int, dtype: torch.dtype) -> None:
    pools = []
    for backend in (native, reference):
        pool, view = make_view(60, 3, 7, head_dim, dtype)
        slots = torch.randperm(420, generator=torch.Generator().manual_seed(2))
        sources, targets = slots[:rows], slots[200 : 200 + rows]
        for seed, part in enumerate((view.keys, view.values)):
            part[sources // 7, :, sources % 7] = normal(rows, 3, head_dim, dtype=dtype, seed=seed)
        angles = 10 * normal(rows, head_dim // 2, dtype=torch.float32, seed=5)
        backend.turn_kv(view, sources, targets, angles.cos(), angles.sin())
        pools.append((pool, view))
    (pool, view), (want, _) = pools
    assert torch.equal(pool.isnan(), want.isnan())
    close(pool.nan_to_num(), want.nan_to_num())
    for kept in (view.keys, view.values):
        moved, there = (kept[at // 7, :, at % 7].float() for at in (targets, sources))
        torch.testing.assert_close(moved.norm(dim=-1), there.norm(dim=-1), rtol=2e-2, atol=1e-3)


def test_turn_kv_refuses(isa: str) -> None:
    _, view = make_view(4, 1, 4, 8, torch.float32)
    slots, turn = torch.arange(2), torch.ones(2, 4)
    good = {"view": view, "sources": slots, "targets": slots + 8, "cos": turn, "sin": turn}
    kernels.turn_kv(**good)
    for wrong in (
        {"sources": slots.int()},
        {"targets": torch.tensor([8])},
        {"targets": slots + 15},
        {"sources": slots - 1},
        {"cos": turn.double()},
        {"sin": turn[:, :3]},
        {"cos": torch.ones(4, 2).T},
        {"view": KVView(view.keys, view.values.half())},
    ):
        with pytest.raises(KernelError):
            kernels.turn_kv(**{**good, **wrong})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 8, 24, 64, 128])
def test_rope_write_kv(isa: str, head_dim: int, dtype: torch.dtype) -> None:
    got, want = Rows(dtype, head_dim=head_dim), Rows(dtype, head_dim=head_dim)
    keys = got.k.clone()
    assert got.rope(native) is got.q
    want.rope(reference)
    close(got.q, want.q)
    assert torch.equal(got.k, keys)
    assert_same_pool(got.pool, want.pool, exact=False)


def test_rope_is_a_rotation_by_the_angle() -> None:
    rows = Rows(torch.float32)
    q = rows.q.clone()
    rows.rope(reference)
    pairs = torch.complex(q[..., :32], q[..., 32:])
    angles = torch.outer(rows.positions.float(), 10000 ** -torch.arange(0, 1, 2 / 64))
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(rows.q, torch.cat((turned.real, turned.imag), -1), rtol=1e-4, atol=1e-5)


def test_rope_takes_tables_as_wide_as_the_head(isa: str) -> None:
    got, want = Rows(torch.float32), Rows(torch.float32)
    got.cos, got.sin = got.cos.repeat(1, 2), got.sin.repeat(1, 2)
    close(got.rope(native), want.rope(reference))


@pytest.mark.parametrize("backend", [native, reference])
def test_values_out_of_range_raise_and_write_nothing(backend: object) -> None:
    for name, value in (("slots", 63), ("slots", -1), ("positions", 500), ("positions", -1)):
        rows = Rows(torch.float32)
        getattr(rows, name)[4] = value
        queries = rows.q.clone()
        with pytest.raises(KernelError):
            rows.rope(backend)
        assert rows.pool.isnan().all()
        assert torch.equal(rows.q, queries)


def test_wrong_arguments_raise() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)
    for args in (
        (x, weight[:7], 1e-5),
        (x.long(), weight, 1e-5),
        (x.bfloat16(), weight, 1e-5),
        (torch.randn(8, 4).T, weight, 1e-5),
        (x[0], weight, 1e-5),
        (x, torch.randn(16)[::2], 1e-5),
    ):
        with pytest.raises(KernelError):
            kernels.rms_norm(*args)
    for residual in (x[:3], x.bfloat16(), torch.randn(8, 4).T):
        with pytest.raises(KernelError):
            kernels.add_rms_norm(x, residual, weight, 1e-5)
    for gate_up in (torch.randn(3, 5), torch.randn(4), torch.ones(2, 4, dtype=torch.int32), torch.randn(4, 2).T):
        with pytest.raises(KernelError):
            kernels.silu_mul(gate_up)
        with pytest.raises(KernelError):
            kernels.gelu_mul(gate_up)

    rows = Rows(torch.float32)
    good = {"view": rows.view, "k": rows.k, "v": rows.v, "slot_mapping": rows.slots}
    wrong_writes = (
        {"k": rows.k[:, :1]},
        {"k": rows.k[:5]},
        {"v": rows.v.bfloat16()},
        {"v": rows.v[..., :32]},
        {"slot_mapping": rows.slots.int()},
        {"slot_mapping": rows.slots[:-1]},
        {"view": KVView(rows.view.keys.transpose(2, 3), rows.view.values.transpose(2, 3))},
    )
    for wrong in wrong_writes:
        with pytest.raises(KernelError):
            kernels.write_kv(**{**good, **wrong})
    rotary = {**good, "q": rows.q, "cos": rows.cos, "sin": rows.sin, "positions": rows.positions}
    for wrong in (
        *wrong_writes,
        {"q": rows.q[:-1]},
        {"q": rows.q.bfloat16()},
        {"cos": rows.cos[:, :31]},
        {"cos": rows.cos.double(), "sin": rows.sin.double()},
        {"sin": rows.sin[:7]},
        {"positions": rows.positions.int()},
    ):
        with pytest.raises(KernelError):
            kernels.rope_write_kv(**{**rotary, **wrong})
    assert rows.pool.isnan().all()
