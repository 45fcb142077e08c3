"""kv_policy in the engine: blocks that come back, prefixes that stay shared, preemption, limits and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagoda import Engine, SamplingParams
from pagoda.engine.outputs import SparseReport, StepStats
from pagoda.engine.params import BeamSearch
from pagoda.errors import ConfigError, ContextTooLong, InvalidRequest
from pagoda.kv.keys import Scope
from pagoda.sparse.h2o import H2O
from pagoda.sparse.infinigen import InfiniGen
from pagoda.sparse.pyramid import Pyramid
from pagoda.sparse.snapkv import SnapKV
from pagoda.sparse.spec import Full, parse_kv_policy
from pagoda.sparse.streaming import Streaming
from tests.sparse.conftest import CONTEXT, make_engine, text

POLICIES = {
    "h2o": {"name": "h2o", "budget": 40, "interval": 10},
    "streaming": {"name": "streaming", "window": 36, "interval": 10},
    "snapkv": {"name": "snapkv", "budget": 40, "window": 16},
    "pyramid": {"name": "pyramid", "budget": 40, "window": 16},
}


def greedy(policy: dict[str, Any] | str | None, count: int = 20) -> SamplingParams:
    wish = None if policy is None else parse_kv_policy(policy)
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, kv_policy=wish)


def output(engine: Engine, prompt: list[int], policy: dict[str, Any] | str | None, count: int = 20) -> list[int]:
    [generation] = engine.generate([prompt], greedy(policy, count))
    engine.core.cache.check()
    return generation.completions[0].token_ids


class Steps:
    """An observer that adds up what steps tell."""

    def __init__(self) -> None:
        self.num_returned_blocks = 0
        self.returned_bytes = 0

    def on_step(self, stats: StepStats) -> None:
        self.num_returned_blocks += stats.num_returned_blocks
        self.returned_bytes += stats.returned_bytes

    def on_admitted(self, num_query_tokens: int, num_hit_tokens: int) -> None: ...

    def on_finished(self, stats: Any) -> None: ...


@pytest.mark.parametrize("name", POLICIES)
def test_blocks_come_back_and_are_reported(llama: tuple[Path, Any], name: str) -> None:
    engine = make_engine(llama[0])
    steps = Steps()
    engine.core.observers.append(steps)
    cache = engine.core.cache
    engine.core.add("r", text(120), greedy(POLICIES[name], 30))
    held: list[int] = []
    report: SparseReport | None = None
    while engine.core.has_work:
        for each in engine.core.step():
            report = each.sparse
        held.append(cache.num_held_blocks)
        cache.check()
    assert report is not None
    most = {"h2o": -(-50 // 8), "streaming": -(-50 // 8), "snapkv": -(-70 // 8), "pyramid": -(-(16 + 47 + 30) // 8)}
    assert max(held[:4]) == 15
    assert held[-2] <= most[name]
    assert report.num_returned_blocks == steps.num_returned_blocks >= 15 - most[name]
    assert report.returned_bytes == steps.returned_bytes == report.num_returned_blocks * cache.layout.pool_block_bytes
    assert report.num_kept_tokens + report.num_dropped_tokens >= 120
    assert cache.num_held_blocks == 0


@pytest.mark.parametrize("name", POLICIES)
def test_others_still_hit_the_exact_prefix(llama: tuple[Path, Any], name: str) -> None:
    prompt = text(120)
    truth = output(make_engine(llama[0]), prompt, None)
    engine = make_engine(llama[0])
    sparse = output(engine, prompt, POLICIES[name])
    assert sparse != truth, "or nothing is shown here"
    [dense] = engine.generate([prompt], greedy(None))
    assert dense.completions[0].token_ids == truth
    assert dense.usage.num_hit_tokens == 119
    # What the sparse request generated was computed from less: it is in nobody's cache.
    known = engine.core.cache.lookup(_tokens([*prompt, *sparse, 5]), Scope())
    assert known.num_tokens < 120 + 8


def _tokens(ids: list[int]) -> Any:
    from pagoda.kv.radix_node import as_tokens

    return as_tokens(ids)


def test_another_tenant_hits_nothing_and_gets_the_same(llama: tuple[Path, Any]) -> None:
    engine = make_engine(llama[0])
    prompt = text(120)
    results = [
        engine.generate([prompt], greedy(POLICIES["snapkv"]), scope=Scope(tenant))[0] for tenant in ("a", "b", "a")
    ]
    assert [each.usage.num_hit_tokens for each in results] == [0, 0, 104]
    assert len({tuple(each.completions[0].token_ids) for each in results}) == 1


@pytest.mark.parametrize("name", POLICIES)
def test_a_batch_of_sparse_and_dense_requests(llama: tuple[Path, Any], name: str) -> None:
    prompts = [text(70 + 15 * i, seed=20 + i) for i in range(4)]
    wishes = [greedy(POLICIES[name]), greedy(None), greedy(POLICIES["h2o"]), greedy(POLICIES[name])]
    alone = [
        make_engine(llama[0]).generate([p], w)[0].completions[0].token_ids for p, w in zip(prompts, wishes, strict=True)
    ]
    engine = make_engine(llama[0])
    together = engine.generate(prompts, wishes)
    assert [each.completions[0].token_ids for each in together] == alone
    engine.core.cache.check()


@pytest.mark.parametrize("name", POLICIES)
def test_preempted_requests_come_to_the_same_decisions(llama: tuple[Path, Any], name: str) -> None:
    prompts = [text(110 + 9 * i, seed=30 + i) for i in range(4)]
    alone = [output(make_engine(llama[0]), prompt, POLICIES[name], 40) for prompt in prompts]
    engine = make_engine(llama[0], num_blocks=120)
    for index, prompt in enumerate(prompts):
        engine.core.add(f"{index}", prompt, greedy(POLICIES[name], 40))
    got: dict[str, list[int]] = {}
    for number in range(10_000):
        if not engine.core.has_work:
            break
        for each in engine.core.step():
            got.setdefault(each.request_id, []).extend(t for delta in each.deltas for t in delta.token_ids)
        if number in (5, 17, 31):
            engine.core._scheduler.preempt_all()
        engine.core.cache.check()
    assert engine.core._scheduler.num_preempted > 4
    assert [got[f"{index}"] for index in range(4)] == alone
    assert engine.core.cache.num_held_blocks == 0


def test_a_tight_pool(llama: tuple[Path, Any]) -> None:
    """Requests of which two do not fit at once; each is preempted for another's compression, and comes out right."""
    prompts = [text(100, seed=40 + i) for i in range(5)]
    alone = [output(make_engine(llama[0]), prompt, POLICIES["h2o"], 60) for prompt in prompts]
    engine = make_engine(llama[0], num_blocks=22)
    got = engine.generate(prompts, greedy(POLICIES["h2o"], 60))
    assert [each.completions[0].token_ids for each in got] == alone
    engine.core.cache.check()
    assert engine.core.cache.num_held_blocks == 0


