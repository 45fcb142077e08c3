"""Ten times more clients than there is room for, of all kinds, while a tier fails in every way: nothing breaks.

Eight seconds in the normal run; `PAGODA_SOAK_S=300` makes it longer, and a machine that is slow until there are
answers enough to judge by. Nothing is judged by the clock. With `-s` it prints what it met.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagoda.engine import process_memory
from pagoda.engine.aio import AsyncEngine
from pagoda.engine.engine import Engine
from pagoda.engine.params import SamplingParams
from pagoda.engine.pressure.config import ClassLimits, PressureConfig
from pagoda.engine.pressure.ladder import NEVER, LadderConfig, Level, Thresholds
from pagoda.engine.tenants import ServiceClass, Share, TenantSpec
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier
from pagoda.server.auth import ApiKeys
from tests.model import models, tokenizers_made_here
from tests.server.conftest import Live, run_server
from tests.waiting import eventually

from .crowd import Case, Crowd, Tally

SECONDS = float(os.environ.get("PAGODA_SOAK_S", "8"))
AT_ONCE = 12
GOLD_OVERTAKEN = 60  # most answers that others get while a gold request waits: some five times what runs at once
DUE, TOLERANCE = 2.0, 0.2  # tokens of tenant two for each of tenant one; how far that may be off, in logarithms
LENGTHS = (8, 24, 48)  # tokens of answers
SPREAD = sum(n * n for n in LENGTHS) * len(LENGTHS) / sum(LENGTHS) ** 2  # 1 + (deviation / mean) ** 2
ENOUGH = 20  # answers of each of the tenants that are compared
PATIENCE_S = 300.0  # how long nobody at all may get an answer
LONGEST_S = 600.0  # how long more than asked for it may take until there are answers enough
RSS_GROWTH = 96 << 20
LEASED = [5 + (7 * i) % 200 for i in range(64)]

TENANTS = {
    "gold": TenantSpec(service_class=ServiceClass.INTERACTIVE),
    "two": TenantSpec(Share(weight=2.0)),
    "one": TenantSpec(Share(weight=1.0)),
    "bulk": TenantSpec(service_class=ServiceClass.BATCH),
    "thrifty": TenantSpec(compress_under_pressure="streaming:budget=24,interval=8"),
}
PRESSURE = PressureConfig(
    # Some 0.7 of the pool is held, on any machine.
    LadderConfig(thresholds=Thresholds(pool=(0.5, 0.55, 0.6, 0.65, NEVER)), fall_s=0.5),
    longest_share=0.5,
    classes={
        # Few may wait, but as long as a slow machine takes: with an empty queue there were no shares to keep.
        ServiceClass.INTERACTIVE: ClassLimits(max_wait_s=30.0, max_waiting=16),
        ServiceClass.STANDARD: ClassLimits(max_wait_s=600.0, max_waiting=40),
        ServiceClass.BATCH: ClassLimits(max_wait_s=600.0, max_waiting=8),
    },
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizers_made_here.byte_level()
    model = models.build("llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=512)
    return tokenizers_made_here.save(tokenizer, models.save(model, tmp_path_factory.mktemp("tiny")))


def make_cases(folder: Path) -> list[Case]:
    """Prompts that share prefixes in six families, each with the answer it gets alone, in a cold cache."""
    rng = random.Random(5)
    engine = Engine(str(folder), dtype="float32", kv_memory="4MiB", max_num_seqs=1, progress=False)
    families = [[rng.randrange(5, 300) for _ in range(48)] for _ in range(6)]
    cases = []
    for index in range(36):
        prompt = families[index % 6][: rng.choice([16, 33, 48])] + [
            rng.randrange(5, 300) for _ in range(rng.choice([1, 9, 40]))
        ]
        count = rng.choice(LENGTHS)
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        engine.core.cache.clear()
        [alone] = engine.generate([prompt], params)
        cases.append(
            Case({"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}, alone.text, count)
        )
    engine.close()
    return cases


async def torment(faults: Faults, crowd: Crowd) -> None:
    """Let a tier fail in another way every half second, and be well in the end."""
    rng = random.Random(9)
    while not crowd.is_over:
        faults.running.set()
        faults.delay_s, faults.bytes_per_s = rng.choice([0.0, 0.0, 0.02]), rng.choice([float("inf"), 1e6])
        faults.failing, faults.corrupting = rng.choice([0.0, 0.3, 1.0]), rng.choice([0.0, 0.3])
        faults.unavailable = rng.random() < 0.15
        if rng.random() < 0.15:
            faults.hang()
        await asyncio.sleep(0.5)
    faults.delay_s = faults.failing = faults.corrupting = 0.0
    faults.unavailable = False
    faults.running.set()


async def watch(live: Live, readings: list[tuple[float, int, int, float]], crowd: Crowd) -> None:
    """Note time, level, resident bytes and the held share twice a second."""
    while not crowd.is_over:
        stats = live.backend.stats()
        assert stats.num_free_blocks + stats.num_held_blocks + stats.num_cached_blocks == stats.num_blocks
        held = stats.num_held_blocks / stats.num_blocks
        readings.append((time.monotonic(), int(stats.pressure.level), process_memory.rss_bytes(), held))
        await asyncio.sleep(0.5)


async def lease(live: Live) -> None:
    """Let tenant `two` have a lease that outlives all this."""
    body = {"prompt": LEASED, "max_tokens": 1, "prompt_cache_retention": "24h"}
    answer = await live.http.post("/v1/completions", json=body, headers={"x-api-key": "two"})
    assert answer.json()["pagoda"]["leases"][0]["leased_tokens"] == 64, answer.text


async def until_calm(live: Live) -> None:
    await eventually(lambda: not (live.backend.stats().pressure.level or live.backend.stats().num_running))


@pytest.mark.soak
async def test_ten_times_more_than_there_is_room_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = await asyncio.to_thread(make_cases, folder)
    faults = Faults()

    def faulty(*args: Any, **options: Any) -> Tier:
        return FaultyTier(MemoryTier(2 << 20), faults)

    monkeypatch.setattr("pagoda.engine.assembly.open_tier", faulty)
    engine = Engine(
        str(folder),
        dtype="float32",
        kv_memory="420KiB",
        max_num_seqs=AT_ONCE,
        token_budget=64,
        lease_share=0.2,
        tenants=TENANTS,
        pressure=PRESSURE,
        tiers=["dram:2MiB"],
        progress=False,
    )
    options = {
        "api_keys": ApiKeys({name: name for name in TENANTS}, TENANTS),
        "served_model_names": ["tiny"],
        "max_body_bytes": 200_000,
        "drain_s": 5,
    }
    # A server closes connections that were idle for five seconds: one that closes as a request is sent is no fault.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
    async with (
        run_server(AsyncEngine(engine), **options) as live,
        httpx.AsyncClient(base_url=live.url, timeout=None, limits=limits) as http,
    ):
        await lease(live)
        started_at = time.monotonic()

        def is_enough(tally: Tally) -> bool:
            elapsed = time.monotonic() - started_at
            return elapsed >= SECONDS and (_can_be_judged(tally) or elapsed >= SECONDS + LONGEST_S)

        crowd = Crowd(http, cases, is_enough, seed=3)
        crowd.add(4, crowd.honest, "gold", pause_s=0.5)
        crowd.add(26, crowd.honest, "two")
        crowd.add(26, crowd.honest, "one")
        crowd.add(14, crowd.honest, "bulk")
        crowd.add(6, crowd.thrifty, "thrifty", pause_s=0.2)
        crowd.add(8, crowd.leaver, "thrifty", pause_s=0.1)  # not of those whose tokens are compared
        crowd.add(4, crowd.leaver, "gold", pause_s=0.5)
        crowd.add(3, crowd.vandal, "bulk", pause_s=0.2)
        readings: list[tuple[float, int, int, float]] = []
        background = [asyncio.create_task(each) for each in (torment(faults, crowd), watch(live, readings, crowd))]
        await crowd.until_gone(PATIENCE_S)
        await asyncio.gather(*background)
        await until_calm(live)
        report = live.backend.stats().pressure
        _print(crowd.tally, readings, report, engine)

        assert crowd.tally.faults == []
        assert live.backend.is_healthy
        _check_tally(crowd.tally)
        assert report.entered[Level.HOLD] >= 1
        assert sum(report.refused.values()) > 0
        assert report.num_compressed >= crowd.tally.compressed
        await live.backend.manage(lambda admin: admin._cache.check())
        stats = live.backend.stats()
        assert stats.num_held_blocks == stats.num_leased_blocks == 4
        body = {"prompt": [*LEASED, 9], "max_tokens": 1}
        kept = (await live.http.post("/v1/completions", json=body, headers={"x-api-key": "two"})).json()
        assert kept["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
        third = max(1, len(readings) // 3)
        grown = max(rss for _, _, rss, _ in readings[-third:]) - max(rss for _, _, rss, _ in readings[:third])
        assert grown < RSS_GROWTH


def _can_be_judged(tally: Tally) -> bool:
    """Whether there was enough of all that is looked at; on a machine that is not starved, long before the end."""
    enough = min(tally.answered[name] for name in ("gold", "two", "one")) >= ENOUGH
    enough = enough and len(tally.overtaken["gold"]) > 0 and min(tally.left, tally.nonsense.total()) > 10
    if SECONDS >= 150:  # batch is promoted after half a minute a class
        enough = enough and tally.answered["bulk"] > 0 and tally.compressed > 0
    return enough


def _check_tally(tally: Tally) -> None:
    assert _can_be_judged(tally)
    assert max(tally.overtaken["gold"]) < GOLD_OVERTAKEN
    # The sums are of so many answers each, whose lengths spread: what chance alone does to their ratio gets smaller
    # with more of them (test_relief.py has the exact rule).
    spread = math.sqrt(SPREAD * (1 / tally.answered["two"] + 1 / tally.answered["one"]))
    ratio = tally.tokens["two"] / tally.tokens["one"]
    assert abs(math.log(ratio / DUE)) < TOLERANCE + 2.5 * spread, f"{ratio:.2f} for {DUE}"


def _print(tally: Tally, readings: list[tuple[float, int, int, float]], report: Any, engine: Engine) -> None:
    for name in TENANTS:
        waits = sorted(tally.ttft_s[name]) or [0.0]
        print(
            f"\n{name:5} {tally.answered[name]:6} answers {tally.tokens[name]:7} tokens, first token "
            "after "
            f"{waits[len(waits) // 2]:.2f} s, 99% {waits[int(0.99 * (len(waits) - 1))]:.2f}, at most {waits[-1]:.2f}; "
            f"answers meanwhile at most {max(tally.overtaken[name], default=0)}",
            end="",
        )
    seconds = {int(level): round(each, 1) for level, each in report.seconds.items()}
    print(f"\nrefused {dict(tally.refused)}, left {tally.left}, nonsense {dict(tally.nonsense)}")
    print(f"{report.num_compressed} contexts compressed, {tally.compressed} of them to their end")
    print(f"seconds by level {seconds}, held {sum(held for *_, held in readings) / len(readings):.0%} on average")
    scheduler, stats = engine.core._scheduler, engine.core.cache.stats
    print(
        f"{scheduler.num_preempted} preemptions, {scheduler.num_made_way} of them for a higher class; "
        f"{stats.num_evicted_blocks} evicted, {stats.num_restored_tokens} tokens restored; "
        f"resident {readings[0][2] >> 20} to {max(rss for _, _, rss, _ in readings) >> 20} MiB"
    )
