"""Weights that change under a running engine: no KV of the old ones is used, in the pool or in tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagoda.engine.engine import Engine
from pagoda.engine.params import BeamSearch, LeaseSpec, SamplingParams
from pagoda.engine.prefill_speed import PrefillSpeed
from pagoda.errors import ConfigError, ModelNotFound
from tests.model import models, tokenizers_made_here

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
PROMPT = np.random.default_rng(0).integers(10, 300, 50).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Any]]:
    tokenizer = tokenizers_made_here.byte_level()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 256}
    references = [models.build("llama", seed, **sizes) for seed in (1, 2)]
    saved = [models.save(reference, tmp_path_factory.mktemp("weights")) for reference in references]
    return [tokenizers_made_here.save(tokenizer, folder) for folder in saved], references


def make(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), dtype="float32", kv_memory="2MiB", block_size=8, progress=False, **options)


def truth(reference: Any, tokens: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        out = reference.generate(
            torch.tensor([tokens]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return out[0, len(tokens) :].tolist()


@pytest.mark.parametrize("tiers", [(), ("dram:4MiB",)])
def test_no_old_kv_is_used_again(folders: tuple[list[Path], list[Any]], tiers: tuple[str, ...]) -> None:
    paths, references = folders
    engine = make(paths[0], tiers=tiers)
    before = engine.weights_identity
    for which in (0, 1, 0):
        if engine.weights_identity != before or which:
            engine.reload_weights(str(paths[which]))
            assert engine.core.cache.num_free_blocks == engine.core.cache.num_blocks
        [cold] = engine.generate([PROMPT], GREEDY)
        assert cold.completions[0].token_ids == truth(references[which], PROMPT, 10)
        assert cold.usage.num_hit_tokens == 0
        assert engine.generate([PROMPT], GREEDY)[0].usage.num_hit_tokens == len(PROMPT) - 1
        engine.core.cache.check()
    assert engine.weights_identity == before
    engine.close()


def test_kv_that_only_tiers_have_is_found_under_its_own_weights_alone(
    folders: tuple[list[Path], list[Any]], tmp_path: Path
) -> None:
    paths, _ = folders
    engine = make(paths[0], tiers=[f"disk:{tmp_path}:8MiB"])
    engine.core._scheduler.prefill_speed = PrefillSpeed(1.0)  # so that a restore is always worth it
    engine.generate([PROMPT], GREEDY)
    engine.reload_weights(str(paths[1]))
    assert engine.generate([PROMPT], GREEDY)[0].usage.num_hit_tokens == 0
    assert engine.core.cache.stats.num_restored_tokens == 0
    engine.close()


def test_int8_weights_stay_int8(folders: tuple[list[Path], list[Any]]) -> None:
    paths, _ = folders
    engine, other = (make(path, weights_format="int8") for path in paths)
    full = make(paths[0])
    [first] = engine.generate([PROMPT], GREEDY)
    assert engine.generate([PROMPT], GREEDY)[0].completions == first.completions
    assert engine.weights_identity != full.weights_identity
    engine.reload_weights(str(paths[1]))
    assert engine.weights_identity == other.weights_identity
    assert engine.generate([PROMPT], GREEDY)[0].completions == other.generate([PROMPT], GREEDY)[0].completions


def test_running_requests_go_on_with_the_new_weights(folders: tuple[list[Path], list[Any]]) -> None:
    paths, references = folders
    engine = make(paths[0], lease_share=0.1)
    engine.core.add("r", PROMPT, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    engine.core.add("leased", PROMPT[:30], GREEDY, leases=[LeaseSpec(16, 600.0)])
    engine.core.add("beams", PROMPT[:20], SamplingParams(max_tokens=9, beam=BeamSearch(3), ignore_eos=True))
    engine.core.add("samples", PROMPT[5:20], SamplingParams(n=3, max_tokens=9, ignore_eos=True))
    out: dict[str, list[int]] = {}

    def step() -> None:
        for output in engine.core.step():
            for delta in output.deltas:
                if delta.index == 0:
                    out.setdefault(output.request_id, []).extend(delta.token_ids)
        engine.core.cache.check()

    for _ in range(6):
        step()
    assert engine.core.cache.retention.num_blocks
    so_far = list(out["r"])
    assert 0 < len(so_far) < 12
    engine.reload_weights(str(paths[1]))
    engine.core.cache.check()
    assert engine.core.num_running == engine.core.cache.num_held_blocks == engine.core.cache.num_cached_blocks == 0
    while engine.core.has_work:
        step()
    assert out["r"][: len(so_far)] == so_far == truth(references[0], PROMPT, len(so_far))
    assert out["r"][len(so_far) :] == truth(references[1], PROMPT + so_far, 12 - len(so_far))
    assert {name: len(tokens) for name, tokens in out.items()} == {"r": 12, "leased": 10, "beams": 9, "samples": 9}
    assert engine.core.cache.num_held_blocks == 0


def test_what_does_not_fit_changes_nothing(folders: tuple[list[Path], list[Any]], tmp_path: Path) -> None:
    paths, references = folders
    engine = make(paths[0])
    engine.generate([PROMPT], GREEDY)
    tokenizer = tokenizers_made_here.byte_level()
    smaller = models.build(
        "llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=256, num_hidden_layers=2
    )
    other = tokenizers_made_here.save(tokenizer, models.save(smaller, tmp_path))
    with pytest.raises(ConfigError, match="num_layers"):
        engine.reload_weights(str(other))
    with pytest.raises(ModelNotFound):
        engine.reload_weights(str(tmp_path / "nothing"))
    [warm] = engine.generate([PROMPT], GREEDY)
    assert warm.usage.num_hit_tokens == len(PROMPT) - 1
    assert warm.completions[0].token_ids == truth(references[0], PROMPT, 10)
