"""Audits: honest tiers raise no alarm in either dtype; one that gives other KV in good order is found out."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagoda.engine.engine import Engine
from pagoda.engine.outputs import StepStats
from pagoda.engine.params import SamplingParams
from pagoda.engine.prefill_speed import PrefillSpeed
from pagoda.errors import ConfigError
from pagoda.kv.hierarchy import Hierarchy, WritePolicy
from pagoda.kv.tiered import TieredCache
from pagoda.kv.tiers.fake import MemoryTier
from pagoda.kv.tiers.records import GetResult, Target, writable
from tests.model import models, tokenizers_made_here
from tests.waiting import PATIENCE_S

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
WAIT = 1.0  # seconds a token: everything is restored


class LyingTier(MemoryTier):
    """Gives back the blocks that were asked for `lies` loads ago, or what it should."""

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.lies = 0
        self._before: list[np.ndarray] = []

    def _get_into(self, targets: Sequence[Target]) -> list[GetResult]:
        results = super()._get_into(targets)
        for target in targets:
            buffer = writable(target.buffer)
            self._before.append(buffer.copy())
            if self.lies:
                buffer[:] = self._before[-1 - self.lies]
        return results


class Watch:
    def __init__(self) -> None:
        self.num_audited = self.num_mismatches = 0

    def on_step(self, stats: StepStats) -> None:
        self.num_audited += stats.num_audited_blocks
        self.num_mismatches += stats.num_audit_mismatches

    def on_admitted(self, num_query_tokens: int, num_hit_tokens: int) -> None:
        pass

    def on_finished(self, stats: object) -> None:
        pass


@pytest.fixture(scope="module", params=["llama", "qwen2-mixed-windows"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizers_made_here.byte_level()
    sizes: dict[str, Any] = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 256}
    if request.param != "llama":
        sizes |= {"sliding_window": 32, "num_hidden_layers": 4, "max_window_layers": 2}
    made = models.save(models.build(request.param, **sizes), tmp_path_factory.mktemp(request.param))
    return tokenizers_made_here.save(tokenizer, made)


def make(folder: Path, tier: MemoryTier, dtype: str = "float32", audit: float = 1.0) -> tuple[Engine, Watch]:
    engine = Engine(
        str(folder), dtype=dtype, kv_memory="4MiB", block_size=8, tiers=["dram:1MiB"], audit=audit, progress=False
    )
    cache = engine.core.cache
    assert isinstance(cache, TieredCache)
    cache.hierarchy = Hierarchy(
        [(tier, WritePolicy.THROUGH)], block_bytes=cache.layout.block_bytes, num_groups=len(cache.layout.groups)
    )
    if engine.core._auditor is not None:
        engine.core._auditor._random = random.Random(3)
    watch = Watch()
    engine.core.observers.append(watch)
    return engine, watch


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, 90).tolist()


def ask(engine: Engine, seed: int) -> tuple[list[int], int]:
    engine.core._scheduler.prefill_speed = PrefillSpeed(WAIT)
    [out] = engine.generate([prompt(seed)], GREEDY)
    engine.core.cache.check()
    assert engine.core.cache.num_held_blocks == 0
    return list(out.completions[0].token_ids), out.usage.num_hit_tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_honest_tiers_raise_no_alarm(folder: Path, dtype: str) -> None:
    engine, watch = make(folder, MemoryTier(1 << 24), dtype)
    assert isinstance(engine.core.cache, TieredCache)
    for seed in range(3):
        ask(engine, seed)
    for _ in range(4):
        for seed in range(3):
            assert ask(engine, seed)[1] >= 88  # warm
        assert engine.core.cache.hierarchy.flush(PATIENCE_S)
        engine.core.cache.clear()
        for seed in range(3):
            assert ask(engine, seed)[1] == 88  # restored
    assert watch.num_audited == 24
    assert watch.num_mismatches == 0


def test_a_tier_that_gives_other_kv_in_good_order_is_found_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = LyingTier()
    honest, _ = make(folder, tier, audit=0.0)
    truth = ask(honest, 1)[0]
    ask(honest, 2)
    assert isinstance(honest.core.cache, TieredCache)
    assert honest.core.cache.hierarchy.flush(PATIENCE_S)
    engine, watch = make(folder, tier)
    assert isinstance(engine.core.cache, TieredCache)
    assert ask(engine, 2)[1] == 88
    assert watch.num_mismatches == 0
    tier.lies = 11 * len(engine.core.cache.layout.groups)
    with caplog.at_level(logging.ERROR):
        assert ask(engine, 1)[1] == 88
    assert watch.num_mismatches == 1
    [report] = engine.core.cache.hierarchy.reports()
    assert (report.condition, report.state, report.failures) == ("quarantined", "open", {"audit": 1})
    assert "memory tier" in caplog.text
    assert "key" in caplog.text
    assert ask(engine, 1) == (truth, 0)  # nothing of it is left, on the device or in the tier
    assert watch.num_mismatches == 1


def test_a_share_is_a_share() -> None:
    with pytest.raises(ConfigError, match="audit"):
        Engine("smollm2", audit=1.5, progress=False)