def test_an_aborted_request_leaves_nothing_held(llama: tuple[Path, Any]) -> None:
    for steps in (1, 4, 9, 25):
        engine = make_engine(llama[0])
        engine.core.add("r", text(120), greedy(POLICIES["h2o"], 60))
        for _ in range(steps):
            engine.core.step()
        engine.core.abort("r")
        engine.core.cache.check()
        assert engine.core.cache.num_held_blocks == 0
        engine.core.cache.clear()
        assert engine.core.cache.num_free_blocks == engine.core.cache.num_blocks


# -- budgets and limits ----------------------------------------------------------------------------------------------


def test_a_budget_in_bytes_is_whole_blocks(llama: tuple[Path, Any]) -> None:
    engine = make_engine(llama[0])
    stride = engine.core.cache.layout.pool_block_bytes
    policy = {"name": "streaming", "budget": f"{5 * stride + 7}B", "interval": 10}
    assert output(engine, text(120), policy) == output(
        make_engine(llama[0]), text(120), {"name": "streaming", "budget": 40, "interval": 10}
    )
    with pytest.raises(InvalidRequest, match="at least 5 tokens"):
        output(engine, text(120), {"name": "streaming", "budget": "10B"})


def test_fit_is_full_until_memory_ends(llama: tuple[Path, Any]) -> None:
    folder, _ = llama
    engine = make_engine(folder, num_blocks=24)
    assert engine.max_model_len < 200
    short, long = text(60), text(180)
    assert output(engine, short, "h2o:fit") == output(make_engine(folder), short, None)
    assert output(engine, short, "h2o") == output(make_engine(folder), short, None)
    with pytest.raises(ContextTooLong):
        output(engine, long, None, 60)
    [got] = engine.generate([long], greedy("h2o:fit", 60))
    assert got.usage.num_output_tokens == 60
    assert got.sparse is not None
    assert got.sparse.num_compactions > 0
    engine.core.cache.check()


def test_what_can_never_run_is_refused_with_the_numbers(llama: tuple[Path, Any]) -> None:
    engine = make_engine(llama[0], num_blocks=20)
    with pytest.raises(ContextTooLong, match=r"256 positions.*320"):
        output(engine, text(300), POLICIES["h2o"])
    with pytest.raises(ContextTooLong, match="snapkv of 40 tokens; there are"):
        output(engine, text(180), POLICIES["snapkv"])
    with pytest.raises(ContextTooLong, match="KV blocks"):
        output(engine, text(300), {"name": "streaming", "window": 150})
    assert not engine.core.has_work
    engine.core.cache.check()


