"""What /metrics and /health say of tiers."""

from __future__ import annotations

from pagoda.engine.outputs import TierReport
from pagoda.kv.breaker import BreakerState
from pagoda.kv.tiers.records import Usage

from .conftest import Live
from .test_metrics import scrape

INFINITY = float("inf")


def report(name: str, state: BreakerState, usage: Usage | None, *, is_quarantined: bool = False) -> TierReport:
    return TierReport(
        name=name,
        state=state,
        is_quarantined=is_quarantined,
        usage=usage,
        num_stored=1,
        num_demoted=2,
        num_skipped=3,
        num_lost=4,
        num_loaded=5,
        num_slower=6,
        num_late=7,
        num_unused=8,
        num_expired=9,
        num_restored_tokens=80,
        num_prefetched_tokens=48,
        failures={"timeout": 7},
        load_seconds=((0.01, 2), (0.1, 0), (INFINITY, 1)),
        load_seconds_sum=2.5,
    )


async def test_without_tiers_nothing_is_said(live: Live) -> None:
    assert not [name for name in await scrape(live) if name.startswith(("pagoda_tier_", "pagoda_restored_"))]
    assert (await live.http.get("/health")).json()["tiers"] == []


async def test_each_tier_has_its_samples(live: Live) -> None:
    live.backend.tier_reports = [
        report("dram", BreakerState.CLOSED, Usage(1000, 500, 400, 10, {})),
        report("s3", BreakerState.OPEN, None),
    ]
    samples = await scrape(live)
    names = (
        "stored_records",
        "demoted_records",
        "skipped_records",
        "lost_records",
        "loaded_records",
        "slower_blocks",
        "late_blocks",
        "unused_blocks",
        "expired_records",
    )
    assert [samples[f"pagoda_tier_{name}_total{{tier=dram}}"] for name in names] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert samples["pagoda_tier_restored_tokens_total{tier=s3}"] == 80
    assert samples["pagoda_tier_prefetched_tokens_total{tier=s3}"] == 48
    assert samples["pagoda_restored_tokens_total"] == 160
    assert samples["pagoda_tier_failures_total{reason=timeout,tier=s3}"] == 7
    assert samples["pagoda_tier_bytes{tier=dram}"] == 500
    assert samples["pagoda_tier_capacity_bytes{tier=dram}"] == 1000
    assert samples["pagoda_tier_records{tier=dram}"] == 10
    assert "pagoda_tier_bytes{tier=s3}" not in samples
    states = [samples[f"pagoda_tier_state{{state={state},tier=s3}}"] for state in ("closed", "open", "half_open")]
    assert states == [0, 1, 0]
    buckets = [samples[f"pagoda_tier_load_seconds_bucket{{le={end},tier=dram}}"] for end in ("0.01", "0.1", "+Inf")]
    assert buckets == [2, 2, 3]
    assert samples["pagoda_tier_load_seconds_count{tier=dram}"] == 3
    assert samples["pagoda_tier_load_seconds_sum{tier=dram}"] == 2.5
    dram, s3 = (await live.http.get("/health")).json()["tiers"]
    assert dram == {
        "name": "dram",
        "state": "ok",
        "num_records": 10,
        "used_bytes": 500,
        "capacity_bytes": 1000,
    }
    assert (s3["state"], s3["num_records"]) == ("out", None)


async def test_health_says_how_a_tier_is_in_plain_words(live: Live) -> None:
    live.backend.tier_reports = [
        report("a", BreakerState.CLOSED, None),
        report("b", BreakerState.HALF_OPEN, None),
        report("c", BreakerState.OPEN, None),
        report("d", BreakerState.OPEN, None, is_quarantined=True),
    ]
    told = [tier["state"] for tier in (await live.http.get("/health")).json()["tiers"]]
    assert told == ["ok", "trying", "out", "quarantined"]
