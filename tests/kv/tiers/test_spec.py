from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pagoda.errors import ConfigError
from pagoda.kv.sizes import parse_duration, parse_size
from pagoda.kv.tiers.dram import DramTier
from pagoda.kv.tiers.records import Found, Stored
from pagoda.kv.tiers.spec import TierSpec, open_tier, parse_tier
from tests.kv.tiers.kit import KIB, get, record, redis_url, rid


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("dram:8GiB", TierSpec("dram", "", 8 << 30)),
        ("shm:pool:4GiB", TierSpec("shm", "pool", 4 << 30)),
        ("disk:/path:100GiB", TierSpec("disk", "/path", 100 << 30)),
        ("disk:/odd:path:1.5TB", TierSpec("disk", "/odd:path", 1_500_000_000_000)),
        ("s3://bucket/prefix", TierSpec("object", "s3://bucket/prefix", None)),
        ("file:///folder", TierSpec("object", "file:///folder", None)),
        ("redis://host:6379/0", TierSpec("redis", "redis://host:6379/0", None)),
        ("disk:/path:1GiB?write=back", TierSpec("disk", "/path", 1 << 30, "back")),
        ("disk:/path:1GiB?write=back&codec=int8", TierSpec("disk", "/path", 1 << 30, "back", "int8")),
        ("dram:1GiB?codec=int8/int4", TierSpec("dram", "", 1 << 30, codec="int8/int4")),
        ("redis://host/0?protocol=3&codec=split", TierSpec("redis", "redis://host/0?protocol=3", None, "", "split")),
        ("s3://bucket/prefix?write=back", TierSpec("object", "s3://bucket/prefix", None, "back")),
        ("disk:/path:1GiB?ttl=7d&write=back", TierSpec("disk", "/path", 1 << 30, "back", ttl_s=7 * 86400.0)),
    ],
)
def test_what_parses(text: str, spec: TierSpec) -> None:
    assert parse_tier(text) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no kind"),
        ("ram:8GiB", "no kind known here: dram"),
        ("dram", "dram:SIZE"),
        ("dram:8:GiB", "dram:SIZE"),
        ("dram:-8GiB", "not a size"),
        ("disk:/path", "disk:FOLDER:SIZE"),
        ("disk::1GiB", "disk:FOLDER:SIZE"),
        ("disk:/path:lots", "'disk:/path:lots' has a wrong size: not a size: 'lots'"),
        ("shm:4GiB", "shm:NAME:SIZE"),
        ("s3://", "no bucket"),
        ("disk:/path:1GiB?write=", "what write is"),
        ("disk:/path:1GiB?codec=int8&codec=int4", "says it twice"),
        ("ftp://host/x", "scheme that is not known"),
        ("dram:1GiB?ttl=soon", "'dram:1GiB\\?ttl=soon' has a wrong ttl: not a duration: 'soon'"),
        ("dram:1GiB?ttl=0s", "not a duration"),
    ],
)
def test_what_does_not_parse_says_why(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_tier(text)


def test_sizes() -> None:
    assert [parse_size(t) for t in ("7 B", "1kb", "1KiB", "2.5MiB", "3gib")] == [
        7, 1000, 1024, 2_621_440, 3 << 30,
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["dram", "disk", "shm", "object", "redis"])
@pytest.mark.parametrize("key", [None, bytes(32)])
def test_a_tier_opened_from_its_line_works(kind: str, key: bytes | None, tmp_path: Path) -> None:
    if key is not None:
        pytest.importorskip("cryptography")
    if kind == "object":
        pytest.importorskip("obstore")
    line = {
        "dram": "dram:1MiB",
        "shm": f"shm:{tmp_path}/pool:1MiB",
        "disk": f"disk:{tmp_path}:8MiB",
        "object": f"file://{tmp_path}",
    }.get(kind) or redis_url()
    with open_tier(parse_tier(line), key=key) as tier:
        assert tier.put([record(4711)]) == [Stored(8 * KIB)]
        assert get(tier, rid(4711), 8 * KIB) == (Found(8 * KIB), record(4711).data)
        tier.delete([rid(4711)])


@pytest.mark.parametrize(
    ("line", "package", "module"),
    [("s3://b", "obstore", "object"), ("redis://h", "redis", "redis")],
)
def test_a_missing_extra_is_named(line: str, package: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"pagoda.kv.tiers.{module}", raising=False)
    with pytest.raises(ConfigError, match=rf"pip install 'pagoda-kv\[{module}\]'"):
        open_tier(parse_tier(line))


def test_encryption_without_its_package_closes_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pagoda.kv.tiers.encrypted", None)
    closed: list[str] = []
    monkeypatch.setattr(DramTier, "_close", lambda self: closed.append(self.name))
    with pytest.raises(ConfigError, match="cryptography"):
        open_tier(parse_tier("dram:1MiB"), key=bytes(32))
    assert closed == ["dram"]


def test_durations() -> None:
    assert [parse_duration(text) for text in ("90s", "1.5m", "12h", "7d")] == [90.0, 90.0, 43200.0, 604800.0]


def test_a_tier_knows_its_ttl_through_its_seal() -> None:
    assert open_tier(parse_tier("dram:1MiB")).ttl_s is None
    assert open_tier(parse_tier("dram:1MiB?ttl=1h"), key=bytes(16)).ttl_s == 3600.0