def test_without_max_tokens_a_text_longer_than_the_context_goes_on(llama: tuple[Path, Any]) -> None:
    engine = make_engine(llama[0])
    params = SamplingParams(
        max_tokens=None, temperature=0.0, ignore_eos=True, kv_policy=parse_kv_policy("streaming:40")
    )
    [got] = engine.generate([text(CONTEXT + 50)], params)
    assert got.usage.num_output_tokens == CONTEXT


def test_a_default_and_its_opt_out(llama: tuple[Path, Any]) -> None:
    folder, _ = llama
    prompt = text(120)
    engine = make_engine(folder, kv_policy="h2o:budget=40,interval=10")
    dense = output(make_engine(folder), prompt, None)
    assert output(engine, prompt, None) == output(make_engine(folder), prompt, POLICIES["h2o"]) != dense
    assert output(engine, prompt, "none") == dense
    [beams] = engine.generate([prompt], SamplingParams(max_tokens=3, beam=BeamSearch(2)))
    assert beams.sparse is None
    with pytest.raises(ConfigError, match=r"there is no kv_policy .h3o"):
        make_engine(folder, kv_policy="h3o")
    assert output(make_engine(folder, kv_policy="none"), prompt, None) == dense


SAMPLED = POLICIES | {"quest": {"name": "quest", "budget": 56, "recent": 8, "block": 8}}


@pytest.mark.parametrize("name", SAMPLED)
def test_each_sample_goes_on_as_one_alone(llama: tuple[Path, Any], name: str) -> None:
    """They share the prompt until it is compressed; one that is preempted comes to the same end."""
    prompt = text(120)
    alone = output(make_engine(llama[0]), prompt, SAMPLED[name], 40)
    engine = make_engine(llama[0])
    params = replace(greedy(SAMPLED[name], 40), n=3)
    engine.core.add("r", prompt, params)
    got: dict[int, list[int]] = {}
    reports, held = [], []
    while engine.core.has_work:
        for each in engine.core.step():
            for delta in each.deltas:
                got.setdefault(delta.index, []).extend(delta.token_ids)
            reports.append(each.sparse)
        held.append(engine.core.cache.num_held_blocks)
        if len(held) == 15:
            engine.core._scheduler.preempt_all()
        engine.core.cache.check()
    assert got == dict.fromkeys(range(3), alone)
    assert reports[-1].num_returned_blocks > 0
    assert engine.core.cache.num_held_blocks == 0


def test_samples_that_differ_compress_what_is_theirs(llama: tuple[Path, Any]) -> None:
    engine = make_engine(llama[0])
    params = replace(greedy(POLICIES["h2o"], 40), n=3, best_of=4, temperature=1.0, seed=5)
    [several] = engine.generate([text(120)], params)
    assert len({tuple(each.token_ids) for each in several.completions}) == 3
    assert several.sparse is not None
    assert several.sparse.num_compactions >= 4 * 3
    engine.core.cache.check()
    assert engine.core.cache.num_held_blocks == 0


def test_beams_and_forks_are_refused(llama: tuple[Path, Any]) -> None:
    engine = make_engine(llama[0])
    policy = parse_kv_policy(POLICIES["h2o"])
    with pytest.raises(InvalidRequest, match="has no beams"):
        engine.generate([text(60)], SamplingParams(beam=BeamSearch(2), kv_policy=policy))
    engine.core.add("sparse", text(60), greedy(POLICIES["h2o"], 30))
    engine.core.add("dense", text(60, seed=9), greedy(None, 30))
    for _ in range(5):
        engine.core.step()
    with pytest.raises(InvalidRequest, match="cannot be forked"):
        engine.core.fork("sparse", "twin", greedy(None))
    with pytest.raises(InvalidRequest, match="is no fork"):
        engine.core.fork("dense", "twin", greedy(POLICIES["h2o"]))
    engine.core.abort_all()
    engine.core.cache.check()
    assert engine.core.cache.num_held_blocks == 0


