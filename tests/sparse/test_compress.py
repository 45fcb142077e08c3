"""A running request is compressed because others need its room: `Sparsity.compress`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagoda import Engine, SamplingParams
from pagoda.engine.request import Sample
from pagoda.errors import InvalidRequest
from pagoda.kv.cache import KVCache
from pagoda.sparse.dropping import Dropping
from pagoda.sparse.spec import parse_kv_policy
from tests.sparse import masked
from tests.sparse.conftest import make_engine, text

POLICY = {"name": "streaming", "sinks": 4, "window": 36, "interval": 10}


def dropping(policy: dict[str, Any] = POLICY) -> Dropping:
    parsed = parse_kv_policy(policy)
    assert isinstance(parsed, Dropping)
    return parsed


def start(engine: Engine, prompt: list[int], count: int, policy: dict[str, Any] | None = None, **more: Any) -> None:
    wish = None if policy is None else parse_kv_policy(policy)
    engine.core.add(
        "r", prompt, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, kv_policy=wish, **more)
    )


def sample_of(engine: Engine) -> Sample:
    return engine.core._requests["r"].samples[0]


def steps(engine: Engine, until: int | None = None) -> list[int]:
    """Run to the end, or until so many tokens are computed; the output."""
    tokens: list[int] = []
    while engine.core.has_work:
        for output in engine.core.step():
            tokens += [token for delta in output.deltas for token in delta.token_ids]
        engine.core.cache.check()
        if until is not None and sample_of(engine).running_lease.num_computed_tokens >= until:
            break
    return tokens


def compress(engine: Engine, policy: dict[str, Any] = POLICY) -> int:
    sparsity = engine.core.sparsity
    assert sparsity is not None
    returned = sparsity.compress(sample_of(engine), dropping(policy))
    engine.core.cache.check()
    return returned


@pytest.mark.parametrize("kind", ["llama", "hybrid", "window_first"])
def test_a_full_request_goes_on_as_if_it_had_asked_for_it(kind: str, request: pytest.FixtureRequest) -> None:
    folder, reference = request.getfixturevalue(kind)
    engine, prompt = make_engine(folder), text(90, seed=4)
    start(engine, prompt, 60)
    output = steps(engine, until=120)
    held = engine.core.cache.num_held_blocks
    returned = compress(engine)
    assert returned > 0
    assert engine.core.cache.num_held_blocks == held - returned
    at = sample_of(engine).running_lease.num_computed_tokens
    output += steps(engine)
    assert output == masked.generate(reference, prompt, 60, masked.streaming(40, 10), first=at).tokens
    assert engine.core.cache.num_held_blocks == 0


def test_it_is_reported(llama: tuple[Path, Any]) -> None:
    engine = make_engine(llama[0])
    start(engine, text(90), 60)
    steps(engine, until=100)
    returned = compress(engine)
    [output] = [output for output in engine.core.step() if output.sparse is not None]
    assert output.sparse.policy == "streaming"
    assert output.sparse.num_returned_blocks == returned
    assert output.sparse.num_kept_tokens == 40


def test_a_policy_of_its_own_gets_the_smaller_budget(llama: tuple[Path, Any]) -> None:
    engine = make_engine(llama[0])
    start(engine, text(90), 60, {"name": "h2o", "budget": 80, "interval": 10})
    steps(engine, until=100)
    assert compress(engine) > 0
    sequence = sample_of(engine).sparse
    assert sequence is not None
    assert sequence.report.policy == "h2o"
    assert sequence.report.num_kept_tokens == 40
    assert compress(engine, {"name": "streaming", "budget": 70}) == 0
    assert steps(engine)
    assert sequence.report.num_kept_tokens == 40, "a larger budget never came back"


def test_the_exact_prefix_stays_for_others(llama: tuple[Path, Any]) -> None:
    engine, prompt = make_engine(llama[0]), text(90)
    start(engine, prompt, 60)
    steps(engine, until=100)
    compress(engine)
    steps(engine)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    [dense] = engine.generate([prompt], params)
    assert dense.usage.num_hit_tokens == 89


def test_a_preempted_one_starts_again_under_the_budget(llama: tuple[Path, Any]) -> None:
    engine = make_engine(llama[0])
    start(engine, text(90), 60)
    output = steps(engine, until=110)
    compress(engine)
    engine.core._scheduler.preempt_all()
    output += steps(engine)
    assert len(output) == 60
    assert engine.core.cache.num_held_blocks == 0


def test_who_cannot_be_compressed_stays_as_it_is(llama: tuple[Path, Any]) -> None:
    truth = make_engine(llama[0])
    start(truth, text(90), 20, n=2)
    expected = steps(truth)
    engine = make_engine(llama[0])
    start(engine, text(90), 20, n=2)
    output = steps(engine, until=48)
    assert compress(engine) == 0, "its prompt is computed"
    output += steps(engine, until=95)
    assert compress(engine) == 0, "its blocks are shared"
    assert output + steps(engine) == expected
    start(engine, text(30), 5)
    steps(engine, until=32)
    assert compress(engine) == 0, "it is small"
    assert sample_of(engine).sparse is None
    steps(engine)
    start(engine, text(90), 20, {"name": "quest", "budget": 56, "recent": 8, "block": 8})
    steps(engine, until=95)
    assert compress(engine) == 0, "its KV is in host memory"
    steps(engine)
    quantized = make_engine(llama[0], kv_format="int8")
    start(quantized, text(90), 20)
    steps(quantized, until=95)
    assert compress(quantized) == 0


def test_without_room_to_copy_nothing_changes(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    truth = make_engine(llama[0])
    start(truth, text(90), 60)
    expected = steps(truth)
    engine = make_engine(llama[0])
    start(engine, text(90), 60)
    output = steps(engine, until=100)
    cache: KVCache = engine.core.cache
    hoard = cache._allocate(cache.num_free_blocks, sample_of(engine).running_lease.scope)
    assert engine.core.sparsity is not None
    assert engine.core.sparsity.compress(sample_of(engine), dropping()) == 0
    cache._allocator.release(hoard)
    cache.check()
    assert sample_of(engine).sparse is None
    assert output + steps(engine) == expected


def test_a_policy_that_goes_by_attention_comes_too_late(llama: tuple[Path, Any]) -> None:
    engine = make_engine(llama[0])
    start(engine, text(90), 60)
    steps(engine, until=100)
    for late in ({"name": "h2o", "budget": 40}, {"name": "snapkv", "budget": 70}):
        with pytest.raises(InvalidRequest, match="takes streaming"):
            compress(engine, late)
