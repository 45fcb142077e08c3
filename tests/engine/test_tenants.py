"""Tenants through the engine: who is admitted first, who is preempted, and what a guaranteed share is worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagoda.engine.core import EngineCore
from pagoda.engine.params import LeaseSpec, SamplingParams
from pagoda.engine.tenants import AGED_EVERY, PROMOTE_S, ServiceClass, Share, TenantSpec
from pagoda.errors import ConfigError
from pagoda.kv.keys import Scope
from tests.engine.fakes import VOCAB, make_core, random_load, run

CLASSES = {
    "now": TenantSpec(service_class=ServiceClass.INTERACTIVE),
    "later": TenantSpec(service_class=ServiceClass.BATCH),
}


def core_with(tenants: dict[str, TenantSpec], **options: Any) -> EngineCore:
    core, _ = make_core(**{"num_blocks": 40, "max_model_len": 64, "tenants": tenants} | options)
    return core


def add(core: EngineCore, name: str, tenant: str, num_tokens: int = 8, max_tokens: int = 2, first: int = 1) -> None:
    """A request whose prompt nobody else has."""
    prompt = [1 + (first * 13 + 7 * index * first) % (VOCAB - 1) for index in range(num_tokens)]
    core.add(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), scope=Scope(tenant))


def order_of_end(core: EngineCore) -> list[str]:
    ended = []
    while core.has_work:
        ended += [output.request_id for output in core.step() if output.finished]
        core.cache.check()
    return ended


def running(core: EngineCore) -> set[str]:
    return {sample.request.request_id for sample in core._scheduler.running}


def until_one_is_preempted(core: EngineCore) -> None:
    while not core._scheduler.num_preempted:
        assert core.has_work
        core.step()


def test_classes_are_admitted_in_order_and_equals_as_they_came() -> None:
    core = core_with(CLASSES, max_num_seqs=1, token_budget=16)
    for number, tenant in enumerate(["later", "nobody", "now", "later", "now"]):
        add(core, f"{tenant}{number}", tenant, first=number + 1)
    assert order_of_end(core) == ["now2", "now4", "nobody1", "later0", "later3"]


@pytest.mark.parametrize("queue_policy", ["fcfs", "priority", "lpm"])
def test_waiting_raises_the_class_so_that_nobody_starves(queue_policy: str) -> None:
    core = core_with(CLASSES, max_num_seqs=1, token_budget=16, queue_policy=queue_policy)
    add(core, "old", "later", first=9)
    core._requests["old"].arrived_at -= 2 * PROMOTE_S
    ended: list[str] = []
    for number in range(AGED_EVERY):
        add(core, f"new{number}", "now", first=number + 10)
    while len(ended) < AGED_EVERY:
        ended += [output.request_id for output in core.step() if output.finished]
    assert "old" in ended
    core.abort_all()


def test_those_who_waited_long_take_no_more_than_their_part_of_the_starts() -> None:
    core = core_with(CLASSES, max_num_seqs=1, token_budget=16)
    for number in range(30):
        add(core, f"later{number}", "later", first=number + 1)
        core._requests[f"later{number}"].arrived_at -= 3 * PROMOTE_S
    for number in range(21):
        add(core, f"now{number}", "now", first=number + 31)
    order = order_of_end(core)
    due = [f"later{number // AGED_EVERY}" for number in range(AGED_EVERY - 1, 24, AGED_EVERY)]
    assert [name for name in order[:24] if name.startswith("later")] == due
    assert order[AGED_EVERY - 1 : 24 : AGED_EVERY] == due
    assert order[24:] == [f"later{number}" for number in range(3, 30)]


def test_grouping_by_prefix_stays_within_the_shares() -> None:
    """Two tenants ask about four texts each, in turn; the pool keeps what runs and two or three of the texts."""
    computed, generated = {}, {}
    for policy in ("fcfs", "lpm"):
        tenants = {"a": TenantSpec(Share(weight=1)), "b": TenantSpec(Share(weight=1))}
        core, runner = make_core(
            num_blocks=64, max_model_len=64, max_num_seqs=4, tenants=tenants, queue_policy=policy, token_budget=64
        )
        rng = np.random.default_rng(5)
        texts = {name: [rng.integers(1, VOCAB, 40).tolist() for _ in range(4)] for name in tenants}
        for number in range(32):
            for name in tenants if number < 24 else ["a"]:  # a sends more
                prompt = [*texts[name][number % 4], 1 + number, 1 + number]
                params = SamplingParams(max_tokens=4, temperature=0.0)
                core.add(f"{name}{number}", prompt, params, scope=Scope(name))
        for request in core._requests.values():  # age counts against prefixes, and machines differ
            request.arrived_at = 0.0
        counts = {"a": 0, "b": 0}
        while {"a", "b"} <= core._scheduler.num_queued.keys():
            for output in core.step():
                counts[output.request_id[0]] += len(output.deltas[0].token_ids)
        run(core)
        computed[policy], generated[policy] = runner.num_computed, counts["a"] / counts["b"]
    assert computed["lpm"] < 0.7 * computed["fcfs"]
    assert generated["lpm"] == pytest.approx(1.0, rel=0.15)


def test_the_lowest_class_is_preempted_first() -> None:
    core = core_with(CLASSES, num_blocks=20, max_model_len=60)
    add(core, "batch", "later", num_tokens=16, max_tokens=40, first=3)
    add(core, "chat", "now", num_tokens=16, max_tokens=40, first=5)
    until_one_is_preempted(core)
    assert running(core) == {"chat"}
    run(core)


def test_a_request_within_its_share_passes_one_that_waits_for_room() -> None:
    core = core_with({"a": TenantSpec(Share(0.4))}, num_blocks=40, max_model_len=96)
    add(core, "b1", "b", num_tokens=80, max_tokens=8, first=3)
    for _ in range(4):
        core.step()
    add(core, "b2", "b", num_tokens=80, max_tokens=8, first=5)
    add(core, "b3", "b", num_tokens=8, max_tokens=8, first=6)
    add(core, "a1", "a", num_tokens=40, max_tokens=8, first=7)
    core.step()
    assert running(core) == {"b1", "a1"}  # b3 is small, and must not pass b2
    run(core)


def test_without_a_share_nobody_passes() -> None:
    core = core_with({}, num_blocks=40, max_model_len=96)
    add(core, "b1", "b", num_tokens=80, max_tokens=8, first=3)
    for _ in range(4):
        core.step()
    add(core, "b2", "b", num_tokens=80, max_tokens=8, first=5)
    add(core, "a1", "a", num_tokens=40, max_tokens=8, first=7)
    core.step()
    assert running(core) == {"b1"}
    run(core)


def test_whoever_is_over_its_share_is_preempted_for_one_within_its_own() -> None:
    core = core_with({"a": TenantSpec(Share(0.5))}, num_blocks=32, max_model_len=64)
    add(core, "b1", "b", num_tokens=24, max_tokens=24, first=3)
    add(core, "b2", "b", num_tokens=24, max_tokens=24, first=4)
    for _ in range(4):
        core.step()
    add(core, "a", "a", num_tokens=40, max_tokens=24, first=5)  # the newest, which would go first otherwise
    until_one_is_preempted(core)
    assert running(core) == {"a", "b1"}
    run(core)


def test_a_share_is_kept_while_others_flood() -> None:
    core = core_with({"a": TenantSpec(Share(0.4))}, num_blocks=40)
    add(core, "a", "a", num_tokens=40)
    run(core)
    for number in range(30):
        add(core, f"b{number}", "b", num_tokens=30, first=number + 2)
        run(core)
    add(core, "again", "a", num_tokens=40)
    while core.has_work:
        last = core.step()
    assert last[0].usage.num_hit_tokens == 39
    assert core.cache.tenants.of("a").num_evicted_blocks == 0


def test_shares_that_leave_no_room_for_one_context_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="30 of 40 KV blocks"):
        core_with({"a": TenantSpec(Share(0.75))})


def test_a_lease_budget_is_the_tenants_own() -> None:
    core = core_with({})
    block_bytes = core.cache.layout.block_bytes
    core = core_with({"a": TenantSpec(lease_bytes=3 * block_bytes + 1), "b": TenantSpec(lease_bytes=0)})
    prompt = list(range(1, 25))
    refusals = (
        ("a", "4 more KV blocks are needed, and 0 of the tenant's 3"),
        ("b", "0 of the tenant's 0"),
        ("c", None),
    )
    for tenant, refused in refusals:
        params = SamplingParams(max_tokens=2, temperature=0.0)
        core.add(tenant, prompt, params, scope=Scope(tenant), leases=[LeaseSpec(16, 60)])
        while core.has_work:
            last = core.step()
        told = last[0].leases[0].refused
        assert told is refused or (refused is not None and told is not None and refused in told)


def test_what_is_guaranteed_bounds_what_others_lease() -> None:
    core = core_with({"a": TenantSpec(Share(0.5))}, num_blocks=40, max_model_len=60, lease_share=1.0)
    assert core.cache.retention.limit_blocks == 25
    assert core.cache.retention.unguaranteed_limit_blocks == 5


SHARES = {"a": TenantSpec(Share(0.3, 2.0), ServiceClass.INTERACTIVE), "b": TenantSpec(Share(0.2))}


@pytest.mark.parametrize("windows", [(None,), (None, 12), (9,)])
def test_random_load_of_several_tenants(windows: tuple[int | None, ...]) -> None:
    core, _ = make_core(
        num_blocks=60 * len(windows), windows=windows, max_model_len=100, tenants=SHARES, token_budget=24
    )
    random_load(
        core,
        np.random.default_rng(5),
        num_steps=250,
        arrivals=0.5,
        max_tokens=25,
        scopes=[Scope("a"), Scope("b"), Scope("c"), Scope("a", "salt")],
    )
    assert core.cache.num_held_blocks == 0
    assert core.cache.stats.num_evicted_blocks > 0
