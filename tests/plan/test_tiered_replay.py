from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagoda.cluster.routing import make_routing
from pagoda.errors import ConfigError
from pagoda.kv.eviction import LRU, POLICIES, make_policy
from pagoda.kv.keys import Scope
from pagoda.plan.catalog import shape_of
from pagoda.plan.fleet import Fleet
from pagoda.plan.footprint import Footprint
from pagoda.plan.hardware import find_hardware, parse_tier_plan
from pagoda.plan.replay import Replay
from pagoda.plan.simulated_tiers import SimulatedTier, SimulatedTiers
from pagoda.plan.study import Setup, bounds, find_tier, study, summarize
from pagoda.plan.tiered_replay import Quantiles, TieredReplay
from pagoda.plan.traces import TraceRequest
from pagoda.plan.work import Machine
from tests.kv.fakes import make
from tests.plan.test_replay import prefix_ids, request

SHAPE = shape_of("llama-3-8b")
MACHINE = Machine(SHAPE, find_hardware("h100"), 2)
FAST = 1e-6  # seconds per block: always worth loading


def dram(capacity: int | None, seconds: float = FAST, latency: float = 0.0) -> SimulatedTier:
    return SimulatedTier("dram", capacity, seconds, latency, write_through=False)


def disk(capacity: int | None, seconds: float = FAST, latency: float = 0.0) -> SimulatedTier:
    return SimulatedTier("disk", capacity, seconds, latency, write_through=True)


def random_trace(seed: int, count: int = 200, width: int = 4) -> list[TraceRequest]:
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, width, random.integers(1, 7)).tolist() for _ in range(count)]
    return [replace(one, time=float(second)) for second, one in enumerate(prefix_ids(prompts))]


# -- against the real cache --------------------------------------------------------------------------------------------


# Policies took equal blocks at the same place behind different ones for the same, and a first token of 0 for known.
@example([[0]] * 6 + [[1, 0, 0], [2, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0], [1]], 13, "reuse")
@example([[1], [1], [1], [0], [0], [1, 0, 0, 0], [0], [2], [0, 0, 0], [0], [1]], 8, "reuse")
@example([[0], [1, 0], [1, 0, 0], [0, 0], [0, 0, 0, 0], [0], [0], [0, 0, 0, 0]], 8, "s3fifo")
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=40),
    st.integers(8, 24),
    st.sampled_from(sorted(POLICIES)),
)
def test_hits_and_evictions_are_those_of_the_real_cache(prompts: list[list[int]], capacity: int, name: str) -> None:
    """Each prompt ends in a token of its own, as the cache always computes the last one; a block is one token."""
    prompts = [[*prompt, 1000 + number] for number, prompt in enumerate(prompts)]
    cache, _ = make(capacity, 1, policy=make_policy(name))
    hits = []
    for prompt in prompts:
        tokens = np.array(prompt, dtype=np.int32)
        lease = cache.acquire(tokens, Scope())
        hits.append(lease.num_computed_tokens)
        cache.reserve(lease, tokens.size - lease.num_computed_tokens)
        cache.advance(lease, tokens, tokens.size)
        cache.release(lease, tokens)
    replay = Replay(capacity, make_policy(name))
    counted = []
    for one in prefix_ids(prompts):
        before = replay.report.num_hit_blocks
        replay.serve(one)
        counted.append(replay.report.num_hit_blocks - before)
    assert counted == hits
    assert replay.report.num_evicted_blocks == cache.stats.num_evicted_blocks


# -- tiers -------------------------------------------------------------------------------------------------------------


def test_what_the_device_evicts_is_loaded_from_dram() -> None:
    replay = TieredReplay(2, LRU(), MACHINE, [dram(None)])
    replay.run([request(1, 2), request(3, 4), request(1, 2)])
    tier = replay.tiers.tiers[0]
    assert replay.report.num_hit_tokens == 0
    assert (tier.counts.num_hit_tokens, tier.counts.num_read, tier.counts.num_written) == (1024, 2, 4)
    assert replay.token_hit_rate == 1 / 3


