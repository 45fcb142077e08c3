"""Codecs and coded tiers: what comes back, how much smaller it is, and what damage or another codec does."""

from __future__ import annotations

import numpy as np
import pytest

from pagoda.errors import ConfigError, CorruptRecord
from pagoda.kv.formats import parse_format
from pagoda.kv.formats.base import to_bfloat16
from pagoda.kv.formats.blocks import decode_block
from pagoda.kv.formats.codecs import BlockCodec, make_codec
from pagoda.kv.layout import KVLayout
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.coded import CodedTier
from pagoda.kv.tiers.fake import MemoryTier
from pagoda.kv.tiers.records import Corrupt, Found, GetResult, Missing, Record, Stored, Target
from tests.kv.tiers.kit import rid


def layout(kv_format: str = "bf16", windows: tuple[int | None, ...] = (None,) * 4) -> KVLayout:
    return KVLayout([parse_format(kv_format).attention(3, 32, 16, window, "bfloat16") for window in windows], 16)


def block(of: KVLayout, seed: int = 0) -> np.ndarray:
    """Normal numbers in the pool's dtype; every second channel is ten times as large."""
    rng = np.random.default_rng(seed)
    itemsize = 4 if of.layers[0].parts[0].dtype == "float32" else 2
    numbers = rng.normal(size=of.block_bytes // itemsize).astype(np.float32)
    numbers[::2] *= 10
    return (to_bfloat16(numbers) if itemsize == 2 else numbers).view(np.uint8)


def back(codec: BlockCodec, group: int, data: np.ndarray) -> np.ndarray:
    out = np.full_like(data, 0xA5)
    codec.decode(group, codec.encode(group, data), out)
    return out


@pytest.mark.parametrize("kv_format", ["bf16", "fp32"])
def test_split_loses_nothing_and_is_smaller(kv_format: str) -> None:
    of = layout(kv_format)
    codec = make_codec("split", of)
    assert not codec.is_lossy
    data = block(of)
    assert np.array_equal(back(codec, 0, data), data)
    assert codec.encode(0, data).size < 0.9 * data.size
    noise = np.random.default_rng(1).integers(0, 256, of.block_bytes, dtype=np.uint8)
    assert np.array_equal(back(codec, 0, noise), noise)
    assert codec.encode(0, noise).size <= codec.most_bytes


@pytest.mark.parametrize(
    ("name", "largest_error", "share"), [("int8", 0.01, 0.55), ("fp8_e4m3", 0.07, 0.55), ("int4", 0.07, 0.36)]
)
@pytest.mark.parametrize("windows", [(None,) * 4, (None, 32, None, 32)])
def test_formats_lose_what_they_lose_in_the_pool(
    name: str, largest_error: float, share: float, windows: tuple[int | None, ...]
) -> None:
    of = layout(windows=windows)
    codec = make_codec(name, of)
    assert codec.is_lossy
    for group in range(len(of.groups)):
        data = block(of, group)
        found, wanted = (list(decode_block(of, group, each)) for each in (back(codec, group, data), data))
        for got, want in zip(found, wanted, strict=True):
            assert 0 < np.abs(got.values - want.values).max() <= largest_error * np.abs(want.values).max()
        assert codec.encode(group, data).size <= codec.most_bytes <= share * data.size


@pytest.mark.parametrize("name", ["split", "int8"])
def test_what_is_no_block_is_corrupt(name: str) -> None:
    of = layout()
    codec = make_codec(name, of)
    stored = codec.encode(0, block(of))
    wrongs = [stored[:-1], stored[:0], np.append(stored, stored[:1])]
    if name == "split":
        wrongs += [
            np.where(np.arange(stored.size) == at, 0xFF, stored).astype(np.uint8) for at in (5, stored.size // 4 * 3)
        ]
    for wrong in wrongs[:4]:
        with pytest.raises(CorruptRecord):
            codec.decode(0, wrong, np.empty(of.block_bytes, dtype=np.uint8))


def test_wrong_codecs_are_refused() -> None:
    with pytest.raises(ConfigError, match="split"):
        make_codec("zip", layout())
    with pytest.raises(ConfigError, match="quantized"):
        make_codec("int4", layout("int8"))


def get(tier: Tier, name: int, size: int) -> tuple[GetResult, np.ndarray]:
    buffer = np.full(size, 0xA5, dtype=np.uint8)
    [result] = tier.get_into([Target(rid(name), buffer)])
    return result, buffer


@pytest.mark.parametrize("name", ["split", "int8"])
def test_a_coded_tier_holds_less_and_gives_whole_blocks(name: str) -> None:
    of = layout()
    inner = MemoryTier(1 << 24)
    codec = make_codec(name, of)
    tier = CodedTier(inner, codec, of.block_bytes)
    assert tier.is_lossy == codec.is_lossy
    data = [block(of, seed) for seed in range(3)]
    assert tier.put([Record(rid(i), each) for i, each in enumerate(data)]) == [Stored(of.block_bytes)] * 3
    assert inner.usage().payload_bytes < 3 * of.block_bytes * 0.95
    assert tier.lookup([rid(0), rid(9)]) == [Found(of.block_bytes), Missing()]
    for i, each in enumerate(data):
        result, got = get(tier, i, of.block_bytes)
        assert result == Found(of.block_bytes)
        assert np.array_equal(got, back(codec, 0, each))
    tier.delete([rid(0)])
    assert get(tier, 0, of.block_bytes)[0] == Missing()


def test_another_codec_finds_nothing_and_damage_is_a_counted_miss() -> None:
    of = layout()
    inner = MemoryTier(1 << 24)
    tier = CodedTier(inner, make_codec("int8", of), of.block_bytes)
    tier.put([Record(rid(0), block(of))])
    assert CodedTier(inner, make_codec("int4", of), of.block_bytes).lookup([rid(0)]) == [Missing()]
    before = make_codec("int8", of)
    before.stored_as = "int8"  # as it was called when its keys were not mixed
    assert CodedTier(inner, before, of.block_bytes).lookup([rid(0)]) == [Missing()]
    assert inner.lookup([rid(0)]) == [Missing()]
    [stored] = inner.scan()
    inner.put([Record(stored.id, bytes(7))])
    assert get(tier, 0, of.block_bytes)[0] == Corrupt("codec")
    assert tier.lookup([rid(0)]) == [Missing()]
    assert tier.stats()["corrupt_codec"] == 1
