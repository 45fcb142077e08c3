"""The connector without vLLM: both sides, real tiers, and a fake engine whose KV tells which tokens it is of."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagoda.integrations.vllm import settings as settings_module
from pagoda.integrations.vllm.settings import Settings, read_settings
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier
from pagoda.kv.tiers.records import RecordId
from pagoda.kv.tiers.spec import TierSpec
from tests.integrations.fake_vllm import SIZE, FakeRequest, FakeVllm, HoleyTier, Lent
from tests.waiting import until

PROMPT = list(range(100, 123))  # five whole blocks and three tokens
PATIENT = {"pagoda": {"wait_s": 30}}
Make = Callable[..., FakeVllm]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Engines over given tiers, or over specs; all are closed."""
    made: list[FakeVllm] = []

    def make(*tiers: Tier | str, num_workers: int = 1, fingerprint: bytes = bytes(32)) -> FakeVllm:
        specs = [tier for tier in tiers if isinstance(tier, str)]
        if specs:
            settings = read_settings({"tiers": specs}, {})
        else:
            ready = itertools.cycle(tiers)  # workers share them: each record has its shard
            monkeypatch.setattr(settings_module, "open_tier", lambda spec, key: next(ready))
            settings = Settings(tuple(TierSpec("fake", "", None) for _ in tiers), bytes(32))
        engine = FakeVllm(settings, num_workers, fingerprint)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def patient(tokens: list[int] = PROMPT, **more: object) -> FakeRequest:
    """A request that waits for tiers: how fast they are on a busy machine is not what is tested."""
    return FakeRequest(list(tokens), **{"kv_transfer_params": PATIENT, **more})  # type: ignore[arg-type]


def restored(told: dict[str, dict[str, object]] | None) -> object:
    assert told is not None
    return told["pagoda"]["num_restored_tokens"]


def test_a_prompt_comes_back_from_a_disk_after_a_restart(make: Make, tmp_path: Path) -> None:
    spec = f"disk:{tmp_path}:64MiB"
    first = make(spec)
    told = first.run(patient())
    assert told == {"pagoda": {
        "num_local_tokens": 0, "num_restored_tokens": 0, "restored_from": {}, "miss": "never_seen", "missed_at": 0,
    }}  # fmt: skip
    first.settle()
    assert restored(first.run(patient())) == 5 * SIZE
    first.close()

    told = make(spec).run(patient())
    assert told == {"pagoda": {
        "num_local_tokens": 0, "num_restored_tokens": 20, "restored_from": {"disk": 20}, "miss": "none",
    }}  # fmt: skip


def test_the_last_token_is_always_computed(make: Make) -> None:
    engine = make(MemoryTier(1 << 20))
    engine.run(patient(PROMPT[:20]))
    engine.settle()
    assert restored(engine.run(patient(PROMPT[:20]))) == 16
    assert restored(engine.run(patient(PROMPT[:21]))) == 20
    assert engine.scheduler.matched_tokens(FakeRequest(PROMPT[:4]), 0) == 0  # type: ignore[arg-type]


def test_what_a_request_generates_is_saved_once_its_tokens_are_known(make: Make) -> None:
    engine = make(MemoryTier(1 << 20))
    request = patient(PROMPT[:7])
    engine.admit(request)
    engine.tables[request.request_id] += [engine._free.pop() for _ in range(3)]
    engine.step({request.request_id: request}, {request.request_id: 7})
    for token in (7, 8, 9, 10, 11, 12):
        request.all_token_ids.append(token)
        engine.step({request.request_id: request}, {request.request_id: 1})
    engine.end(request)
    engine.settle()
    assert restored(engine.run(patient(request.all_token_ids))) == 12


def test_another_salt_namespace_model_or_picture_finds_nothing(make: Make) -> None:
    tier = MemoryTier(1 << 20)
    engine = make(tier)
    engine.run(patient())
    engine.settle()
    assert restored(engine.run(patient(cache_salt="other"))) == 0
    engine.scheduler._namespace = "tenant"
    assert restored(engine.run(patient())) == 0
    assert restored(make(Lent(tier), fingerprint=b"x" * 32).run(patient())) == 0


def test_nothing_from_before_a_reset_is_found_or_written_under_its_name(make: Make) -> None:
    tier = MemoryTier(1 << 20)
    engine = make(tier)
    engine.run(patient())
    running = patient(PROMPT[::-1])
    engine.admit(running)
    engine.scheduler.forget()
    engine.step({running.request_id: running}, {running.request_id: running.num_tokens})
    engine.end(running)
    engine.settle()
    assert tier.usage().num_records == 5
    assert restored(engine.run(patient())) == 0
    engine.settle()
    assert restored(engine.run(patient())) == 20