def test_a_disk_has_what_was_computed_before_the_device_evicts_it() -> None:
    tier = disk(None)
    TieredReplay(8, LRU(), MACHINE, [tier]).run([request(1, 2)])
    assert len(tier) == 2
    assert tier.counts.num_written == 2


def test_the_fastest_tier_that_has_a_block_serves_it() -> None:
    replay = TieredReplay(2, LRU(), MACHINE, [dram(1), disk(None)])
    replay.run([request(1, 2), request(3, 4), request(1, 2)])
    in_dram, on_disk = replay.tiers.tiers
    assert (in_dram.counts.num_read, on_disk.counts.num_read) == (1, 1)  # the device evicts 2 before 1
    assert in_dram.counts.num_evicted == 3
    assert in_dram.counts.num_wasted == 2


def test_a_hole_ends_a_load() -> None:
    tier = dram(None)
    tier.put([1, 3])
    assert SimulatedTiers([tier]).load([1, 2, 3], 1.0, 1536) == (1, FAST)


def test_tokens_of_a_partial_last_block() -> None:
    tier = dram(None)
    tier.put([1, 2])
    SimulatedTiers([tier]).load([1, 2], 1.0, 600)
    assert tier.counts.num_hit_tokens == 600


@pytest.mark.parametrize(
    ("seconds", "latency", "loaded"),
    [
        (0.09, 0.0, 10),  # ten blocks in 0.9 s, computed in 1 s
        (0.11, 0.0, 0),
        (0.04, 0.02, 10),
        (0.04, 0.04, 0),  # 0.44 s in all, but the first half block, of patience for 0.05 s, takes 0.06 s
    ],
)
def test_loads_only_what_beats_computing(seconds: float, latency: float, loaded: int) -> None:
    tier = dram(None, seconds, latency)
    tier.put(list(range(10)))
    assert SimulatedTiers([tier]).load(list(range(10)), 1.0, 5120)[0] == loaded


def test_a_load_ends_before_a_tier_that_is_slower_than_computing() -> None:
    near, far = dram(None, 0.01), disk(None, 0.2)
    near.put([0, 1, 2])
    far.put([0, 1, 2, 3, 4])
    assert SimulatedTiers([near, far]).load([0, 1, 2, 3, 4], 0.5, 2560) == (3, pytest.approx(0.03))
    assert far.counts.num_read == 0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), max_size=30), st.integers(1, 6))
def test_a_tier_is_least_recently_used(puts: list[list[int]], capacity: int) -> None:
    tier = dram(capacity)
    model: OrderedDict[int, None] = OrderedDict()
    for blocks in puts:
        tier.put(blocks)
        for block in blocks:
            model[block] = None
            model.move_to_end(block)
        while len(model) > capacity:
            model.popitem(last=False)
        assert [block in tier for block in range(10)] == [block in model for block in range(10)]


def test_a_tier_below_never_hits_less_and_never_takes_longer() -> None:
    trace = random_trace(1)
    alone, tiered = TieredReplay(6, LRU(), MACHINE), TieredReplay(6, LRU(), MACHINE, [dram(12), disk(40)])
    alone.run(trace)
    tiered.run(trace)
    assert tiered.report.num_hit_tokens == alone.report.num_hit_tokens  # what was restored enters as what is computed
    assert tiered.token_hit_rate > alone.token_hit_rate
    assert tiered.ttft.mean < alone.ttft.mean < alone.cold_ttft.mean
    assert tiered.ttft.at(0.95) <= tiered.cold_ttft.at(0.95)


def test_an_endless_tier_hits_all_that_was_seen() -> None:
    trace = random_trace(2)
    replay = TieredReplay(6, LRU(), MACHINE, [dram(None)])
    replay.run(trace)
    assert replay.token_hit_rate == pytest.approx(summarize(trace).best_hit_rate)


# -- time --------------------------------------------------------------------------------------------------------------


