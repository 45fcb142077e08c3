"""Each policy in the engine against the dense masked reference: the same tokens, and the same probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda import Engine, SamplingParams
from pagoda.engine.outputs import Generation
from pagoda.sparse.pyramid import Pyramid
from pagoda.sparse.spec import parse_kv_policy
from tests.sparse import masked
from tests.sparse.conftest import CONTEXT, make_engine, text

TOLERANCE = 2e-3


def params(policy: dict[str, Any] | str, count: int) -> SamplingParams:
    wish = parse_kv_policy(policy)
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=5, kv_policy=wish)


def run(engine: Engine, prompt: list[int], count: int, policy: dict[str, Any] | str) -> Generation:
    [generation] = engine.generate([prompt], params(policy, count))
    engine.core.cache.check()
    assert engine.core.cache.num_held_blocks == 0
    return generation


def assert_same(got: Generation, expected: masked.Outcome) -> None:
    completion = got.completions[0]
    assert completion.token_ids == expected.tokens
    for mine, theirs in zip(completion.logprobs, expected.logprobs, strict=True):
        ids, values = zip(*mine.top, strict=True)
        assert torch.allclose(torch.tensor(values), theirs[list(ids)], atol=TOLERANCE)
    assert got.sparse is not None
    assert got.sparse.num_compactions == expected.num_compactions > 0


H2O = {"name": "h2o", "budget": 40, "interval": 10, "recent": 12, "sinks": 3}
STREAMING = {"name": "streaming", "sinks": 4, "window": 36, "interval": 10}


def test_h2o(llama: tuple[Path, Any]) -> None:
    """The prompt exactly, its end compressed, then every 10 tokens; however its computation is cut up."""
    folder, reference = llama
    prompt = text(101)
    expected = masked.generate(reference, prompt, 45, masked.h2o(40, 10, 12, 3))
    for budget in 48, 16, 200:
        assert_same(run(make_engine(folder, token_budget=budget), prompt, 45, H2O), expected)


def test_h2o_keeps_what_differs_by_head_and_layer(llama: tuple[Path, Any]) -> None:
    """Or the tests above would prove little."""
    kept = masked.generate(llama[1], text(101), 2, masked.h2o(40, 10, 12, 3)).kept
    assert len({tuple(head) for layer in kept for head in layer}) == len(kept) * len(kept[0])


def test_h2o_with_a_prompt_longer_than_memory(llama: tuple[Path, Any]) -> None:
    folder, reference = llama
    engine = make_engine(folder, num_blocks=14, token_budget=16)
    prompt = text(190)
    assert engine.max_model_len < len(prompt)
    expected = masked.generate(reference, prompt, 30, masked.h2o(40, 10, 12, 3, exact=False))
    got = run(engine, prompt, 30, H2O)
    assert_same(got, expected)
    assert got.sparse is not None
    assert got.sparse.num_compactions > 12


def test_h2o_sums_from_where_a_prefix_hit_ends(llama: tuple[Path, Any]) -> None:
    folder, reference = llama
    engine = make_engine(folder)
    prompt = text(101)
    run(engine, prompt[:56] + text(9, seed=8), 2, "none")
    got = run(engine, prompt, 45, H2O)
    assert got.usage.num_hit_tokens == 56
    assert_same(got, masked.generate(reference, prompt, 45, masked.h2o(40, 10, 12, 3), seen_from=56))


def test_h2o_after_a_hit_of_the_whole_prompt_goes_by_its_last_tokens(llama: tuple[Path, Any]) -> None:
    folder, reference = llama
    engine = make_engine(folder)
    prompt = text(101)
    run(engine, prompt, 2, "none")
    got = run(engine, prompt, 20, H2O)
    assert got.usage.num_hit_tokens == 101 - 32
    assert_same(got, masked.generate(reference, prompt, 20, masked.h2o(40, 10, 12, 3), seen_from=101 - 32))


def test_streaming(llama: tuple[Path, Any]) -> None:
    folder, reference = llama
    prompt = text(90, seed=4)
    expected = masked.generate(reference, prompt, 60, masked.streaming(40, 10))
    for budget in 48, 16:
        assert_same(run(make_engine(folder, token_budget=budget), prompt, 60, STREAMING), expected)


def test_streaming_far_beyond_the_models_positions_in_constant_memory(llama: tuple[Path, Any]) -> None:
    folder, reference = llama
    engine = make_engine(folder, num_blocks=60)
    prompt, count = text(CONTEXT + 60, seed=5), 120
    expected = masked.generate(reference, prompt, count, masked.streaming(40, 10, exact=False))
    engine.core.add("r", prompt, params(STREAMING, count))
    held, tokens = [], []
    while engine.core.has_work:
        for output in engine.core.step():
            tokens += [token for delta in output.deltas for token in delta.token_ids]
            report = output.sparse
        held.append(engine.core.cache.num_held_blocks)
        engine.core.cache.check()
    assert tokens == expected.tokens
    assert max(held) == -(-50 // 8)
    assert report.num_dropped_tokens > CONTEXT + 120


def test_streaming_without_sinks(llama: tuple[Path, Any]) -> None:
    folder, reference = llama
    policy = {"name": "streaming", "sinks": 0, "window": 30, "interval": 7}
    prompt = text(270, seed=6)
    rule = masked.streaming(30, 7, sinks=0, exact=False)
    assert_same(run(make_engine(folder), prompt, 20, policy), masked.generate(reference, prompt, 20, rule))


def test_snapkv(llama: tuple[Path, Any]) -> None:
    folder, reference = llama
    prompt = text(120, seed=7)
    policy = {"name": "snapkv", "budget": 50, "window": 20, "kernel": 5}
    expected = masked.generate(reference, prompt, 20, masked.snapkv(50, 20, 5))
    for budget in 200, 16, 48:
        assert_same(run(make_engine(folder, token_budget=budget), prompt, 20, policy), expected)


def test_snapkv_looks_at_its_window_even_if_all_of_the_prompt_is_cached(llama: tuple[Path, Any]) -> None:
    folder, reference = llama
    engine = make_engine(folder)
    prompt = text(120, seed=7)
    run(engine, prompt, 2, "none")
    got = run(engine, prompt, 20, {"name": "snapkv", "budget": 50, "window": 20})
    assert got.usage.num_hit_tokens == 100
    assert_same(got, masked.generate(reference, prompt, 20, masked.snapkv(50, 20, 5)))


def test_pyramid(llama: tuple[Path, Any]) -> None:
    folder, reference = llama
    policy = Pyramid(budget=50, window=20, steepness=10)
    budgets = [policy.layer_budget(layer, 3) for layer in range(3)]
    assert budgets[0] > 50 > budgets[2]
    assert sum(budgets) == 150
    rule = masked.snapkv(50, 20, 5, layer_budget=lambda layer: budgets[layer])
    prompt = text(120, seed=9)
    got = run(make_engine(folder), prompt, 20, {"name": "pyramid", "budget": 50, "window": 20, "steepness": 10})
    assert_same(got, masked.generate(reference, prompt, 20, rule))
    assert got.sparse is not None
    # The largest layer decides what comes back: blocks hold all layers.
    assert got.sparse.num_blocks == -(-budgets[0] // 8)


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (H2O, masked.h2o(40, 10, 12, 3)),
        (STREAMING, masked.streaming(40, 10)),
        ({"name": "snapkv", "budget": 50, "window": 20}, masked.snapkv(50, 20, 5)),
    ],
    ids=["h2o", "streaming", "snapkv"],
)
def test_layers_with_a_sliding_window_stay_as_they_are(
    hybrid: tuple[Path, Any], policy: dict[str, Any], rule: masked.Rule
) -> None:
    folder, reference = hybrid
    prompt = text(110, seed=10)
    assert_same(run(make_engine(folder), prompt, 40, policy), masked.generate(reference, prompt, 40, rule))


def test_streaming_beyond_positions_turns_sliding_layers_too(hybrid: tuple[Path, Any]) -> None:
    folder, reference = hybrid
    prompt = text(CONTEXT + 40, seed=11)
    expected = masked.generate(reference, prompt, 20, masked.streaming(40, 10, exact=False))
    assert_same(run(make_engine(folder), prompt, 20, STREAMING), expected)


@pytest.mark.parametrize("name", ["h2o", "streaming", "snapkv", "pyramid"])
def test_a_budget_of_the_whole_context_changes_nothing(llama: tuple[Path, Any], name: str) -> None:
    engine = make_engine(llama[0])
    prompt = text(80)
    full = run(engine, prompt, 30, "none")
    got = run(engine, prompt, 30, {"name": name, "budget": 110})
    assert got.completions[0].token_ids == full.completions[0].token_ids
    assert got.sparse is None
