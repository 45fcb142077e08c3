"""Quantized keys and values: what is written, what is read, and that how it is chunked decides nothing."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from pagoda import kernels
from pagoda.errors import KernelError
from pagoda.kernels import KVView, reference
from pagoda.kernels.quantized import (
    decode_nibbles,
    decode_rows,
    decode_scales,
    encode_nibbles,
    encode_rows,
    mix,
    unmix,
)
from tests.kernels.quantized_pools import ROW, Written, make_view

FORMATS = [
    ("int8", "int8"),
    ("fp8_e4m3", "fp8_e4m3"),
    ("fp8_e5m2", "fp8_e5m2"),
    ("int4", "int4"),
    ("int8", "int4"),
    ("int4", "int8"),
    ("fp16", "bf16"),
]
each_format = pytest.mark.parametrize("formats", FORMATS, ids="/".join)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("dtype", "step"), [(torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 2.0**-4), (torch.float8_e5m2, 2.0**-3)]
)
def test_rows_are_off_by_half_a_step_at_most(dtype: torch.dtype, step: float) -> None:
    x = normal(50, 3, 64) * torch.logspace(-6, 6, 50)[:, None, None]
    codes, scales = encode_rows(x, dtype)
    assert scales.shape == (50, 3)
    off = (decode_rows(codes, scales) - x).abs()
    of = x.abs().amax(-1, keepdim=True) if dtype == torch.int8 else x.abs() + x.abs().amax(-1, keepdim=True) * 1e-4
    assert (off <= of * step * 1.02).all()  # the scale is rounded to bfloat16, by 0.4% at most


@pytest.mark.parametrize("dim", [-1, -2])
def test_nibbles_are_off_by_half_a_step_at_most(dim: int) -> None:
    x = normal(40, 2, 16, 64) * torch.logspace(-3, 3, 40)[:, None, None, None] + 3 * normal(40, 2, 1, 64, seed=1)
    codes, scales, zeros = encode_nibbles(x, dim)
    assert codes.shape == (40, 2, 16, 32)
    assert scales.shape == zeros.shape == x.amax(dim).shape
    step = decode_scales(scales).unsqueeze(dim)
    rounded_zero = x.amin(dim, keepdim=True).abs() * 2.0**-8
    assert ((decode_nibbles(codes, scales, zeros, dim) - x).abs() <= step * 0.501 + rounded_zero).all()
    spread = (x.amax(dim) - x.amin(dim)).unsqueeze(dim)
    assert (step <= (spread + rounded_zero) / 15 * 1.126 + 2.0**-17).all()


def test_zeros_and_constants_are_exact() -> None:
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        assert torch.equal(decode_rows(*encode_rows(torch.zeros(2, 8), dtype)), torch.zeros(2, 8))
    for value in (0.0, -3.5):
        x = torch.full((3, 16, 8), value)
        assert torch.equal(decode_nibbles(*encode_nibbles(x, -2), -2), x)


@pytest.mark.parametrize("dim", [1, 6, 8, 64, 80, 256])
def test_mixing_is_a_hadamard_matrix_and_undoes_itself(dim: int) -> None:
    x = normal(7, 3, dim)
    order = dim & -dim
    matrix = torch.ones(1, 1)
    while len(matrix) < order:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    torch.testing.assert_close(mix(x), (x.unflatten(-1, (-1, order)) @ matrix).flatten(-2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(unmix(mix(x)), x, rtol=1e-5, atol=1e-5)


def test_mixed_keys_with_large_channels_lose_less_of_their_products() -> None:
    keys, queries = normal(500, 64), normal(20, 64, seed=1)
    keys[:, [3, 40]] += torch.tensor([30.0, -20.0])
    queries[:, [3, 40]] *= 0.1
    plain, mixed = (decode_rows(*encode_rows(each, torch.int8)) for each in (keys, mix(keys)))
    off = [(queries @ (read - keys).T).square().mean().sqrt() for read in (plain, unmix(mixed))]
    assert off[1] < 0.5 * off[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_own_scale_nan_and_no_other(bad: float) -> None:
    x = normal(4, 2, 16, 8)
    x[1, 0, 3, 5] = bad
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        got = decode_rows(*encode_rows(x, dtype))
        assert got[1, 0, 3].isnan().all()
        got[1, 0, 3] = 0
        assert got.isfinite().all()
    for dim in (-1, -2):
        got = decode_nibbles(*encode_nibbles(x, dim), dim)
        poisoned = got[1, 0, 3] if dim == -1 else got[1, 0, :, 5]
        assert poisoned.isnan().all()
        poisoned[:] = 0
        assert got.isfinite().all()


def as_read(written: Written, name: str) -> torch.Tensor:
    """Keys or values as later blocks read them; of keys in nibbles only those of full blocks."""
    view, size = written.view, written.block_size
    x, codes = (written.k, view.keys) if name == "keys" else (written.v, view.values)
    if codes.dtype.is_floating_point and codes.itemsize > 1:
        return x.to(codes.dtype).float()
    if codes.dtype != torch.uint8:
        read = decode_rows(*encode_rows(mix(x) if name == "keys" else x, codes.dtype))
        return unmix(read) if name == "keys" else read
    if name == "values":
        return decode_nibbles(*encode_nibbles(x, -1), -1)
    blocks = x[: len(x) // size * size].unflatten(0, (-1, size)).transpose(1, 2).clone()
    blocks[0, :, 0] = blocks[0, :, min(1, size - 1)]  # no scale has to do with the first token
    return decode_nibbles(*encode_nibbles(blocks, -2), -2).transpose(1, 2).flatten(0, 1)


def definition(written: Written, window: int | None) -> torch.Tensor:
    """Attention of every token, one at a time, each key and value as the format says that it is read."""
    group = written.q.shape[1] // written.k.shape[1]
    sides = [(as_read(written, "keys"), written.k), (as_read(written, "values"), written.v)]
    if written.view.staging is not None:
        firsts = written.view.staging.firsts
        for (quantized, _), first in zip(sides, (firsts.keys, firsts.values), strict=True):
            if len(quantized):
                quantized[0] = first[ROW, :, 0]
    rows = []
    for row, query in enumerate(written.q):
        first = 0 if window is None else max(0, row - window + 1)
        own = row // written.block_size * written.block_size if written.view.staging is not None else row + 1
        keys, values = (
            torch.cat((quantized[first:own], full[max(first, own) : row + 1])).repeat_interleave(group, dim=1)
            for quantized, full in sides
        )
        weights = (torch.einsum("hd,jhd->hj", query, keys) * written.view.head_dim**-0.5).softmax(-1)
        rows.append(torch.einsum("hj,jhd->hd", weights, values))
    return torch.stack(rows)


@each_format
@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("block_size", [16, 5])
def test_attention_follows_the_definition(formats: tuple[str, str], window: int | None, block_size: int) -> None:
    written = Written(make_view(*formats, head_dim=16, block_size=block_size), 43)
    got = written.step(reference, 0, 43, window=window).out
    torch.testing.assert_close(got, definition(written, window), rtol=1e-5, atol=1e-5)


@each_format
@pytest.mark.parametrize("window", [None, 11])
def test_chunks_decide_nothing(formats: tuple[str, str], window: int | None) -> None:
    whole = Written(make_view(*formats, head_dim=16), 50)
    want = whole.step(reference, 0, 50, window=window)
    chunked = Written(make_view(*formats, head_dim=16), 50)
    bounds = [0, 16, 17, 18, 31, 32, 48, 49, 50]
    got = [chunked.step(reference, a, b, window=window) for a, b in itertools.pairwise(bounds)]
    torch.testing.assert_close(torch.cat([each.out for each in got]), want.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([each.lse for each in got]), want.lse, rtol=1e-5, atol=1e-5)
    mass = sum(torch.nn.functional.pad(each.mass, (0, 50 - each.mass.shape[2])) for each in got)
    torch.testing.assert_close(mass, want.mass, rtol=1e-5, atol=1e-5)
    for name in ("keys", "values", "key_scales", "value_scales", "key_zeros", "value_zeros"):
        one, other = getattr(whole.view, name), getattr(chunked.view, name)
        if one is not None:
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), name


@each_format
def test_a_write_touches_its_slots_only(formats: tuple[str, str]) -> None:
    """Of a block in the pool; of one that is being filled nothing is in the pool."""
    written = Written(make_view(*formats, head_dim=16), 23)
    before = {
        name: part.contiguous().view(torch.uint8).clone()
        for name in ("keys", "values", "key_scales", "value_scales", "key_zeros", "value_zeros")
        if (part := getattr(written.view, name)) is not None
    }
    written.stage(0, 23)
    kernels.write_kv(written.view, written.k, written.v, written.slots(0, 23))
    full, partly = written.table.tolist()
    for name, old in before.items():
        new = getattr(written.view, name).contiguous().view(torch.uint8)
        others = [block for block in range(len(old)) if block not in (full, partly)]
        assert torch.equal(new[others], old[others])
        if written.view.staging is not None:
            assert torch.equal(new[partly], old[partly])
        assert not torch.equal(new[full], old[full])


@each_format
def test_a_bad_token_spoils_only_those_that_read_it(formats: tuple[str, str]) -> None:
    spoilt, sound = (Written(make_view(*formats, head_dim=16), 40) for _ in range(2))
    spoilt.k[33] = spoilt.v[33] = torch.nan
    for start, stop in [(0, 20), (20, 40)]:
        got, want = (written.step(reference, start, stop).out for written in (spoilt, sound))
        bad = max(0, 33 - start)
        assert got[bad:].isnan().all()
        torch.testing.assert_close(got[:bad], want[:bad], rtol=1e-6, atol=1e-6)


@each_format
def test_rope_writes_what_it_rotated(formats: tuple[str, str]) -> None:
    one, other = (Written(make_view(*formats, head_dim=16), 20) for _ in range(2))
    angles = torch.outer(torch.arange(32.0), 100 ** -torch.arange(0, 1, 2 / 16))
    positions = torch.arange(3, 23)
    for written in (one, other):
        written.stage(0, 20)
    q = one.q.clone()
    reference.rope_write_kv(q, one.k, one.v, angles.cos(), angles.sin(), positions, one.view, one.slots(0, 20))
    turned = reference._rotate(other.k, angles.cos()[positions, None], angles.sin()[positions, None])
    kernels.write_kv(other.view, turned, other.v, other.slots(0, 20))
    assert torch.equal(one.attend(reference, 0, 20).out, other.attend(reference, 0, 20).out)
    assert not torch.equal(q, one.q)


def test_views_that_do_not_fit_are_refused() -> None:
    def attend(view: KVView) -> None:
        Written(make_view("int8", "int8", head_dim=16), 5)
        q = torch.zeros(1, 2, 16)
        one = torch.ones(1, dtype=torch.int32)
        kernels.paged_attention(q, view, one[:, None], torch.tensor([0, 1], dtype=torch.int32), one, scale=1.0)

    int8, int4 = make_view("int8", "int8", head_dim=16), make_view("int4", "int4", head_dim=16)
    half = make_view("int4", "int4", head_dim=16, dtype=torch.float16)
    assert int8.key_scales is not None
    assert int4.key_zeros is not None
    assert int4.staging is not None
    assert half.staging is not None
    row_of = int4.staging.firsts.row_of
    for wrong in (
        replace(int8, key_scales=None),
        replace(int8, key_scales=int8.key_scales.float()),
        replace(int8, value_scales=int8.key_scales[:, :, :-1]),
        replace(int8, key_zeros=int8.key_scales),
        replace(int8, staging=int4.staging),
        replace(int4, staging=None),
        replace(int4, key_zeros=None),
        replace(int4, values=int4.values[..., :-1]),
        replace(int4, value_scales=int4.key_scales),
        replace(int4, staging=replace(int4.staging, slot_of=int4.staging.slot_of[:-1])),
        replace(int4, staging=replace(int4.staging, keys=int4.staging.keys.half())),
        replace(int4, staging=replace(int4.staging, firsts=half.staging.firsts)),
        replace(int4, staging=half.staging),
        replace(int4, staging=replace(int4.staging, values=int4.staging.values[..., :-1])),
        replace(int4, staging=replace(int4.staging, firsts=replace(int4.staging.firsts, row_of=row_of[:-1]))),
        replace(int4, staging=replace(int4.staging, firsts=replace(int4.staging.firsts, row_of=row_of.long()))),
        replace(int4, staging=replace(int4.staging, firsts=replace(int4.staging.firsts, keys=int4.staging.keys))),
        replace(int8, keys=int8.keys.short()),
    ):
        with pytest.raises(KernelError):
            attend(wrong)


def test_a_block_without_a_staged_copy_is_refused_and_nothing_is_written() -> None:
    written = Written(make_view("int4", "int4", head_dim=16), 20)
    with pytest.raises(KernelError, match="staged copy"):
        kernels.write_kv(written.view, written.k, written.v, written.slots(0, 20))
    assert written.view.staging is not None
    assert written.view.staging.keys.isnan().all()
    assert written.view.key_zeros is not None
    assert written.view.key_zeros.isnan().all()
