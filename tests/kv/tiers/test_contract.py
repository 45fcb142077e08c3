"""The contract of every tier: the same tests, whatever is behind the protocol."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pagoda.errors import TierUnavailable
from pagoda.kv.keys import NO_OWNER, OwnerTag
from pagoda.kv.tenants import Share
from pagoda.kv.tiers.accounts import Shares
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.records import (
    Deleted,
    Expired,
    Found,
    Missing,
    Reason,
    Record,
    RecordId,
    Rejected,
    Stored,
    Target,
)
from tests.kv.tiers.kit import KIB, MAKERS, Clock, Maker, get, payload, record, rid, tag

CAPACITY = 512 * KIB
A, B, C = tag("a"), tag("b"), tag("c")


@pytest.fixture(params=MAKERS, ids=lambda maker: maker.name)
def maker(request: pytest.FixtureRequest) -> Maker:
    return request.param


@pytest.fixture
def bounded(maker: Maker) -> None:
    if not maker.bounded:
        pytest.skip("its budget belongs to the service behind it")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tier(maker: Maker, clock: Clock, tmp_path: Path) -> Iterator[Tier]:
    with maker.open(CAPACITY, clock, tmp_path) as tier:
        yield tier


def test_what_is_put_is_found_with_its_bytes_and_nothing_more_is_written(tier: Tier) -> None:
    for number, size in enumerate((1, 100, 4095, 4096, 4097, 8192, 50_000)):
        stored = record(number, size)
        assert tier.put([stored]) == [Stored(size)]
        assert tier.lookup([stored.id]) == [Found(size)]
        result, data = get(tier, stored.id)
        assert result == Found(size)
        assert data == stored.data + bytes(64 * KIB - size)


def test_a_batch_answers_one_outcome_each_in_order(tier: Tier) -> None:
    assert tier.put([record(n) for n in range(5)]) == [Stored(8 * KIB)] * 5
    ids = [rid(3), rid(99), rid(0), rid(98), rid(4)]
    assert tier.lookup(ids) == [Found(8 * KIB), Missing(), Found(8 * KIB), Missing(), Found(8 * KIB)]
    buffers = [bytearray(8 * KIB) for _ in ids]
    results = tier.get_into([Target(id, buffer) for id, buffer in zip(ids, buffers, strict=True)])
    assert results == tier.lookup(ids)
    assert [bytes(b) for b in buffers[::2]] == [record(n).data for n in (3, 0, 4)]
    assert tier.delete(ids) == [Deleted(), Missing(), Deleted(), Missing(), Deleted()]
    assert tier.lookup([rid(n) for n in range(5)]) == [
        Missing(),
        Found(8 * KIB),
        Found(8 * KIB),
        Missing(),
        Missing(),
    ]


def test_empty_batches_do_nothing(tier: Tier) -> None:
    assert (tier.lookup([]), tier.put([]), tier.get_into([]), tier.delete([]), tier.set_lease([], 1.0)) == (
        [], [], [], [], [],
    )  # fmt: skip


def test_group_and_shard_are_part_of_the_name(tier: Tier) -> None:
    ids = [rid(1), rid(1, group=1), rid(1, shard=1), rid(1, group=65535, shard=65535)]
    tier.put([Record(id, payload(i, 4096)) for i, id in enumerate(ids)])
    for i, id in enumerate(ids):
        assert get(tier, id, 4096) == (Found(4096), payload(i, 4096))
    tier.delete(ids[:1])
    assert tier.lookup(ids) == [Missing()] + [Found(4096)] * 3


def test_a_put_replaces(tier: Tier) -> None:
    tier.put([record(1, 8 * KIB)])
    newer = record(1, 5000, version=1)
    assert tier.put([newer]) == [Stored(5000)]
    assert get(tier, newer.id, 5000) == (Found(5000), newer.data)
    usage = tier.usage()
    assert (usage.num_records, usage.payload_bytes) == (1, 5000)


def test_the_later_of_two_records_of_one_id_in_a_batch_stays(tier: Tier) -> None:
    older, newer = record(1, 8 * KIB), record(1, 5000, version=1)
    assert tier.put([older, newer]) == [Stored(8 * KIB), Stored(5000)]
    assert get(tier, newer.id, 5000) == (Found(5000), newer.data)


def test_a_buffer_too_small_is_rejected_and_the_record_stays(tier: Tier) -> None:
    tier.put([record(1)])
    assert get(tier, rid(1), 8 * KIB - 1)[0] == Rejected(Reason.BUFFER_TOO_SMALL)
    assert get(tier, rid(1), 8 * KIB) == (Found(8 * KIB), record(1).data)


def test_buffers_may_be_arrays_and_views(tier: Tier) -> None:
    source = np.arange(4096, dtype=np.float32)
    tier.put([Record(rid(1), source), Record(rid(2), memoryview(source)[1024:])])
    out = np.empty(4096, dtype=np.float32)
    assert tier.get_into([Target(rid(1), out)]) == [Found(16 * KIB)]
    np.testing.assert_array_equal(out, source)
    assert tier.get_into([Target(rid(2), memoryview(out)[100:])]) == [Found(12 * KIB)]
    np.testing.assert_array_equal(out[100 : 100 + 3072], source[1024:])


def test_misuse_is_a_type_error(tier: Tier) -> None:
    tier.put([record(1)])
    with pytest.raises(TypeError):
        tier.get_into([Target(rid(1), bytes(8 * KIB))])
    with pytest.raises(TypeError):
        tier.put([Record(rid(1), np.zeros((64, 64), dtype=np.uint8)[:, ::2])])
    assert get(tier, rid(1), 8 * KIB) == (Found(8 * KIB), record(1).data)


def test_stored_bytes_are_not_the_callers(tier: Tier) -> None:
    data = bytearray(record(1).data)
    tier.put([Record(rid(1), data)])
    data[:] = bytes(len(data))
    assert get(tier, rid(1), 8 * KIB)[1] == record(1).data


def test_usage_scan_and_stats_agree(tier: Tier, clock: Clock) -> None:
    sizes = {n: 1000 * (n + 1) for n in range(6)}
    tier.put([record(n, size, lease_until=clock.now + n) for n, size in sizes.items()])
    tier.delete([rid(0), rid(77)])
    get(tier, rid(1))
    get(tier, rid(88))
    usage = tier.usage()
    assert (usage.num_records, usage.payload_bytes) == (5, sum(sizes.values()) - 1000)
    assert usage.used_bytes >= usage.payload_bytes
    assert {(i.id, i.num_bytes, i.lease_until) for i in tier.scan()} == {
        (rid(n), size, clock.now + n) for n, size in sizes.items() if n
    }
    stats = tier.stats()
    assert (stats["stored"], stats["stored_bytes"], stats["deleted"]) == (6, sum(sizes.values()), 1)
    assert (stats["found"], stats["found_bytes"], stats["missing"]) == (1, 2000, 2)


@pytest.mark.usefixtures("bounded")
def test_a_record_larger_than_the_tier_is_rejected_for_good(tier: Tier) -> None:
    tier.put([record(1)])
    assert tier.put([record(2, CAPACITY + 1)]) == [Rejected(Reason.TOO_LARGE)]
    assert tier.stats()["rejected_too_large"] == 1
    assert tier.lookup([rid(1), rid(2)]) == [Found(8 * KIB), Missing()]


@pytest.mark.usefixtures("bounded")
def test_a_full_tier_drops_old_records_and_keeps_what_is_used(tier: Tier) -> None:
    for number in range(500):
        assert tier.put([record(number)]) == [Stored(8 * KIB)]
        assert tier.usage().used_bytes <= CAPACITY
        if number >= 10:
            assert get(tier, rid(5), 8 * KIB)[0] == Found(8 * KIB)
    present = [n for n in range(500) if tier.lookup([rid(n)]) == [Found(8 * KIB)]]
    assert 5 in present
    assert present[-1] == 499
    assert len(present) >= CAPACITY // (8 * KIB) // 4
    assert tier.stats()["evicted"] == 500 - len(present)


@pytest.mark.usefixtures("bounded")
def test_a_leased_record_is_never_dropped_and_room_comes_back_when_leases_end(tier: Tier, clock: Clock) -> None:
    kept: list[int] = []
    for number in range(500):
        (result,) = tier.put([record(number, lease_until=clock.now + 60)])
        assert result in (Stored(8 * KIB), Rejected(Reason.FULL))
        if result == Stored(8 * KIB):
            kept.append(number)
    assert 0 < len(kept) < 500
    for number in kept:
        assert get(tier, rid(number), 8 * KIB) == (Found(8 * KIB), record(number).data)
    clock.now += 61
    assert tier.put([record(1000)]) == [Stored(8 * KIB)]
    assert tier.usage().used_bytes <= CAPACITY


@pytest.mark.usefixtures("bounded")
def test_set_lease_protects_extends_and_ends(tier: Tier, clock: Clock) -> None:
    for number in range(3):
        tier.put([record(number)])
    assert tier.set_lease([rid(0), rid(1), rid(99)], clock.now + 60) == [Found(8 * KIB), Found(8 * KIB), Missing()]
    tier.set_lease([rid(1)], clock.now - 1)
    for number in range(100, 300):
        tier.put([record(number)])
    assert tier.lookup([rid(0), rid(1), rid(2)]) == [Found(8 * KIB), Missing(), Missing()]
    clock.now += 61
    tier.put([record(n) for n in range(300, 500)])
    assert tier.lookup([rid(0)]) == [Missing()]


def test_a_replaced_record_keeps_the_later_lease(tier: Tier, clock: Clock) -> None:
    tier.put([record(1, lease_until=clock.now + 60)])
    tier.put([record(1, version=1)])
    tier.put([record(2)])
    tier.put([record(2, version=1, lease_until=clock.now + 30)])
    assert {i.id: i.lease_until - clock.now for i in tier.scan()} == {rid(1): 60, rid(2): 30}


def test_deletion_ends_a_lease(tier: Tier, clock: Clock) -> None:
    tier.put([record(1, lease_until=clock.now + 60)])
    assert tier.delete([rid(1)]) == [Deleted()]
    assert tier.lookup([rid(1)]) == [Missing()]
    assert tier.usage().num_records == 0


def test_whose_a_record_is_and_when_it_expires_are_kept_with_it(maker: Maker, tmp_path: Path, clock: Clock) -> None:
    def owners(tier: Tier) -> dict[RecordId, tuple[OwnerTag, float]]:
        return {info.id: (info.owner, info.expires_at - clock.now) for info in tier.scan()}

    with maker.open(CAPACITY, clock, tmp_path) as tier:
        tier.put([record(0, owner=A, expires_at=clock.now + 60), record(1, owner=B, expires_at=clock.now + 90)])
        tier.put([record(1, version=1, owner=A, expires_at=clock.now + 30)])
        tier.set_lease([rid(0)], clock.now + 10)
        expected = {rid(0): (A, 60), rid(1): (A, 30)}
        assert owners(tier) == expected
        usage = tier.usage()
        assert usage.owners.keys() == {A}
        assert usage.payload_bytes <= usage.owners[A] <= usage.used_bytes
    if maker.lasting:
        with maker.open(CAPACITY, clock, tmp_path) as tier:
            assert owners(tier) == expected
            assert tier.usage() == usage


def test_a_record_is_a_counted_miss_from_its_expiry_on(tier: Tier, clock: Clock) -> None:
    tier.put([record(0, expires_at=clock.now + 60), record(1, expires_at=clock.now + 61), record(2)])
    clock.now += 60
    assert tier.lookup([rid(n) for n in range(3)]) == [Expired(), Found(8 * KIB), Found(8 * KIB)]
    assert get(tier, rid(0))[0] == Expired()
    assert get(tier, rid(1), 8 * KIB) == (Found(8 * KIB), record(1).data)
    assert tier.stats()["expired"] == 2
    assert tier.put([record(0, version=1, expires_at=clock.now + 60)]) == [Stored(8 * KIB)]
    assert get(tier, rid(0), 8 * KIB) == (Found(8 * KIB), record(0, version=1).data)


def test_a_lease_outlives_an_expiry(tier: Tier, clock: Clock) -> None:
    tier.put([record(0, expires_at=clock.now + 10, lease_until=clock.now + 30)])
    tier.put([record(1, expires_at=clock.now + 10)])
    assert tier.set_lease([rid(1)], clock.now + 60) == [Found(8 * KIB)]
    clock.now += 20
    for number in range(2):
        assert get(tier, rid(number), 8 * KIB) == (Found(8 * KIB), record(number).data)
    clock.now += 20
    assert tier.lookup([rid(0), rid(1)]) == [Expired(), Found(8 * KIB)]
    tier.set_lease([rid(1)], 0.0)
    assert isinstance(get(tier, rid(1))[0], Missing)


@pytest.mark.usefixtures("bounded")
def test_the_room_of_what_expired_is_used_again(tier: Tier, clock: Clock) -> None:
    number = 0
    while tier.put([record(number, expires_at=clock.now + 5)]) == [Stored(8 * KIB)] and not tier.stats().get("evicted"):
        number += 1
    clock.now += 6
    tier.put([record(n, lease_until=clock.now + 60) for n in range(1000, 1004)])
    assert tier.lookup([rid(n) for n in range(1000, 1004)]) == [Found(8 * KIB)] * 4
    assert tier.usage().used_bytes <= CAPACITY


def test_a_purge_takes_all_of_an_owner_leased_or_not_and_for_good(maker: Maker, tmp_path: Path, clock: Clock) -> None:
    with maker.open(CAPACITY, clock, tmp_path) as tier:
        tier.put([record(n, owner=A if n % 3 else B) for n in range(12)])
        tier.put([record(20, owner=A, lease_until=clock.now + 60), record(20, version=1, owner=A)])
        tier.put([record(21)])
        assert tier.purge(A) == 9
        assert tier.purge(A) == 0
        left = [rid(n) for n in (0, 3, 6, 9, 21)]
        assert tier.lookup(left) == [Found(8 * KIB)] * 5
        assert tier.lookup([rid(n) for n in (1, 2, 4, 5, 20)]) == [Missing()] * 5
        assert tier.usage().owners.keys() == {B, NO_OWNER}
        assert tier.usage().num_records == 5
        assert tier.stats()["purged"] == 9
        tier.put([record(1, version=1, owner=A)])
        assert get(tier, rid(1), 8 * KIB) == (Found(8 * KIB), record(1, version=1).data)
    if maker.lasting:
        with maker.open(CAPACITY, clock, tmp_path) as tier:
            assert {info.id for info in tier.scan()} == {*left, rid(1)}
            assert get(tier, rid(1), 8 * KIB)[1] == record(1, version=1).data


def shared_out(maker: Maker, clock: Clock, folder: Path, shares: Shares) -> Tier:
    if not maker.has_shares:
        pytest.skip("the service behind it decides what goes")
    return maker.open(CAPACITY, clock, folder, shares=shares)


def present(tier: Tier, numbers: range) -> list[int]:
    ids = [rid(n) for n in numbers]
    return [n for n, found in zip(numbers, tier.lookup(ids), strict=True) if isinstance(found, Found)]


def test_nobody_takes_what_is_guaranteed(maker: Maker, clock: Clock, tmp_path: Path) -> None:
    with shared_out(maker, clock, tmp_path, {A: Share(guaranteed=0.5)}) as tier:
        tier.put([record(n, owner=A) for n in range(12)])
        for number in range(100, 400):
            assert tier.put([record(number, owner=B if number % 2 else C)]) == [Stored(8 * KIB)]
        assert present(tier, range(12)) == list(range(12))
        for number in range(12, 400):  # more than its share: it gives way to itself
            tier.put([record(1000 + number, owner=A)])
        assert present(tier, range(1000, 1400))[-1] == 1399


def test_what_is_over_its_share_gives_way_down_to_it(maker: Maker, clock: Clock, tmp_path: Path) -> None:
    with shared_out(maker, clock, tmp_path, {A: Share(guaranteed=0.5)}) as tier:
        tier.put([record(n, owner=A) for n in range(200)])
        most = tier.usage().owners[A]
        for number in range(200, 600):
            assert tier.put([record(number, owner=B)]) == [Stored(8 * KIB)]
        owners = tier.usage().owners
        assert 0.6 * most <= owners[A] <= 0.9 * most  # the half it is guaranteed, and half of the rest
        assert owners[B] >= 0.1 * most
        assert tier.usage().used_bytes <= CAPACITY


def test_the_rest_is_shared_by_weight(maker: Maker, clock: Clock, tmp_path: Path) -> None:
    with shared_out(maker, clock, tmp_path, {A: Share(weight=3.0), B: Share(weight=1.0)}) as tier:
        for number in range(600):
            tier.put([record(number, owner=A if number % 2 else B)])
        owners = tier.usage().owners
        assert 1.7 <= owners[A] / owners[B] <= 4.5


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("seed", range(3))
def test_random_operations_keep_budget_leases_and_bytes(tier: Tier, clock: Clock, seed: int) -> None:
    """A model that knows the newest version and lease of each id; the tier may have dropped only what has no lease."""
    rng = random.Random(seed)
    model: dict[int, Record] = {}
    for _ in range(400):
        number = rng.randrange(60)
        match rng.choice("pppppgggdlt"):
            case "p":
                lease = clock.now + rng.choice([0, 0, 0, 5, 20])
                new = record(number, rng.randrange(1, 40_000), version=rng.randrange(1 << 20), lease_until=lease)
                (result,) = tier.put([new])
                if isinstance(result, Stored):
                    old = model.get(number)
                    kept = old.lease_until if old is not None and tier_has_lease(old, clock) else 0.0
                    model[number] = Record(new.id, new.data, max(new.lease_until, kept))
                else:
                    assert result == Rejected(Reason.FULL)
            case "g":
                check(tier, model, number, clock)
            case "d":
                (deleted,) = tier.delete([rid(number)])
                if number in model and model[number].lease_until > clock.now:
                    assert deleted == Deleted()
                model.pop(number, None)
            case "l":
                until = clock.now + rng.choice([0, 10])
                if tier.set_lease([rid(number)], until) != [Missing()]:
                    model[number] = Record(model[number].id, model[number].data, until)
            case "t":
                clock.now += rng.random() * 4
        usage = tier.usage()
        assert usage.payload_bytes <= usage.used_bytes <= CAPACITY
        infos = list(tier.scan())
        assert usage.payload_bytes == sum(i.num_bytes for i in infos)
        assert usage.num_records == len({i.id for i in infos}) == len(infos)
    for number in range(60):
        check(tier, model, number, clock)


def tier_has_lease(old: Record, clock: Clock) -> bool:
    return old.lease_until > clock.now


def check(tier: Tier, model: dict[int, Record], number: int, clock: Clock) -> None:
    result, data = get(tier, rid(number))
    expected = model.get(number)
    if isinstance(result, Found):
        assert expected is not None
        assert data[: result.num_bytes] == expected.data
    else:
        assert result == Missing()
        assert expected is None or expected.lease_until <= clock.now


def test_threads_never_see_a_mixed_or_foreign_payload(tier: Tier) -> None:
    """Writers replace, readers read and a third kind deletes the same few ids at once."""
    ids = [rid(n) for n in range(8)]
    size = 12_000
    failures: list[str] = []
    stop = threading.Event()

    def uniform(id: RecordId, version: int) -> Record:
        return Record(id, bytes([id.key[0], version % 256]) + bytes([version % 256]) * (size - 2))

    def write(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            batch = [uniform(rng.choice(ids), rng.randrange(256)) for _ in range(4)]
            failures.extend(str(r) for r in tier.put(batch) if not isinstance(r, Stored | Rejected))

    def read(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            id = rng.choice(ids)
            result, data = get(tier, id, size)
            if isinstance(result, Found):
                if data[0] != id.key[0] or len(set(data[1:])) != 1:
                    failures.append("mixed bytes")
            elif result != Missing():
                failures.append(str(result))

    def delete() -> None:
        rng = random.Random(9)
        while not stop.wait(0.002):
            tier.delete([rng.choice(ids)])

    readers = [threading.Thread(target=read, args=(i,)) for i in range(2)] + [threading.Thread(target=delete)]
    writers = [threading.Thread(target=write, args=(i,)) for i in range(2)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert failures == []
    infos = list(tier.scan())
    assert tier.usage().payload_bytes == sum(i.num_bytes for i in infos) == size * len(infos)


def test_a_closed_tier_says_so(tier: Tier) -> None:
    tier.put([record(1)])
    tier.close()
    tier.close()
    for call in (
        lambda: tier.lookup([rid(1)]),
        lambda: tier.put([record(1)]),
        lambda: get(tier, rid(1)),
        lambda: tier.delete([rid(1)]),
        lambda: tier.purge(A),
        lambda: tier.set_lease([rid(1)], 0.0),
        tier.usage,
        tier.scan,
    ):
        with pytest.raises(TierUnavailable, match="closed"):
            call()
    assert tier.stats()["stored"] == 1
