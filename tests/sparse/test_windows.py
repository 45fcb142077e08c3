"""Layers with a sliding window hold a window, whatever the context; hits are right, and outputs Transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda import Engine, SamplingParams
from tests.sparse.conftest import make_engine, make_model, text

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.fixture(
    scope="module",
    params=[
        ("mistral-window", {"sliding_window": 24}),
        ("gemma3", {"sliding_window": 24, "num_hidden_layers": 3, "layer_types": KINDS}),
    ],
    ids=["mistral", "gemma3"],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    variant, changes = request.param
    return make_model(tmp_path_factory.mktemp(variant), variant, max_position_embeddings=2048, **changes)


def held_for(engine: Engine, prompt: list[int]) -> tuple[list[int], list[int]]:
    """Output, and the blocks held after each step."""
    engine.core.add("r", prompt, GREEDY)
    tokens, held = [], []
    while engine.core.has_work:
        for output in engine.core.step():
            tokens += [token for delta in output.deltas for token in delta.token_ids]
        held.append(engine.core.cache.num_held_blocks)
        engine.core.cache.check()
    return tokens, held[:-1]


def test_kv_is_bounded_and_outputs_are_transformers(model: tuple[Path, Any]) -> None:
    folder, reference = model
    engine = make_engine(folder, num_blocks=500)
    groups = engine.core.cache.layout.groups
    num_windows = sum(group.window is not None for group in groups)
    for length in (300, 1200):
        prompt = text(length, seed=length)
        engine.core.cache.clear()
        tokens, held = held_for(engine, prompt)
        full = (len(groups) - num_windows) * -(-(length + 12) // 8)
        assert max(held) <= full + num_windows * ((24 + 48) // 8 + 2)
        with torch.inference_mode():
            truth = reference.generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert tokens == truth[0, length:].tolist()


def test_hits_of_slid_prefixes_are_right(model: tuple[Path, Any]) -> None:
    """A prefix whose early window blocks were evicted still serves what it can, and no more."""
    folder, _ = model
    common = text(300, seed=1)
    prompts = [common[:cut] + text(20, seed=cut) for cut in (300, 299, 160, 40)]
    cold = [make_engine(folder, num_blocks=300).generate([p], GREEDY)[0] for p in prompts]
    engine = make_engine(folder, num_blocks=300)
    engine.generate([common], GREEDY)
    for evicted in (0, 20, 60):
        engine.core.cache.evict(evicted)
        for prompt, expected in zip(prompts, cold, strict=True):
            [got] = engine.generate([prompt], GREEDY)
            assert got.completions[0].token_ids == expected.completions[0].token_ids
            if not evicted and prompt is prompts[0]:
                assert got.usage.num_hit_tokens == 300
        engine.core.cache.check()


def test_a_model_of_windows_alone_runs_contexts_that_its_pool_could_not_hold(tmp_path: Path) -> None:
    folder, _ = make_model(tmp_path, "mistral-window", max_position_embeddings=2048, sliding_window=24)
    engine = make_engine(folder, num_blocks=14)
    assert engine.max_model_len == 2048
    prompt = text(1500, seed=2)
    tokens, held = held_for(engine, prompt)
    assert max(held) <= 14
    assert tokens == held_for(make_engine(folder, num_blocks=300), prompt)[0]
