from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from .conftest import Live


async def scrape(live: Live) -> dict[str, float]:
    response = await live.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            samples[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return samples


async def test_counters_and_histograms_follow_requests(live: Live) -> None:
    before = await scrape(live)
    assert before["pagoda_requests_total{finish_reason=stop}"] == 0
    for _ in range(2):
        await live.http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 5})
    after = await scrape(live)
    assert after["pagoda_requests_total{finish_reason=length}"] == 2
    assert after["pagoda_prefix_query_tokens_total"] == 10
    assert after["pagoda_prefix_hit_tokens_total"] == 4
    assert after["pagoda_prompt_tokens_total"] == 10
    assert after["pagoda_generation_tokens_total"] == 10
    assert after["pagoda_preemptions_total"] == 10
    assert after["pagoda_evicted_blocks_total"] == 20
    assert after["pagoda_time_to_first_token_seconds_count{prefix=cold}"] == 1
    assert after["pagoda_time_to_first_token_seconds_count{prefix=warm}"] == 1
    sources = [
        after[f"pagoda_prompt_tokens_by_source_total{{source={each}}}"] for each in ("device", "tiers", "computed")
    ]
    assert sources == [3, 1, 6]
    assert after["pagoda_prefix_misses_total{reason=never_seen}"] == 1
    assert after["pagoda_prefix_missed_tokens_total{reason=never_seen}"] == 5
    assert after["pagoda_kv_block_lifetime_seconds_bucket{le=+Inf}"] == 3
    assert after["pagoda_kv_block_lifetime_seconds_sum"] == 5
    assert after["pagoda_time_per_output_token_seconds_count"] == 2
    assert after["pagoda_inter_token_latency_seconds_count"] == 8
    assert after["pagoda_inter_token_latency_seconds_bucket{le=0.01}"] == 8
    assert after["pagoda_e2e_request_latency_seconds_count"] == 2
    assert after["pagoda_request_queue_time_seconds_count"] == 2
    assert after["pagoda_step_time_seconds_count"] == 10


async def test_gauges_are_read_at_the_scrape(live: Live) -> None:
    idle = await scrape(live)
    assert idle["pagoda_kv_blocks{state=free}"] == 1000
    leases = "leased_blocks", "lease_limit_blocks", "leases", "leases_refused_total"
    assert [idle[f"pagoda_kv_{name}"] for name in leases] == [3, 500, 2, 1]
    assert [idle[f"pagoda_sparse_{name}"] for name in ("host_bytes", "fetched_bytes_total")] == [4096, 512]
    live.backend.held_back.clear()
    pending = asyncio.create_task(live.http.post("/v1/completions", json={"prompt": "x" * 20}))
    while not live.backend.live:
        await asyncio.sleep(0.005)
    busy = await scrape(live)
    assert busy["pagoda_requests_running"] == 1
    assert busy["pagoda_kv_blocks{state=held}"] == 2
    assert busy["pagoda_kv_usage_ratio"] == 0.002
    pending.cancel()
    await live.until_idle()
    again = await scrape(live)
    assert again["pagoda_kv_blocks{state=held}"] == 0
    assert again["pagoda_requests_total{finish_reason=abort}"] == 1


async def test_health_and_version(live: Live) -> None:
    health = await live.http.get("/health")
    assert health.status_code == 200
    assert health.json()["status"] == "ok"
    assert health.json()["model"] == "fake"
    assert (await live.http.get("/version")).json()["version"]
    live.backend.is_healthy = False
    dead = await live.http.get("/health")
    assert dead.status_code == 503
    assert dead.json()["status"] == "engine stopped"
