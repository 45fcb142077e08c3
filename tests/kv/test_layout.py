"""Where bytes are: sizes against published figures, and views that never share a byte."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from pagoda.errors import ConfigError
from pagoda.kv.layout import (
    ALIGNMENT,
    DTYPE_BYTES,
    KVLayout,
    LayerSpec,
    PartSpec,
    PartView,
    attention_parts,
    latent_parts,
)


def attention(num_layers: int, num_kv_heads: int, head_dim: int, dtype: str, **more: object) -> KVLayout:
    return KVLayout.for_attention(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        **{"block_size": 16, **more},
    )


def mla(block_size: int = 16) -> KVLayout:
    return KVLayout([LayerSpec(latent_parts(576, block_size, "bfloat16"))] * 3, block_size)


def quantized(block_size: int = 16) -> KVLayout:
    """Codes of one byte, and float32 scales that are smaller than a cache line."""
    parts = (
        PartSpec("keys", (2, block_size, 24), "int8"),
        PartSpec("key_scales", (2, 3), "float32"),
        PartSpec("values", (2, block_size, 24), "float8_e4m3fn"),
        PartSpec("value_scales", (2, block_size), "float16"),
    )
    return KVLayout([LayerSpec(parts), LayerSpec(attention_parts(2, 24, block_size, "bfloat16"))], block_size)


def differing(*layers: str) -> KVLayout:
    """Layers that keep many or few bytes, with a window where there is a w: `L`, `S`, `Lw`, `Sw`."""
    small, large = quantized().layers
    return KVLayout(
        [LayerSpec((large if "L" in layer else small).parts, 32 if "w" in layer else None) for layer in layers], 16
    )


LAYOUTS = {
    "attention": attention(3, 2, 16, "bfloat16"),
    "odd head_dim": attention(3, 3, 5, "float16"),
    "block of one token": attention(2, 1, 8, "float32", block_size=1),
    "full and sliding": attention(6, 2, 16, "float32", windows=[None, 32, 32, None, 32, 32]),
    "mla": mla(),
    "mixed dtypes": quantized(),
    "groups of other bytes": differing("S", "L", "Lw", "Sw"),
    "groups of other bytes in part": differing("L", "S", "L", "Lw", "Lw", "Sw"),
}


def test_llama_3_8b_takes_128_kib_per_token() -> None:
    layout = attention(32, 8, 128, "float16")
    assert layout.bytes_per_token == 2 * 32 * 8 * 128 * 2 == 128 * 1024
    # DESIGN's "12.8 GB" for 100,000 tokens counts 128 KiB as 128 kB: it is 13.1 GB, or 12.2 GiB.
    assert 100_000 * layout.bytes_per_token / 1e9 == pytest.approx(13.1, abs=0.05)
    assert 100_000 * layout.bytes_per_token / 2**30 == pytest.approx(12.2, abs=0.05)


@pytest.mark.parametrize(("num_kv_heads", "gigabytes"), [(8, 1.34), (64, 10.74)])
def test_llama_70b_at_4096_tokens_in_decimal_gigabytes(num_kv_heads: int, gigabytes: float) -> None:
    layout = attention(80, num_kv_heads, 128, "bfloat16")
    assert 4096 * layout.bytes_per_token / 1e9 == pytest.approx(gigabytes, abs=0.005)
    blocks = layout.blocks_for(4096)
    assert blocks == 256
    assert blocks * layout.block_bytes == 4096 * layout.bytes_per_token  # nothing is lost to alignment
    assert blocks * layout.pool_block_bytes <= 1.001 * 4096 * layout.bytes_per_token


def byte_offsets(view: PartView) -> np.ndarray:
    """Every byte of a block that a part touches, found by walking its strides."""
    itemsize = DTYPE_BYTES[view.dtype]
    indices = np.array(list(product(*(range(n) for n in view.shape))))
    elements = view.offset + (indices @ np.array(view.strides)) * itemsize
    return (elements[:, None] + np.arange(itemsize)).ravel()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_views_never_overlap_and_stay_inside_the_block(layout: KVLayout) -> None:
    for group in layout.groups:
        touched: set[int] = set()
        for layer in group.layers:
            for part in layout.layers[layer].parts:
                view = layout.part(layer, part.name)
                assert (view.shape, view.dtype) == (part.shape, part.dtype)
                assert view.offset % ALIGNMENT == 0
                own = byte_offsets(view)
                assert np.unique(own).size == own.size == part.num_bytes
                assert own.min() >= 0
                assert own.max() < layout.block_bytes
                assert touched.isdisjoint(own.tolist())
                touched.update(own.tolist())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_strips_are_all_of_a_block_and_cut_no_layer(layout: KVLayout) -> None:
    starts = [planes.start for planes in layout.planes]
    assert [*starts, layout.block_bytes] == [0, *(planes.stop for planes in layout.planes)]
    for group in layout.groups:
        for layer in group.layers:
            views = [layout.part(layer, part.name) for part in layout.layers[layer].parts]
            touched = np.concatenate([byte_offsets(view) for view in views])
            places = [layout.place(int(offset)) for offset in (touched.min(), touched.max())]
            assert places[0][:2] == places[1][:2]
            assert places[1][2] - places[0][2] == touched.max() - touched.min()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_strides_are_aligned_and_off_the_distance_of_cache_sets(layout: KVLayout) -> None:
    for planes in layout.planes:
        assert planes.stride in (planes.num_bytes, planes.num_bytes + ALIGNMENT)
        assert planes.stride % ALIGNMENT == 0
        assert planes.stride % 4096
    assert layout.pool_block_bytes == sum(planes.count * planes.stride for planes in layout.planes)


def test_where_groups_are_alike_each_layer_has_a_plane() -> None:
    for name in ("attention", "odd head_dim", "full and sliding", "mla", "mixed dtypes"):
        layout = LAYOUTS[name]
        assert sum(planes.count for planes in layout.planes) == len(layout.groups[0].layers)
    assert [planes.count for planes in LAYOUTS["mla"].planes] == [3]
    assert [planes.count for planes in LAYOUTS["mixed dtypes"].planes] == [1, 1]


def test_where_groups_differ_only_common_ends_of_layers_are_cuts() -> None:
    small, large = (differing(layer).block_bytes for layer in ("S", "L"))
    assert small != large
    for layers, strips in {
        ("S", "L", "Lw", "Sw"): [small + large],
        ("L", "S", "L", "Lw", "Lw", "Sw"): [large, small + large],
        ("S", "S", "Lw", "Lw"): [2 * large],
        ("S", "Lw"): [large],
    }.items():
        planes = differing(*layers).planes
        assert [each.num_bytes for each in planes for _ in range(each.count)] == strips


def test_mla_keeps_one_row_per_token() -> None:
    assert mla().bytes_per_token == 3 * 576 * 2
    assert mla().part(2, "latent").shape == (16, 576)


def test_bytes_per_token_counts_scales() -> None:
    scales = 2 * 3 * 4 + 2 * 16 * 2
    assert quantized().bytes_per_token == (2 * 16 * 24 * 2 + scales + 2 * 2 * 16 * 24 * 2) / 16


def test_layers_group_by_kind_in_groups_of_equal_size() -> None:
    layout = attention(6, 2, 16, "float32", windows=[None, 32, 32, None, 32, 32])
    assert [(g.layers, g.window) for g in layout.groups] == [((0, 3), None), ((1, 2), 32), ((4, 5), 32)]
    assert layout.group_of_layer == (0, 1, 1, 0, 2, 2)
    assert layout.block_bytes * 3 == 6 * 2 * 2 * 16 * 16 * 4
    assert layout.blocks_for(17) == 3 * 2


def test_layers_of_one_kind_are_one_group() -> None:
    assert [g.layers for g in attention(5, 1, 8, "float32").groups] == [(0, 1, 2, 3, 4)]
    assert [g.window for g in attention(2, 1, 8, "float32", windows=[8, 8]).groups] == [8]


def test_layers_of_one_kind_are_one_group_whatever_their_parts() -> None:
    layout = quantized()
    assert [g.layers for g in layout.groups] == [(0, 1)]
    assert layout.block_bytes == 2 * 2 * 16 * 24 + 2 * 64 + 2 * 2 * 16 * 24 * 2  # each scale takes a cache line


def test_a_group_of_smaller_layers_gets_blocks_of_the_same_size() -> None:
    small, large = quantized().layers
    layout = KVLayout([small, LayerSpec(large.parts, window=32)], 16)
    assert [g.layers for g in layout.groups] == [(0,), (1,)]
    assert layout.block_bytes == 2 * 2 * 16 * 24 * 2  # the bfloat16 layer's


BASE = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "block_size": 16, "dtype": "float16", "windows": None}
IDENTITY = {"weights": "w", "adapter": "a", "rope": "theta=1e4", "kv_format": "fp16"}


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 3},
        {"num_kv_heads": 4},
        {"head_dim": 32},
        {"block_size": 32},
        {"dtype": "bfloat16"},
        {"windows": [None, 64]},
        {"windows": [64, None]},
    ],
    ids=str,
)
def test_fingerprint_differs_by_layout(change: dict[str, object]) -> None:
    base = KVLayout.for_attention(**BASE).fingerprint(IDENTITY)
    assert len(base) == 32
    assert KVLayout.for_attention(**{**BASE, **change}).fingerprint(IDENTITY) != base


@pytest.mark.parametrize("name", IDENTITY)
def test_fingerprint_differs_by_identity(name: str) -> None:
    layout = KVLayout.for_attention(**BASE)
    base = layout.fingerprint(IDENTITY)
    assert layout.fingerprint({**IDENTITY, name: "other"}) != base
    assert layout.fingerprint({k: v for k, v in IDENTITY.items() if k != name}) != base
    assert layout.fingerprint(dict(reversed(IDENTITY.items()))) == base


def test_fingerprint_differs_by_part_names() -> None:
    a, b = (KVLayout([LayerSpec((PartSpec(name, (4, 8), "int8"),))], 4) for name in ("keys", "values"))
    assert a.fingerprint({}) != b.fingerprint({})


@pytest.mark.parametrize(
    "build",
    [
        lambda: attention(1, 1, 8, "float64"),
        lambda: attention(1, 0, 8, "float32"),
        lambda: attention(1, 1, 8, "float32", block_size=0),
        lambda: attention(0, 1, 8, "float32"),
        lambda: attention(1, 1, 8, "float32", windows=[0]),
        lambda: attention(3, 1, 8, "float32", windows=[None, 8]),
        lambda: PartSpec("state", (), "float32"),
        lambda: LayerSpec((PartSpec("keys", (4, 8), "int8"), PartSpec("keys", (4,), "float32"))),
    ],
    ids=["dtype", "no heads", "block size", "no layers", "window", "windows per layer", "shape", "part twice"],
)
def test_a_wrong_layout_is_refused(build: object) -> None:
    with pytest.raises(ConfigError):
        build()  # type: ignore[operator]