def test_ttft_is_load_and_prefill() -> None:
    replay = TieredReplay(4, LRU(), MACHINE, [dram(None, 1e-4)])
    replay.serve(request(1, 2, 3, 4))
    assert replay.last_ttft == MACHINE.prefill_s(2048)
    replay.serve(request(1, 2, 5, 6, time=1.0))
    assert replay.last_ttft == MACHINE.prefill_s(2048, 1024)
    replay.serve(request(1, 2, 3, 4, time=2.0))
    assert replay.last_ttft == pytest.approx(2e-4 + MACHINE.prefill_s(2048, 2047))  # the last token is computed


def test_requests_that_generate_hold_their_blocks() -> None:
    replay = TieredReplay(2, LRU(), MACHINE, seconds_per_output_token=1.0)
    replay.run([request(1, 2, output=10), request(3, 4, time=1.0)])
    assert replay.report.seconds_waited == pytest.approx(9 + MACHINE.prefill_s(1024))
    assert replay.ttft.at(1.0) == pytest.approx(9 + 2 * MACHINE.prefill_s(1024), rel=0.01)


def test_quantiles_are_right_to_a_percent() -> None:
    values = np.random.default_rng(0).lognormal(size=5000)
    quantiles = Quantiles()
    for value in values.tolist():
        quantiles.add(value)
    assert quantiles.mean == pytest.approx(values.mean())
    for share in (0.05, 0.5, 0.99):
        assert quantiles.at(share) == pytest.approx(np.quantile(values, share), rel=0.02)
    assert Quantiles().at(0.5) == Quantiles().mean == 0


# -- studies -----------------------------------------------------------------------------------------------------------

FOOTPRINT = Footprint(SHAPE)


def setup(*tiers: str) -> Setup:
    return Setup(MACHINE, FOOTPRINT, tuple(parse_tier_plan(tier, 50e9) for tier in tiers))


def test_a_summary_counts() -> None:
    summary = summarize([request(1, 2, output=3), request(1, 3, time=5.0)])
    assert (summary.num_requests, summary.num_tokens, summary.num_output_tokens) == (2, 2048, 3)
    assert (summary.num_blocks, summary.num_different, summary.block_tokens, summary.duration_s) == (4, 3, 512, 5.0)
    assert summary.best_hit_rate == 0.25
    assert summary.requests is not None
    assert summarize([request(1, 2)], keep=1).requests is None


def test_a_summary_of_very_many_blocks_is_an_estimate_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.plan.study._MAX_SAMPLE", 1000)
    trace = [request(*range(100 * n, 100 * n + 100)) for n in range(300)] * 2
    summary = summarize(trace)
    assert summary.num_different == pytest.approx(30_000, rel=0.2)
    assert summary.best_hit_rate == pytest.approx(0.5, rel=0.2)


@pytest.mark.parametrize("trace", [[], [request(1), replace(request(2), block_tokens=16, num_prompt_tokens=16)]])
def test_traces_without_blocks_or_of_several_sizes_are_refused(trace: list[TraceRequest]) -> None:
    with pytest.raises(ConfigError):
        summarize(trace)


def test_a_study_has_a_point_for_each_policy_and_size_between_nothing_and_the_bound() -> None:
    trace = random_trace(3)
    points = study(lambda: trace, setup(), [6, 12], ["lru", "reuse"], 512)
    assert [(point.policy, point.num_blocks) for point in points] == [
        ("lru", 6),
        ("lru", 12),
        ("reuse", 6),
        ("reuse", 12),
    ]
    most = {bound.num_blocks: bound.hit_rate for bound in bounds(summarize(trace), setup(), [6, 12])}
    assert all(0 < point.hit_rate <= most[point.num_blocks] for point in points)
    alone = Replay(6, LRU()).run(trace)
    assert points[0].hit_rate == alone.token_hit_rate
    assert points[0].places[0].waste == alone.waste