def test_a_model_of_sliding_windows_alone_needs_no_policy(tmp_path: Path) -> None:
    from tests.sparse.conftest import make_model

    folder, _ = make_model(tmp_path, "mistral-window", sliding_window=24)
    engine = make_engine(folder)
    with pytest.raises(InvalidRequest, match="bounded without"):
        output(engine, text(100), POLICIES["h2o"])
    assert output(engine, text(100), None)


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ("none", Full()),
        ({"name": "none"}, Full()),
        ("h2o", H2O()),
        ("h2o:512", H2O(budget=512)),
        ("h2o:budget=512,recent=64", H2O(budget=512, recent=64)),
        ({"name": "h2o", "budget": "64MiB", "sinks": 0}, H2O(budget="64MiB", sinks=0)),
        ("streaming:window=1020", Streaming(budget=1024)),
        ({"name": "streaming", "window": 100, "sinks": 2}, Streaming(budget=102, sinks=2)),
        ("snapkv:budget=256,window=32,kernel=7", SnapKV(budget=256, window=32, kernel=7)),
        ("pyramid:256", Pyramid(budget=256)),
        ("infinigen:alpha=4.5,budget=100", InfiniGen(budget=100, alpha=4.5)),
    ],
)
def test_what_is_read(given: Any, policy: Any) -> None:
    assert parse_kv_policy(given) == policy


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "none, streaming, h2o, snapkv, pyramid"),
        ({}, "needs a name"),
        ({"budget": 4}, "needs a name, one of none, "),
        ({"name": 3}, "no kv_policy 3; it is one of none, "),
        ({"name": None}, "no kv_policy null"),
        ({"name": "h3o"}, 'no kv_policy "h3o"'),
        ({"name": "none", "budget": 5}, 'kv_policy none takes no settings, got "budget"'),
        ("infinigen:", 'missing or empty in "infinigen:"'),
        ("none:", "missing or empty"),
        ("h2o:512,", "missing or empty"),
        ("h2o:budget=", "missing or empty"),
        ("h2o:512,budget=600", "budget is given twice"),
        ("h2o:name=snapkv", "name is given twice"),
        ("h2o:budget=lots", "not a size"),
        ("h2o:1e3", "not a size"),
        ("h2o:512.5", "whole number"),
        ("infinigen:budget=100.5", "whole number"),
        ("infinigen:alpha=.5", "alpha must be"),
        ({"name": "h2o", "budget": 1.5}, "whole number"),
        ({"name": "h2o", "budget": True}, "budget must be a whole number or a size, got true"),
        ({"name": "h2o", "budget": None}, "got null"),
        ({"name": "h2o", "under_pressure": 1}, "under_pressure is true or false, got 1"),
        ({"name": "h2o", "budget": -1}, "at least"),
        ({"name": "h2o", "budget": 2**40}, "budget"),
        ({"name": "h2o", "budget": 9}, "at least 10"),
        ({"name": "h2o", "budget": 20, "recent": 16}, "at least 21"),
        ({"name": "h2o", "recent": -1}, "0 or more"),
        ({"name": "h2o", "interval": 0}, "at least 1"),
        ({"name": "h2o", "window": 5}, "has no setting 'window'"),
        ({"name": "streaming", "window": 5, "budget": 9}, "not both"),
        ({"name": "streaming", "window": "5"}, "numbers of tokens"),
        ("streaming:window=0", "window must be between 1 and [0-9]+, got 0"),
        ("streaming:window=9999999999", "window must be between"),
        ({"name": "streaming", "sinks": -1}, "0 or more"),
        ({"name": "snapkv", "kernel": 4}, "odd"),
        ({"name": "snapkv", "budget": 64}, "at least 65"),
        ({"name": "snapkv", "interval": 5}, "no meaning"),
        ({"name": "pyramid", "steepness": 1}, "at least 2"),
    ],
)
def test_what_is_refused(given: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as error:
        parse_kv_policy(given)
    assert error.value.param == "kv_policy"


def test_sampling_params_read_what_requests_may_say() -> None:
    ways: list[Any] = ["h2o:512", {"name": "h2o", "budget": 512}, H2O(budget=512)]
    for given in ways:
        assert SamplingParams(kv_policy=given).wished_policy == H2O(budget=512)
    assert SamplingParams(kv_policy="none").wished_policy == Full()
    with pytest.raises(InvalidRequest, match="at least 10"):
        SamplingParams(kv_policy="h2o:5")


def test_under_pressure_fit_is_a_part_of_what_fits(llama: tuple[Path, Any]) -> None:
    sparsity = make_engine(llama[0]).core.sparsity
    assert sparsity is not None

    def budget(share: float, policy: str) -> Any:
        pressed = replace(sparsity, fit_share=lambda: share)
        found = pressed.policy_for(parse_kv_policy(policy))
        assert found is not None
        return found.budget

    whole = budget(1.0, "h2o:fit")
    assert budget(0.5, "h2o:fit") == whole // 2
    assert budget(0.001, "h2o:fit") == whole  # too little for the policy: pressure is no reason for a 400
    assert budget(0.5, "h2o:48") == 48