def test_a_prompt_of_embeddings_is_left_alone(make: Make) -> None:
    tier = MemoryTier(1 << 20)
    engine = make(tier)
    request = patient(prompt_embeds=object())
    assert engine.run(request) is None
    engine.settle()
    assert tier.usage().num_records == 0


def test_a_damaged_block_is_computed_and_saved_again(make: Make) -> None:
    faults, tier = Faults(), MemoryTier(1 << 20)
    engine = make(FaultyTier(tier, faults))
    engine.run(patient())
    engine.settle()
    faults.corrupting = 1.0
    told = engine.run(patient())  # checks every byte
    assert restored(told) == 0
    assert told is not None
    assert told["pagoda"]["miss"] == "restore_failed"
    faults.corrupting = 0.0
    until(lambda: engine.workers[0]._parts.hierarchy.is_available)
    engine.settle()
    assert restored(engine.run(patient())) == 20


def test_blocks_before_a_hole_are_used_and_the_rest_is_reported_as_failed(make: Make) -> None:
    tier = HoleyTier()
    engine = make(tier)
    engine.run(patient())
    engine.settle()
    tier.unreadable = {engine.scheduler._written.popitem()[0]}  # the last block
    told = engine.run(patient())
    assert restored(told) == 16
    assert told is not None
    assert told["pagoda"]["miss"] == "restore_failed"


def test_a_failed_load_is_not_asked_for_again_and_again(make: Make) -> None:
    tier = HoleyTier()
    engine = make(tier)
    engine.run(patient())
    engine.settle()
    tier.unreadable = set(engine.scheduler._written)
    tier.slow_s = 0.05  # so that the answer comes before the failure, or with it
    request = patient()
    assert engine.admit(request) == 0
    engine.end(request)


def test_a_tier_that_hangs_costs_patience_only(make: Make) -> None:
    faults = Faults()
    engine = make(FaultyTier(MemoryTier(1 << 20), faults))
    engine.run(patient())
    engine.settle()
    faults.hang()
    try:
        told = engine.run(FakeRequest(list(PROMPT), kv_transfer_params={"pagoda": {"wait_s": 0.2}}))
        assert restored(told) == 0
        assert told is not None
        assert told["pagoda"]["miss"] == "restore_slower"
    finally:
        faults.running.set()


def test_several_workers_count_only_what_all_have(make: Make) -> None:
    tier = MemoryTier(1 << 20)
    engine = make(tier, num_workers=2)
    engine.run(patient())
    engine.settle()
    assert tier.usage().num_records == 10
    assert restored(engine.run(patient())) == 20
    third = list(engine.scheduler._written)[2]
    tier.delete([RecordId(third, shard=1)])
    told = engine.run(patient())
    assert restored(told) == 8
    assert told is not None
    assert told["pagoda"]["miss"] == "evicted"


def test_what_was_restored_and_is_gone_was_evicted_too(make: Make) -> None:
    tier = MemoryTier(1 << 20)
    first = make(tier)
    first.run(patient())
    first.settle()
    second = make(Lent(tier))  # restarted: it has written nothing itself
    assert restored(second.run(patient())) == 20
    for record in list(tier.scan()):
        tier.delete([record.id])
    told = second.run(patient())
    assert restored(told) == 0
    assert told is not None
    assert told["pagoda"]["miss"] == "evicted"


def test_what_a_slow_tier_gave_goes_to_the_faster_ones(make: Make) -> None:
    fast, slow = MemoryTier(1 << 20), MemoryTier(1 << 20)
    first = make(slow)
    first.run(patient())
    first.settle()
    second = make(fast, Lent(slow))
    assert restored(second.run(patient())) == 20
    second.settle()
    assert fast.usage().num_records == 5


def test_a_lease_keeps_the_whole_blocks_of_the_prompt(make: Make) -> None:
    tier = MemoryTier(1 << 20)
    engine = make(tier)
    engine.run(FakeRequest(list(PROMPT), kv_transfer_params={"pagoda": {"lease_s": 60}}))
    engine.settle()
    leases = [record.lease_until for record in tier.scan()]
    assert len(leases) == 5
    assert min(leases) > time.time() + 30


