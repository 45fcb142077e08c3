"""The last requests are remembered in bounded memory, and explained with what tiers did."""

from __future__ import annotations

import numpy as np
import pytest

from pagoda.engine import history
from pagoda.engine.core import EngineCore
from pagoda.engine.params import SamplingParams
from pagoda.kv.keys import Scope
from pagoda.kv.lease import TierUse
from pagoda.kv.observe import Explanation, MissReason
from pagoda.kv.tiers.fake import Faults
from tests.engine.fakes import make_core, run
from tests.engine.test_hedging import NUM_BLOCKS, faults, prompt, warm_core

__all__ = ["faults"]

ONE = SamplingParams(max_tokens=1, temperature=0.0)
PATIENT = TierUse(wait_s=float("inf"))


def ask(core: EngineCore, tokens: list[int], name: str = "r", use: TierUse = PATIENT) -> Explanation:
    core.add(name, tokens, SamplingParams(max_tokens=1, temperature=0.0, tier_use=use))
    run(core)
    explanation = core.history.explain(name, "")
    assert explanation is not None
    return explanation


def test_what_a_tier_gave_is_no_miss(faults: Faults) -> None:
    core, _, _ = warm_core(faults)
    told = ask(core, prompt(0))
    assert (told.reason, told.num_hit_tokens) == (MissReason.NONE, 0)
    assert told.restore is not None
    assert told.restore.num_restored_blocks == NUM_BLOCKS


def test_a_tier_that_cannot_give_what_it_has_is_the_reason(faults: Faults) -> None:
    core, _, _ = warm_core(faults)
    faults.corrupting = 1.0
    told = ask(core, prompt(0))
    assert told.reason == MissReason.RESTORE_FAILED
    assert told.restore is not None
    assert told.restore.num_failed_blocks > 0


def test_a_tier_that_is_slower_than_computing_is_the_reason(faults: Faults) -> None:
    core, _, _ = warm_core(faults)
    faults.delay_s = 0.3
    told = ask(core, prompt(0), use=TierUse())
    assert told.reason == MissReason.RESTORE_SLOWER


def test_what_no_tier_has_was_evicted_or_never_seen(faults: Faults) -> None:
    core, _, _ = warm_core(faults)
    told = ask(core, prompt(9))
    assert told.reason == MissReason.NEVER_SEEN
    assert told.restore is not None
    assert told.restore.num_found_blocks == 0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_TOKENS", 100)
    core, _ = make_core()
    for index in range(5):
        ask(core, list(range(1, 31)), f"r{index}")
    assert [core.history.find(f"r{index}") is not None for index in range(5)] == [False, False, True, True, True]
    ask(core, list(range(1, 31)), "r4")
    assert core.history._num_tokens == 90
    monkeypatch.setattr(history, "MAX_REQUESTS", 1)
    ask(core, [1, 2], "last")
    assert core.history.ids("") == ["last"]
    assert core.history._num_tokens == 2


def test_others_requests_are_not_explained_and_purged_ones_are_forgotten() -> None:
    core, _ = make_core()
    core.add("mine", list(range(1, 31)), ONE, scope=Scope("a"))
    run(core)
    assert core.history.explain("mine", "a") is not None
    assert core.history.explain("mine", "b") is None
    core.history.forget_prefix(np.arange(1, 9, dtype=np.int32), Scope("a", "salt"))
    assert core.history.find("mine") is not None
    core.history.forget_prefix(np.arange(1, 9, dtype=np.int32), Scope("a"))
    assert core.history.find("mine") is None
