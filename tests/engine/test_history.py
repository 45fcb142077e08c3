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
from tests.engine.fakes import make_core, run
from tests.engine.restores import NUM_BLOCKS, SimulatedTime, prompt, warm

ONE = SamplingParams(max_tokens=1, temperature=0.0)
PATIENT = TierUse(wait_s=float("inf"))


def ask(core: EngineCore, tokens: list[int], name: str = "r", use: TierUse = PATIENT) -> Explanation:
    core.add(name, tokens, SamplingParams(max_tokens=1, temperature=0.0, tier_use=use))
    run(core)
    explanation = core.history.explain(name, "")
    assert explanation is not None
    return explanation


def test_what_a_tier_gave_is_no_miss(time: SimulatedTime) -> None:
    made = warm(time)
    core = made.core
    told = ask(core, prompt(0))
    assert (told.reason, told.num_hit_tokens, told.missed_at) == (MissReason.NONE, 400, 400)
    assert told.before == tuple(prompt(0)[384:400])
    assert told.restore is not None
    assert told.restore.num_restored_blocks == NUM_BLOCKS


def test_whole_blocks_are_all_that_tiers_give(time: SimulatedTime) -> None:
    made = warm(time)
    core = made.core
    told = ask(core, prompt(0)[:399])
    assert (told.reason, told.num_hit_tokens, told.missed_at) == (MissReason.PARTIAL_BLOCK, 396, 396)
    assert (told.before, told.asked) == (tuple(prompt(0)[380:396]), tuple(prompt(0)[396:399]))


def test_the_first_miss_is_the_one_after_what_tiers_gave(time: SimulatedTime) -> None:
    made = warm(time)
    core = made.core
    ask(core, [*prompt(0)[:6], *prompt(7)[:99]])
    core.cache.evict(1000)
    ask(core, [*prompt(0)[:6], *prompt(8)[:99]], "device")
    tokens = [*prompt(0)[:200], *prompt(9)[:99]]
    told = ask(core, tokens, "later")
    assert (told.reason, told.num_hit_tokens, told.missed_at) == (MissReason.NEVER_SEEN, 200, 200)
    assert (told.before, told.asked) == (tuple(tokens[184:200]), tuple(tokens[200:216]))
    assert told.cached == ()
    # What was evicted from the device and is in no tier is told as that, also after a restore.
    core.cache.evict(1000)
    use = TierUse(wait_s=float("inf"), max_restored_tokens=100)
    told = ask(core, tokens, "last", use)
    assert (told.reason, told.missed_at) == (MissReason.EVICTED, 100)
    assert told.eviction is not None


def test_what_came_from_the_back_hits_after_the_first_miss(time: SimulatedTime) -> None:
    made = warm(time)
    core = made.core
    made.faults.delay_s = 0.03
    told = ask(core, prompt(0), use=TierUse())
    assert told.restore is not None
    assert told.num_hit_tokens == 4 * told.restore.num_restored_blocks
    assert told.missed_at <= told.num_hit_tokens
    assert told.asked == tuple(prompt(0)[told.missed_at : told.missed_at + 16])


def test_a_tier_that_cannot_give_what_it_has_is_the_reason(time: SimulatedTime) -> None:
    made = warm(time)
    core = made.core
    made.faults.corrupting = 1.0
    told = ask(core, prompt(0))
    assert told.reason == MissReason.RESTORE_FAILED
    assert told.restore is not None
    assert told.restore.num_failed_blocks > 0


def test_a_tier_that_is_slower_than_computing_is_the_reason(time: SimulatedTime) -> None:
    made = warm(time)
    core = made.core
    made.faults.delay_s = 0.3
    told = ask(core, prompt(0), use=TierUse())
    assert told.reason == MissReason.RESTORE_SLOWER


def test_what_no_tier_has_was_evicted_or_never_seen(time: SimulatedTime) -> None:
    made = warm(time)
    core = made.core
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