def test_what_has_priority_is_written_if_not_all_can_be(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(MemoryTier(1 << 20))
    low = FakeRequest(list(range(8)))
    high = FakeRequest(list(range(50, 58)), kv_transfer_params={"pagoda": {"priority": 80}})
    for request in (low, high):
        engine.admit(request)
    monkeypatch.setattr(engine.workers[0]._parts.hierarchy, "room", lambda *_: 2)
    engine.step({low.request_id: low, high.request_id: high}, {low.request_id: 8, high.request_id: 8})
    for request in (low, high):
        engine.end(request)
    engine.settle()
    assert restored(engine.run(patient([*high.all_token_ids, 1]))) == 8
    assert restored(engine.run(patient([*low.all_token_ids, 1]))) == 0


def test_a_request_may_keep_itself_out_of_the_tiers(make: Make) -> None:
    tier = MemoryTier(1 << 20)
    engine = make(tier)
    engine.run(FakeRequest(list(PROMPT), kv_transfer_params={"pagoda": {"store": False}}))
    engine.settle()
    assert tier.usage().num_records == 0
    engine.run(patient())
    engine.settle()
    few = {"pagoda": {"wait_s": 5, "max_restored_tokens": 9}}
    assert restored(engine.run(FakeRequest(list(PROMPT), kv_transfer_params=few))) == 8


@pytest.mark.parametrize(
    "own", [7, {"lease": 1}, {"store": 1}, {"wait_s": -1}, {"lease_s": float("inf")}, {"priority": 101}]
)
def test_wrong_params_are_told_and_harm_nothing(make: Make, own: object) -> None:
    engine = make(MemoryTier(1 << 20))
    told = engine.run(FakeRequest(list(PROMPT), kv_transfer_params={"pagoda": own}))
    assert told is not None
    assert "error" in told["pagoda"]


def test_a_request_that_leaves_while_it_loads_is_finished_once(make: Make) -> None:
    faults = Faults()
    engine = make(FaultyTier(MemoryTier(1 << 20), faults))
    engine.run(patient())
    engine.settle()
    request = patient()
    while (matched := engine.scheduler.matched_tokens(request, 0)) is None:  # type: ignore[arg-type]
        engine.step({}, {})
    engine.scheduler.allocated(request, [1, 2, 3, 4, 5, 6], matched)  # type: ignore[arg-type]
    engine.scheduler.finished(request)  # type: ignore[arg-type]
    finished = [name for _ in range(5) for name in engine.step({}, {})]
    assert finished == [request.request_id]
    fetcher = engine.workers[0]._parts.hierarchy.fetcher
    until(lambda: fetcher._staged == 0)


def test_staging_memory_is_given_back_when_nobody_takes_the_blocks(make: Make) -> None:
    engine = make(MemoryTier(1 << 20))
    engine.run(patient())
    engine.settle()
    request = patient()
    while engine.scheduler.matched_tokens(request, 0) is None:  # type: ignore[arg-type]
        engine.step({}, {})
    engine.scheduler.finished(request)  # type: ignore[arg-type]
    engine.step({}, {})
    until(lambda: engine.workers[0]._parts.hierarchy.fetcher._staged == 0)


def test_a_load_that_computing_beats_is_given_up(make: Make) -> None:
    faults = Faults()
    engine = make(FaultyTier(MemoryTier(1 << 20), faults))
    engine.run(patient())
    engine.settle()
    engine.scheduler.s_per_token = 1e-5
    faults.hang()
    told = engine.run(FakeRequest(list(PROMPT)))
    assert restored(told) == 0
    assert told is not None
    assert told["pagoda"]["miss"] == "restore_slower"
    faults.running.set()


def test_what_is_there_and_came_too_late_is_told_as_slower(make: Make) -> None:
    tier = HoleyTier()
    engine = make(tier)
    engine.run(patient())
    engine.settle()
    tier.slow_s = 0.5  # looking up is fast
    told = engine.run(FakeRequest(list(PROMPT), kv_transfer_params={"pagoda": {"wait_s": 0.2}}))
    assert restored(told) == 0
    assert told is not None
    assert told["pagoda"]["miss"] == "restore_slower"


def test_the_speed_of_computing_is_learned_from_steps(make: Make) -> None:
    engine = make(MemoryTier(1 << 20))
    now = [0.0]
    engine.scheduler._clock = lambda: now[0]
    before = engine.scheduler.s_per_token
    for seconds, tokens in ((1.0, 100), (5.0, 0), (1.0, 3)):
        orders = engine.scheduler.orders({"gone": tokens} if tokens else {}, lambda name: [])
        now[0] += seconds
        engine.workers[0].begin(orders)
        engine.workers[0].finish()
        engine.scheduler.update(engine.workers[0].take_replies())
    assert engine.scheduler.s_per_token == pytest.approx(before + 0.2 * (0.01 - before))


def test_what_is_counted_reaches_the_figures_once(make: Make) -> None:
    engine = make(MemoryTier(1 << 20))
    engine.run(patient())
    engine.settle()
    figures = engine.workers[0].take_figures()
    assert figures.counts["pagoda_tier_stored_records\tmemory\t0"] == 5
    assert engine.workers[0].take_figures().counts == {}
    assert engine.scheduler.take_figures().counts == {"pagoda_vllm_missed_tokens\tnever_seen": 20}
