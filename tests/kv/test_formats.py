"""KV formats: sizes, whole blocks encoded and decoded, and the same bytes as the kernels write."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pagoda.errors import ConfigError
from pagoda.kernels.quantized import decode_nibbles, decode_rows, encode_nibbles, encode_rows, mix, unmix
from pagoda.kv.formats import FORMATS, PART_FORMATS, default_block_size, parse_format, plain_format
from pagoda.kv.formats.fp8 import FP8_E4M3, FP8_E5M2
from pagoda.kv.formats.int4 import INT4_CHANNELS, INT4_ROWS
from pagoda.kv.formats.int8 import INT8
from pagoda.kv.formats.plain import BF16
from pagoda.kv.layout import DTYPE_BYTES, KVLayout

HEADS, TOKENS, WIDTH = 3, 16, 64


def values(kind: str) -> np.ndarray:
    rng = np.random.default_rng(7)
    x = rng.normal(size=(HEADS, TOKENS, WIDTH)).astype(np.float32)
    match kind:
        case "wide":
            x *= np.logspace(-12, 12, TOKENS, dtype=np.float32)[:, None]
        case "outliers":
            x = (x + 30 * (rng.random(WIDTH) < 0.05)).astype(np.float32)
        case "edges":
            x[0] = 0
            x[1] = -2.5
            x[2, :, ::2] = 1e-40
            x[2, 3] = 3e38
        case "ties":
            x = np.round(x * 8) / 8
        case "not finite":
            x[0, 3, 5] = np.nan
            x[1, 4, 6], x[1, 5, 6], x[2, 0, 0] = np.inf, -np.inf, np.inf
    return x


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.uint16}[tensor.itemsize]).numpy()


MIXED = {dtype: PART_FORMATS[True, dtype] for dtype in ("int8", "float8_e4m3fn")}
KERNELS = {
    INT8: lambda x: encode_rows(x, torch.int8),
    FP8_E4M3: lambda x: encode_rows(x, torch.float8_e4m3fn),
    FP8_E5M2: lambda x: encode_rows(x, torch.float8_e5m2),
    INT4_ROWS: lambda x: encode_nibbles(x, -1),
    INT4_CHANNELS: lambda x: encode_nibbles(x, -2),
    MIXED["int8"]: lambda x: encode_rows(mix(x), torch.int8),
    MIXED["float8_e4m3fn"]: lambda x: encode_rows(mix(x), torch.float8_e4m3fn),
}
DECODE = {
    INT4_ROWS: lambda *parts: decode_nibbles(*parts, -1),
    INT4_CHANNELS: lambda *parts: decode_nibbles(*parts, -2),
    **dict.fromkeys(MIXED.values(), lambda *parts: unmix(decode_rows(*parts))),
}


@pytest.mark.parametrize("kind", ["plain", "wide", "outliers", "edges", "ties", "not finite"])
@pytest.mark.parametrize(
    "part",
    KERNELS,
    ids=["int8", "fp8_e4m3", "fp8_e5m2", "int4 rows", "int4 channels", "int8 keys", "fp8_e4m3 keys"],
)
def test_the_kernels_write_the_same_bytes(part: object, kind: str) -> None:
    x = values(kind)
    ours = part.encode("keys", x)
    theirs = KERNELS[part](torch.from_numpy(x))
    names = [spec.name for spec in part.parts("keys", HEADS, TOKENS, WIDTH)]
    assert list(ours) == names
    for name, tensor in zip(names, theirs, strict=True):
        assert np.array_equal(ours[name].view(bits(tensor).dtype), bits(tensor)), name
    read = DECODE.get(part, decode_rows)(*theirs).numpy()
    assert np.array_equal(part.decode("keys", ours), read, equal_nan=True)


@pytest.mark.parametrize("name", [*FORMATS, "int8/int4", "int4/fp8_e5m2"])
def test_a_block_comes_back(name: str) -> None:
    x = values("plain")
    chosen = parse_format(name)
    assert chosen.name == name
    layer = chosen.attention(HEADS, WIDTH, TOKENS, None, "bfloat16")
    for part, kind in ((chosen.keys, "keys"), (chosen.values, "values")):
        arrays = part.encode(kind, x)
        for spec in part.parts(kind, HEADS, TOKENS, WIDTH):
            assert spec in layer.parts
            assert arrays[spec.name].shape == spec.shape
            assert arrays[spec.name].itemsize == DTYPE_BYTES[spec.dtype]
        back = part.decode(kind, arrays)
        largest = {"fp8_e4m3": 0.07, "fp8_e5m2": 0.15, "int8": 0.01, "int4": 0.08}.get(part.name, 0.004)
        assert np.abs(back - x).max() <= largest * np.abs(x).max()
        assert np.array_equal(part.decode(kind, part.encode(kind, back)), back) or part.name == "int4"


def test_bfloat16_rounds_as_torch_does() -> None:
    x = np.frombuffer(np.random.default_rng(0).bytes(4 * 8192), dtype=np.float32)
    ours = BF16.decode("keys", BF16.encode("keys", x))
    assert np.array_equal(ours, torch.from_numpy(x.copy()).bfloat16().float().numpy(), equal_nan=True)


def layout(name: str, block_size: int, head_dim: int = 64, num_kv_heads: int = 3) -> KVLayout:
    return KVLayout(
        [parse_format(name).attention(num_kv_heads, head_dim, block_size, None, "bfloat16")] * 30, block_size
    )


@pytest.mark.parametrize(
    ("name", "block_size", "least"),
    [("int8", 16, 1.9), ("fp8_e4m3", 16, 1.9), ("int4", 16, 3.1), ("int4", 32, 3.45), ("int4", 64, 3.6)],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_blocks_are_that_much_smaller_alignment_included(
    name: str, block_size: int, head_dim: int, least: float
) -> None:
    full = layout("bf16", block_size, head_dim)
    assert full.pool_block_bytes / layout(name, block_size, head_dim).pool_block_bytes >= least


def test_only_keys_in_int4_are_staged() -> None:
    for name in (*FORMATS, "int8/int4", "int4/int8"):
        chosen = parse_format(name)
        staged = layout(name, 16).staged
        assert chosen.is_staged == name.startswith("int4") == (staged is not None)
        if staged is not None:
            assert staged.block_bytes == layout("bf16", 16).block_bytes
            assert staged.groups == layout(name, 16).groups


def test_layers_in_full_are_in_one_group_with_the_others() -> None:
    small, full = parse_format("int4"), plain_format("bfloat16")
    specs = [(full if index < 2 else small).attention(3, 64, 16, None, "bfloat16") for index in range(30)]
    mixed = KVLayout(specs, 16)
    assert len(mixed.groups) == 1
    assert mixed.block_bytes == sum(layout(n, 16).block_bytes * k // 30 for n, k in (("bf16", 2), ("int4", 28)))
    assert mixed.staged is not None
    assert mixed.staged.block_bytes == layout("bf16", 16).block_bytes * 28 // 30


@pytest.mark.parametrize("name", ["int3", "", "int8/", "int8/int8/int8", "auto", "INT8"])
def test_a_wrong_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="fp8_e4m3"):
        parse_format(name)


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="65"):
        parse_format("int4").attention(3, 65, 16, None, "bfloat16")
    assert parse_format("int8").attention(3, 65, 16, None, "bfloat16").parts[0].shape == (3, 16, 65)


def test_blocks_whose_keys_are_in_another_basis_are_other_blocks() -> None:
    """Disk tiers may hold INT8 keys from before they were mixed: nothing of those may be found."""
    mixed = layout("int8", 16)
    before = [replace(each, parts=tuple(replace(part, basis="") for part in each.parts)) for each in mixed.layers]
    assert KVLayout(before, 16).fingerprint({}) != mixed.fingerprint({})
    assert all(not part.basis for each in layout("int4", 16).layers for part in each.parts)


def test_blocks_that_are_quantized_with_their_first_token_are_other_blocks() -> None:
    """Disk tiers may hold INT4 blocks from before first tokens were kept apart."""
    before = [replace(each, staged=()) for each in layout("int4", 16).layers]
    assert KVLayout(before, 16).fingerprint({}) != layout("int4", 16).fingerprint({})


def test_formats_have_fingerprints_of_their_own() -> None:
    names = [*FORMATS, "int8/int4", "int4/int8"]
    assert len({layout(name, 16).fingerprint({}) for name in names}) == len(names)


def test_blocks_are_larger_where_keys_have_scales_for_each() -> None:
    sizes = {name: default_block_size(name) for name in ("auto", *FORMATS, "int8/int4", "int4/int8")}
    assert {name for name, size in sizes.items() if size == 32} == {"int4", "int4/int8"}
    assert set(sizes.values()) == {16, 32}
    with pytest.raises(ConfigError):
        default_block_size("int5")
