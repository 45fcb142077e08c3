"""The engine over real decoders with random weights: greedy outputs depend on neither the cache nor the batch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagoda.engine.engine import Engine
from pagoda.engine.params import SamplingParams
from pagoda.errors import ConfigError, ContextTooLong, InvalidRequest
from pagoda.kv.sizes import format_size
from tests.model import models, tokenizers_made_here

LENGTH = 24
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "full-and-window", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    tokenizer = tokenizers_made_here.byte_level()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 256}
    if request.param == "llama":
        reference = models.build("llama", **sizes)
    elif request.param == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * 2
        reference = models.build("gemma3", sliding_window=32, num_hidden_layers=4, layer_types=kinds, **sizes)
    else:
        reference = models.build(
            "qwen2-mixed-windows", sliding_window=32, num_hidden_layers=4, max_window_layers=2, **sizes
        )
    folder = models.save(reference, tmp_path_factory.mktemp(request.param))
    return tokenizers_made_here.save(tokenizer, folder), reference


def make(folder: Path, **options: Any) -> Engine:
    settings = {"dtype": "float32", "kv_memory": "4MiB", "max_num_seqs": 16, "token_budget": 48, "block_size": 8}
    return Engine(str(folder), progress=False, **(settings | options))


def prompts(count: int, shared: int = 60) -> list[list[int]]:
    rng = np.random.default_rng(5)
    common = rng.integers(3, 300, shared).tolist()
    return [common + rng.integers(3, 300, 1 + 5 * i).tolist() for i in range(count)]


def outputs(engine: Engine, inputs: list[list[int]]) -> list[list[int]]:
    engine.core.cache.check()
    return [generation.completions[0].token_ids for generation in engine.generate(inputs, GREEDY)]


def test_greedy_outputs_are_the_same_however_they_are_computed(model: tuple[Path, Any]) -> None:
    folder, reference = model
    inputs = prompts(6)
    one_at_a_time = [outputs(make(folder), [tokens])[0] for tokens in inputs]
    with torch.inference_mode():
        truth = reference.generate(
            torch.tensor([inputs[3]]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert one_at_a_time[3] == truth[0, len(inputs[3]) :].tolist()
    engine = make(folder)
    assert outputs(engine, inputs) == one_at_a_time  # cold, batched
    assert outputs(engine, inputs) == one_at_a_time  # warm
    assert engine.core.cache.stats.num_hit_tokens > 5 * 60
    for name, options in {
        "tight": {"kv_memory": engine.core.cache.layout.pool_block_bytes * 30 * len(engine.core.cache.layout.groups)},
        "block of one": {"block_size": 1},
        "small steps": {"token_budget": 16},
        "lpm": {"queue_policy": "lpm"},
    }.items():
        other = make(folder, **options)
        assert outputs(other, inputs) == one_at_a_time, name
        if name == "tight":
            assert other.core._scheduler.num_preempted > 0
        other.core.cache.check()
        assert other.core.cache.num_held_blocks == 0


def test_a_window_bounds_what_a_request_holds(model: tuple[Path, Any]) -> None:
    folder, _ = model
    engine = make(folder)
    if not any(engine.spec.windows):
        pytest.skip("this model has no sliding window")
    cache = engine.core.cache
    engine.core.add("r", list(range(3, 200)), SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    held = []
    while engine.core.has_work:
        engine.core.step()
        held.append(cache.num_held_blocks)
    windows = [group.window for group in cache.layout.groups]
    assert sorted(windows, key=str) == [32, None]
    # 237 tokens: 30 blocks of 8 in the full group; in the other a window of 32, the newest block, a step's worth.
    assert max(held) <= 30 + (32 + 48) // 8 + 1
    assert held[-2] <= 30 + 32 // 8 + 2


def test_sliding_layers_hold_a_window_however_long_the_context(tmp_path: Path) -> None:
    tokenizer = tokenizers_made_here.byte_level()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096}
    folder = models.save(models.build("gemma3", sliding_window=32, **sizes), tmp_path)
    engine = make(tokenizers_made_here.save(tokenizer, folder))
    assert sorted((group.window or 0, len(group.layers)) for group in engine.core.cache.layout.groups) == [
        (0, 1),
        *[(32, 1)] * 5,
    ]
    peaks = {}
    for length in (1000, 4000):
        engine.core.cache.clear()
        engine.core.add("r", list(range(3, 203)) * (length // 200), SamplingParams(max_tokens=20, temperature=0.0))
        engine.core.step()
        held = []
        while engine.core.has_work:
            held.append(engine.core.cache.num_held_blocks)
            engine.core.step()
        peaks[length] = max(held)
    full = {length: -(-(length + 20) // 8) for length in peaks}
    assert peaks[1000] - full[1000] == pytest.approx(peaks[4000] - full[4000], abs=5)
    assert peaks[4000] - full[4000] <= 5 * ((32 + 48) // 8 + 1)
    assert engine.core.cache.num_held_blocks == 0
    engine.core.cache.check()


def test_generate_takes_texts_and_tokens_and_returns_them_in_order(model: tuple[Path, Any]) -> None:
    engine = make(model[0])
    texts = ["The harbour master counts", "when the tide turns"]
    by_text = engine.generate(texts, SamplingParams(max_tokens=5, temperature=0.0))
    by_tokens = engine.generate(
        [list(g.prompt_token_ids) for g in by_text], SamplingParams(max_tokens=5, temperature=0.0)
    )
    assert [g.text for g in by_text] == [g.text for g in by_tokens]
    assert engine.tokenizer.decode(by_text[0].prompt_token_ids) == texts[0]
    assert engine.generate("The harbour", SamplingParams(max_tokens=1))[0].usage.num_output_tokens == 1
    assert engine.generate([]) == []


def test_a_bad_prompt_starts_nothing(model: tuple[Path, Any]) -> None:
    engine = make(model[0])
    with pytest.raises(ContextTooLong, match="256"):
        engine.generate([[5, 6], [5] * 300], SamplingParams(max_tokens=2))
    assert not engine.core.has_work
    with pytest.raises(InvalidRequest, match="SamplingParams"):
        engine.generate([[5]], [GREEDY, GREEDY])
    engine.core.cache.check()


def test_little_memory_cuts_the_context_and_too_little_is_refused(
    model: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    stride = make(model[0]).core.cache.layout.pool_block_bytes
    groups = len(make(model[0]).core.cache.layout.groups)
    small = make(model[0], kv_memory=stride * 10 * groups)
    assert small.max_model_len < 256
    assert "raise `--kv-memory` (in Python `kv_memory`)" in caplog.text
    with pytest.raises(ContextTooLong, match=str(small.max_model_len)):
        small.generate([[5] * 200], SamplingParams(max_tokens=1))
    with pytest.raises(ConfigError, match="too little"):
        make(model[0], kv_memory=stride)


def test_memory_is_taken_for_as_many_as_run_and_said_so(
    model: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pagoda")
    for max_num_seqs in (1, 3):
        engine = Engine(model[0], dtype="float32", progress=False, max_num_seqs=max_num_seqs, block_size=8)
        cache = engine.core.cache
        assert cache.num_blocks == max_num_seqs * cache.layout.blocks_for(engine.spec.max_context)
        assert f"taking {format_size(engine.cache_info().bytes_total)} of KV memory" in caplog.text
    shortest = Engine(model[0], progress=False, max_num_seqs=1, max_model_len=4)  # a block would be enough
    assert shortest.max_model_len == 4


def test_settings_are_checked_before_weights_are_read(
    model: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: Any, **settings: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("pagoda.model.loader.load_weights", read)
    for options, said in (
        ({"kv_skip_layers": (0, 99, 7)}, r"`--kv-skip-layers` .*, 0 to \d, got 99, 7$"),
        ({"max_model_len": 9999}, "`--max-model-len` .* between 1 and the model's 256, got 9999"),
        ({"eviction": "mru"}, "no eviction policy is called 'mru'"),
        ({"kv_memory": "much"}, "not a size"),
    ):
        with pytest.raises(ConfigError, match=said):
            make(model[0], **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"block_size": 0}, "block_size"),
        ({"token_budget": 4}, "token_budget"),
        ({"queue_policy": "lifo"}, "fcfs"),
        ({"kv_memory": "much"}, "not a size"),
        ({"kv_memory": 0}, "positive"),
    ],
)
def test_settings_are_checked(model: tuple[Path, Any], options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make(model[0], **options)
