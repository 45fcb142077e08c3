"""The redis tier's own promises: shared records, expiry, a full server, damage, a server that is gone."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

pytest.importorskip("redis", reason="the redis tier needs the extra 'redis'")

import redis

from pagoda.errors import TierUnavailable
from pagoda.kv.tiers.records import Corrupt, Failed, Found, Missing, Reason, Record, Rejected, Stored
from pagoda.kv.tiers.redis import RedisTier, policy_warning
from tests.kv.tiers.kit import KIB, Clock, get, record, redis_url, rid, start_redis


def open_tier(folder: Path, clock: Clock | None = None, **options: float) -> RedisTier:
    return RedisTier(redis_url(), prefix=f"{folder}:", clock=clock or Clock(), **options)


def test_two_clients_share_records_and_a_later_lease_stays(tmp_path: Path) -> None:
    clock = Clock()
    one, two = open_tier(tmp_path, clock), open_tier(tmp_path, clock)
    one.put([record(0, lease_until=clock.now + 60)])
    assert get(two, rid(0), 8 * KIB) == (Found(8 * KIB), record(0).data)
    two.put([record(0, lease_until=clock.now + 30)])
    assert [i.lease_until for i in one.scan()] == [clock.now + 60]


def test_records_expire_after_their_time_or_with_a_later_lease(tmp_path: Path) -> None:
    clock = Clock()
    tier, client = open_tier(tmp_path, clock, ttl_s=100.0), redis.Redis.from_url(redis_url())
    tier.put([record(0), record(1, lease_until=clock.now + 500)])
    expiries = [client.expiretime(f"{tmp_path}:".encode() + rid(n).to_bytes()) - clock.now for n in range(2)]
    assert expiries == [100, 500]
    tier.set_lease([rid(0)], clock.now + 900)
    assert client.expiretime(f"{tmp_path}:".encode() + rid(0).to_bytes()) - clock.now == 900


def test_the_servers_time_for_a_key_is_the_records(tmp_path: Path) -> None:
    clock = Clock()
    tier, client = open_tier(tmp_path, clock, ttl_s=100.0), redis.Redis.from_url(redis_url())

    def left(number: int) -> float:
        return client.expiretime(f"{tmp_path}:".encode() + rid(number).to_bytes()) - clock.now

    tier.put([record(0, expires_at=clock.now + 40), record(1, expires_at=clock.now + 40, lease_until=clock.now + 90)])
    assert [left(0), left(1)] == [40, 90]
    tier.set_lease([rid(0)], clock.now + 60)
    tier.set_lease([rid(1)], 0.0)
    assert [left(0), left(1)] == [60, 40]


def test_a_value_of_a_former_format_is_a_counted_miss(tmp_path: Path) -> None:
    tier, client = open_tier(tmp_path), redis.Redis.from_url(redis_url())
    client.set(f"{tmp_path}:".encode() + rid(0).to_bytes(), struct.pack("<dIQ", 0.0, 2, 77) + record(0).data)
    assert get(tier, rid(0))[0] == Missing()
    assert tier.lookup([rid(0)]) == [Missing()]
    assert list(tier.scan()) == []
    assert tier.stats()["other_format"] == 3
    assert tier.put([record(0)]) == [Stored(8 * KIB)]
    assert get(tier, rid(0), 8 * KIB) == (Found(8 * KIB), record(0).data)


def test_a_full_server_rejects(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    results = [tier.put([Record(rid(n), bytes(4 << 20))])[0] for n in range(20)]
    assert set(results) == {Stored(4 << 20), Rejected(Reason.FULL)}
    tier.delete([rid(n) for n in range(20)])
    assert tier.put([record(0)]) == [Stored(8 * KIB)]


@pytest.mark.parametrize(
    ("damage", "reason"), [("flip", "checksum"), ("owner", "head"), ("cut", "checksum"), ("stub", "head")]
)
def test_damage_is_a_counted_miss(tmp_path: Path, damage: str, reason: str) -> None:
    tier, client = open_tier(tmp_path), redis.Redis.from_url(redis_url())
    tier.put([record(0)])
    key = f"{tmp_path}:".encode() + rid(0).to_bytes()
    value = client.get(key)
    client.set(
        key,
        {
            "flip": value[:99] + bytes([value[99] ^ 1]) + value[100:],
            "owner": value[:30] + b"?" + value[31:],
            "cut": value[:-1],
            "stub": b"x",
        }[damage],
    )
    assert get(tier, rid(0))[0] == Corrupt(reason)
    assert tier.lookup([rid(0)]) == [Missing()]
    assert tier.stats()[f"corrupt_{reason}"] == 1


def test_a_server_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(TierUnavailable):
        RedisTier("redis://127.0.0.1:1/0", timeout_s=0.5)
    url, server = start_redis()
    tier = RedisTier(url, timeout_s=0.5)
    tier.put([record(0)])
    server.kill()
    server.wait()
    assert isinstance(tier.put([record(1)])[0], Failed)
    assert isinstance(get(tier, rid(0))[0], Failed)
    assert isinstance(tier.delete([rid(0)])[0], Failed)
    with pytest.raises(TierUnavailable):
        tier.lookup([rid(0)])


@pytest.mark.parametrize(
    ("memory", "word"),
    [
        ({"maxmemory": 64, "maxmemory_policy": "noeviction", "used_memory": 10}, "when it is full,"),
        ({"maxmemory": 64, "maxmemory_policy": "noeviction", "used_memory": 63}, "is full now"),
        ({"maxmemory": 0, "maxmemory_policy": "noeviction"}, "no maxmemory"),
        ({"maxmemory": 0, "maxmemory_policy": "allkeys-lru"}, "no maxmemory"),
        ({"maxmemory": 64, "maxmemory_policy": "allkeys-lru", "used_memory": 63}, ""),
        ({"maxmemory": 64, "maxmemory_policy": "volatile-ttl", "used_memory": 63}, ""),
        ({}, ""),
    ],
)
def test_what_is_wrong_with_a_servers_policy(memory: dict[str, int | str], word: str) -> None:
    warning = policy_warning(memory)
    assert word in warning
    assert bool(word) == bool(warning)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ((), "noeviction"),  # as the server is by default
        (("--maxmemory", "0"), "no maxmemory"),
        (("--maxmemory-policy", "allkeys-lru"), ""),
    ],
)
def test_a_servers_policy_is_told_at_start(
    options: tuple[str, ...], word: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, server = start_redis(*options)
    try:
        with RedisTier(url, prefix=f"{tmp_path}:") as tier:
            assert tier.put([record(0)]) == [Stored(8 * KIB)]
    finally:
        server.kill()
        server.wait()
    assert word in caplog.text
    assert bool(word) == bool(caplog.text)
