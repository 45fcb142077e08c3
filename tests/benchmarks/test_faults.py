"""Every real tier with every fault, in mid-run and under load: no wrong output, no stuck request, no leaked block.

The engine is real; its model is a fake whose output depends on the KV that it finds through the block tables.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from benchmarks.faults import PLACES, Load, cases, run
from pagoda.engine.params import SamplingParams
from pagoda.engine.prefill_speed import PrefillSpeed
from pagoda.kv.hierarchy import WritePolicy
from pagoda.kv.tiers.fake import MemoryTier
from tests.engine.fakes import VOCAB, expected_output, make_core
from tests.waiting import PATIENCE_S

SECONDS_PER_TOKEN = 0.01  # what the scheduler believes: slow enough for every tier to be asked
LOAD = Load(
    {f"{turn}-{i}": np.random.default_rng(i).integers(1, VOCAB, 60).tolist() for turn in range(2) for i in range(8)},
    SamplingParams(max_tokens=5, temperature=0.0),
    deadline_s=PATIENCE_S,
)


@pytest.mark.parametrize(("place", "fault"), list(cases()))
def test_a_tier_that_goes_bad_costs_hits_only(place: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "object":
        pytest.importorskip("obstore")
    tiered, _ = make_core(num_blocks=64, tiers=[(MemoryTier(1 << 10), WritePolicy.BACK)])
    speed = PrefillSpeed(100.0 if fault == "none" else SECONDS_PER_TOKEN)  # a tier that is well is worth any wait
    monkeypatch.setattr(tiered._scheduler, "prefill_speed", speed)
    started = time.monotonic()
    outcome = run(tiered, LOAD, PLACES[place], fault, size=8 << 20, small=1 << 20)
    assert outcome.num_stuck == 0
    assert outcome.outputs == {name: expected_output(tokens, 5) for name, tokens in LOAD.requests.items()}
    assert max(outcome.latencies) < 9  # a call that hangs is given up after ten
    tiered.cache.check()
    assert tiered.cache.num_held_blocks == 0
    if fault == "none":
        assert outcome.num_restored_tokens > 100
    assert time.monotonic() - started < PATIENCE_S