def test_bytes_moved_are_blocks_times_their_size() -> None:
    (point,) = study(lambda: [request(1, 2), request(3, 4), request(1, 2)], setup("dram:8GiB"), [2], ["lru"], 512)
    assert point.places[1].written_bytes == 4 * FOOTPRINT.cached_bytes(512)
    assert point.places[1].read_bytes == 2 * FOOTPRINT.cached_bytes(512)
    assert point.places[1].num_blocks == int(8 * 2**30 // FOOTPRINT.cached_bytes(512))


def test_the_bound_with_tiers_is_that_of_all_memory() -> None:
    summary = summarize(random_trace(4))
    (bound,) = bounds(summary, setup("dram:1GiB"), [6])
    more = int(2**30 // FOOTPRINT.cached_bytes(512))
    assert bound.hit_rate_with_tiers == bounds(summary, setup(), [6 + more])[0].hit_rate


def test_the_least_tier_that_hits_enough() -> None:
    trace = random_trace(5)
    summary = summarize(trace)
    target = 0.95 * summary.best_hit_rate
    answer = find_tier(lambda: trace, setup(), 6, "lru", summary, parse_tier_plan("dram:1TB", 50e9), target)
    assert answer.num_blocks is not None
    assert answer.point.hit_rate >= target

    def hit_rate(count: int) -> float:
        replay = TieredReplay(6, LRU(), MACHINE, [dram(count)])
        replay.run(trace)
        return replay.token_hit_rate

    assert hit_rate(answer.num_blocks) >= target
    assert hit_rate(answer.num_blocks - max(1, answer.num_blocks // 50) - 1) < target
    never = find_tier(lambda: trace, setup(), 6, "lru", summary, parse_tier_plan("dram:1TB", 50e9), 0.999)
    assert never.num_blocks is None


# -- several replicas --------------------------------------------------------------------------------------------------


def fleet(name: str, replicas: int, blocks: int) -> Fleet:
    caches = [TieredReplay(blocks, LRU(), MACHINE) for _ in range(replicas)]
    return Fleet(caches, make_routing(name, replicas), 1 / MACHINE.prefill_s(512) * 512)


def conversations(count: int, turns: int) -> list[TraceRequest]:
    """Each grows by two blocks a turn; turn by turn, far enough apart that nobody waits."""
    return [
        request(*range(1000 * talk, 1000 * talk + 2 * turn + 2), time=1000.0 * (turn * count + talk))
        for turn in range(turns)
        for talk in range(count)
    ]


def test_prefix_aware_routing_keeps_conversations_where_they_are() -> None:
    trace = conversations(5, 4)
    rates = {}
    for name in ("round-robin", "least-load", "prefix-aware"):
        simulated = fleet(name, 3, 100)
        for one in trace:
            simulated.serve(one)
        rates[name] = simulated.report().token_hit_rate
    assert rates["prefix-aware"] == summarize(trace).best_hit_rate
    assert rates["round-robin"] < rates["prefix-aware"]


def test_the_router_knows_what_replicas_evicted() -> None:
    simulated = fleet("prefix-aware", 2, 4)
    first = simulated.serve(request(1, 2, 3, 4))
    other = simulated.serve(request(5, 6, 7, 8, time=100.0))
    assert {first, other} == {0, 1}
    assert simulated.serve(request(1, 2, 3, 4, time=200.0)) == first
    for second in range(3, 7):  # new prompts push the first out, wherever they go
        simulated.serve(request(*range(100 * second, 100 * second + 4), time=100.0 * second))
    assert simulated._routing.index.depths([1, 2, 3, 4]).tolist() == [0, 0]  # type: ignore[attr-defined]


def test_a_queue_is_part_of_ttft_and_is_avoided() -> None:
    one_each = fleet("least-load", 2, 100)
    assert [one_each.serve(request(10 * n, 10 * n + 1)) for n in range(1, 4)] == [0, 1, 0]
    report = one_each.report()
    assert report.ttft.mean == pytest.approx(4 / 3 * MACHINE.prefill_s(1024))
    assert report.imbalance == pytest.approx(4 / 3)
    assert report.num_requests == 3
