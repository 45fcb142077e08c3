"""Retention directives through the engine: what a request marks as worth keeping is what stays."""

from __future__ import annotations

import pytest

from pagoda.engine.core import EngineCore
from pagoda.engine.kv_retention import MAX_RANGES, Directive, KVRetention
from pagoda.engine.params import SamplingParams
from pagoda.errors import InvalidRequest
from tests.engine.fakes import expected_output, make_core, run

PROMPT = [1 + i % 60 for i in range(40)]


def ask(core: EngineCore, prompt: list[int], retention: KVRetention | None = None, max_tokens: int = 2) -> int:
    """Tokens hit."""
    core.add("r", prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, kv_retention=retention))
    while core.has_work:
        outputs = core.step()
        core.cache.check()
    return outputs[-1].usage.num_hit_tokens


def flood(core: EngineCore) -> None:
    for index in range(40):
        ask(core, [1 + (index * 7 + i * i) % 60 for i in range(20)])


def test_a_marked_prefix_survives_a_flood_and_the_rest_goes() -> None:
    core, _ = make_core(num_blocks=30, max_model_len=64)
    ask(core, PROMPT, KVRetention((Directive(0, 24, 90),)))
    flood(core)
    assert ask(core, PROMPT) == 24


def test_an_unmarked_one_does_not() -> None:
    core, _ = make_core(num_blocks=30, max_model_len=64)
    ask(core, PROMPT)
    flood(core)
    assert ask(core, PROMPT) < 8


def test_answers_nobody_will_ask_for_go_before_prompts() -> None:
    core, _ = make_core(num_blocks=30, max_model_len=64)
    ask(core, PROMPT[:16], KVRetention(decode_priority=0), max_tokens=24)
    turn = PROMPT[:16] + expected_output(PROMPT[:16], 24)
    other = [61, *PROMPT[:40]]
    ask(core, other)
    core.cache.evict(5)
    assert ask(core, other) == 40
    assert 16 <= ask(core, turn) < 24


def test_priorities_outlive_preemption() -> None:
    core, _ = make_core(num_blocks=24, max_model_len=80)
    retention = KVRetention((Directive(0, 16, 90),), decode_priority=20)
    for name, first in (("a", 1), ("b", 7)):
        prompt = [1 + (first * i) % 60 for i in range(20)]
        core.add(name, prompt, SamplingParams(max_tokens=40, temperature=0.0, kv_retention=retention))
    run(core)
    assert core._scheduler.num_preempted
    flood(core)
    for first in (1, 7):
        assert ask(core, [1 + (first * i) % 60 for i in range(20)]) >= 16


def test_what_is_said_of_the_prompt_ends_with_it() -> None:
    retention = KVRetention(
        (
            Directive(0, 10, 90),
            Directive(10, None, 50, 5.0),
        ),
        decode_priority=1,
    )
    assert retention.directives(20) == [Directive(0, 10, 90), Directive(10, 20, 50, 5.0), Directive(20, None, 1)]
    assert retention.directives(8) == [Directive(0, 8, 90), Directive(8, None, 1)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: KVRetention((Directive(0, 10, 90), Directive(9, 20, 10))),
        lambda: KVRetention((Directive(0, None, 90), Directive(9, 20, 10))),
        lambda: KVRetention(tuple(Directive(i, i + 1, 9) for i in range(MAX_RANGES + 1))),
        lambda: KVRetention(decode_duration_s=3.0),
        lambda: KVRetention(decode_priority=101),
    ],
)
def test_what_makes_no_sense_is_refused(make: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make()  # type: ignore[operator]
    assert refused.value.param == "kv_retention"
