"""Leases through the engine: granted when computed, kept under load, refused with a reason, never in the way."""

from __future__ import annotations

from typing import Any

import pytest

from pagoda.engine.core import EngineCore
from pagoda.engine.outputs import LeaseOutcome
from pagoda.engine.params import LeaseSpec, SamplingParams
from pagoda.errors import InvalidRequest
from pagoda.kv.keys import Scope
from tests.engine.fakes import expected_output, make_core, run

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
PROMPT = [1 + i % 60 for i in range(40)]


def core_with(**options: Any) -> EngineCore:
    core, _ = make_core(**{"num_blocks": 40, "max_model_len": 64} | options)
    return core


def ask(core: EngineCore, prompt: list[int], *leases: LeaseSpec, tenant: str = "t") -> tuple[int, Any]:
    """Tokens hit, and what became of the leases."""
    core.add("r", prompt, GREEDY, scope=Scope(tenant), leases=leases)
    outputs = []
    while core.has_work:
        outputs += core.step()
        core.cache.check()
    last = outputs[-1]
    assert last.finished
    return last.usage.num_hit_tokens, last.leases


def flood(core: EngineCore) -> None:
    for index in range(30):
        ask(core, [1 + (index * 7 + i * i) % 60 for i in range(20)])


def test_a_granted_lease_hits_after_a_flood_and_what_follows_it_does_not() -> None:
    core = core_with()
    _, leases = ask(core, PROMPT, LeaseSpec(22, 300))
    assert leases == (LeaseOutcome(LeaseSpec(22, 300), 20, held_in="pool"),)
    flood(core)
    assert ask(core, PROMPT)[0] == 20


def test_refusal_reaches_the_output_and_the_answer_is_the_same() -> None:
    core = core_with(lease_share=0.1)
    core.add("r", PROMPT, GREEDY, leases=[LeaseSpec(40, 300), LeaseSpec(8, 300)])
    outputs = [output for _ in range(10) for output in core.step()]
    tokens = [token for output in outputs for delta in output.deltas for token in delta.token_ids]
    assert tokens == expected_output(PROMPT, 4)
    small, large = outputs[0].leases
    assert (small.num_tokens, small.refused) == (8, None)
    assert large.num_tokens == 0
    assert "8 more KV blocks are needed, and at most 4 may be leased: `--lease-share` gives leases 0.1" in large.refused


def test_a_refusal_says_what_bounds_leases_and_whether_there_may_be_room_later() -> None:
    core = core_with(max_model_len=120)  # 30 of 40 blocks for a full context
    _, (never,) = ask(core, [1 + (7 * i + 30) % 59 for i in range(48)], LeaseSpec(44, 300))
    assert never.refused == (
        "11 more KV blocks are needed, and at most 10 may be leased: a context of 120 tokens must fit beside leases, "
        "and needs 30 of the pool's 40 blocks; lower `--max-model-len` or raise `--kv-memory`"
    )
    ask(core, PROMPT, LeaseSpec(20, 300))
    _, (later,) = ask(core, [1 + (7 * i + 30) % 59 for i in range(48)], LeaseSpec(36, 300))
    assert "9 more KV blocks are needed beside the 5 that the tenant has leased" in later.refused
    assert "no room for them now: a context of 120 tokens" in later.refused
    core = core_with(max_model_len=160)
    _, (none,) = ask(core, PROMPT, LeaseSpec(20, 300))
    assert none.refused.startswith("no KV block may be leased: a context of 160 tokens")


def test_leases_leave_room_for_the_longest_request() -> None:
    core = core_with()
    assert core.cache.retention.limit_blocks == 20
    core = core_with(max_model_len=150)
    assert core.cache.retention.limit_blocks == 2
    for index in range(10):
        ask(core, [1 + (index + i) % 60 for i in range(10)], LeaseSpec(8, 1e6))
    assert core.cache.num_held_blocks == 2
    longest = [1 + (3 * i) % 61 for i in range(146)]
    core.add("long", longest, GREEDY)
    assert run(core)["long"][0].token_ids == expected_output(longest, 4)


def test_many_requests_run_in_what_leases_leave() -> None:
    core = core_with(num_blocks=60)
    ask(core, PROMPT, LeaseSpec(40, 1e6))
    prompts = {f"r{i}": [1 + (i * 13 + j * j) % 60 for j in range(30)] for i in range(12)}
    for name, prompt in prompts.items():
        core.add(name, prompt, GREEDY)
    done = run(core)
    assert {name: done[name][0].token_ids for name in prompts} == {
        name: expected_output(prompt, 4) for name, prompt in prompts.items()
    }
    assert core.cache.num_held_blocks == core.cache.retention.num_blocks == 10


def test_tenants_do_not_see_each_others_leases() -> None:
    core = core_with()
    ask(core, PROMPT, LeaseSpec(40, 300), tenant="a")
    assert ask(core, PROMPT, tenant="b")[0] == 0
    assert core.cache.retention.usage == {"a": 10}


def test_an_aborted_request_keeps_nothing() -> None:
    core = core_with(token_budget=16)
    core.add("r", PROMPT, GREEDY, leases=[LeaseSpec(40, 300)])
    core.step()
    core.abort("r")
    assert core.cache.num_held_blocks == 0
    assert not core.cache.retention.leases


def test_a_lease_beyond_the_prompt_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match="after the prompt"):
        core_with().add("r", PROMPT, GREEDY, leases=[LeaseSpec(41, 300)])
    with pytest.raises(InvalidRequest):
        LeaseSpec(4, 0)
