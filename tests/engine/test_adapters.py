"""LoRA adapters by request: as if merged, in one batch with others, and never on another model's KV."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagoda.engine.engine import Engine
from pagoda.engine.params import BlendSpec, SamplingParams, Span
from pagoda.errors import ConfigError, InvalidRequest, ModelNotFound, UnsupportedModel, WeightsError
from tests.model import adapters, models, tokenizers_made_here

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=3)
INVOCATION = [7, 8, 9]


@pytest.fixture(scope="module", params=["qwen2", "llama-biased-tied"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A model's folder with adapters `one`, `two` and `late` below it, and the merged models."""
    root = tmp_path_factory.mktemp("adapters")
    tokenizer = tokenizers_made_here.byte_level()
    base = models.build(request.param, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=256)
    folder = tokenizers_made_here.save(tokenizer, models.save(base, root))
    return folder, {
        "base": base,
        "one": adapters.save_adapter(base, folder / "one", 1),
        "two": adapters.save_adapter(base, folder / "two", 2, rank=3, modules=("q_proj", "v_proj"), use_rslora=True),
        "late": adapters.save_adapter(
            base, folder / "late", 3, modules=("q_proj", "k_proj", "v_proj"), alora_invocation_tokens=INVOCATION
        ),
    }


def make(folder: Path, **options: Any) -> Engine:
    settings = {"dtype": "float32", "kv_memory": "4MiB", "max_num_seqs": 16, "token_budget": 48, "block_size": 8}
    engine = Engine(str(folder), progress=False, **(settings | options))
    for name in ("one", "two", "late"):
        engine.adapters.load(name, folder / name)
    return engine


def prompt(seed: int = 0, length: int = 61) -> list[int]:
    return np.random.default_rng(seed).integers(10, 300, length).tolist()


def truth(model: Any, tokens: list[int], count: int = 12) -> list[int]:
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([tokens]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return out[0, len(tokens) :].tolist()


def run(
    engine: Engine, wanted: dict[str, tuple[list[int], str | None]], params: SamplingParams = GREEDY
) -> dict[str, list[int]]:
    """Greedy outputs of requests that run together; checks the books."""
    for name, (tokens, adapter) in wanted.items():
        engine.core.add(name, tokens, params, adapter=adapter)
    out: dict[str, list[int]] = {name: [] for name in wanted}
    while engine.core.has_work:
        for output in engine.core.step():
            out[output.request_id] += [token for delta in output.deltas for token in delta.token_ids]
        engine.core.cache.check()
    return out


def test_adapters_answer_as_if_merged_together_in_one_batch(made: tuple[Path, dict[str, Any]]) -> None:
    folder, merged = made
    engine = make(folder)
    wanted = {
        f"{name} {seed}": (prompt(seed, 20 + 9 * seed), None if name == "base" else name)
        for name in ("base", "one", "two")
        for seed in range(3)
    }
    expected = {name: truth(merged[name.split()[0]], tokens) for name, (tokens, _) in wanted.items()}
    assert expected["base 0"] != expected["one 0"] != expected["two 0"]
    assert run(engine, wanted) == expected  # cold, each prompt by three models at once
    assert run(engine, wanted) == expected  # warm


def test_preemption_changes_no_adapters_answer(made: tuple[Path, dict[str, Any]]) -> None:
    folder, merged = made
    stride = make(folder).core.cache.layout.pool_block_bytes
    engine = make(folder, kv_memory=stride * 15, max_model_len=64)
    wanted = {name: (prompt(7, 20), None if name == "base" else name) for name in ("base", "one", "two")}
    found = run(engine, wanted, replace(GREEDY, max_tokens=30))
    assert found == {name: truth(merged[name], prompt(7, 20), 30) for name in wanted}
    assert engine.core._scheduler.num_preempted > 0


def test_logits_equal_the_merged_models(made: tuple[Path, dict[str, Any]]) -> None:
    folder, merged = made
    engine = make(folder)
    for name in ("one", "two"):
        [found] = engine.generate([prompt()], GREEDY, adapter=name)
        tokens = prompt() + found.completions[0].token_ids
        with torch.inference_mode():
            logprobs = merged[name](torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        for index, token in enumerate(found.completions[0].logprobs):
            expected = logprobs[len(prompt()) - 1 + index].topk(3)
            assert [each for each, _ in token.top] == expected.indices.tolist()
            assert [value for _, value in token.top] == pytest.approx(expected.values.tolist(), abs=1e-3)


def test_kv_belongs_to_an_adapters_content_not_to_its_name(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, merged = made
    engine = make(folder)

    def hits(adapter: str | None) -> int:
        return engine.generate([prompt()], GREEDY, adapter=adapter)[0].usage.num_hit_tokens

    assert [hits(None), hits("one"), hits("two")] == [0, 0, 0]
    assert [hits(None), hits("one"), hits("two")] == [60, 60, 60]
    engine.adapters.load("copy", folder / "one")
    assert hits("copy") == 60
    other = adapters.save_adapter(merged["base"], tmp_path / "other", 9)
    engine.adapters.load("one", tmp_path / "other")  # another content under the same name
    [found] = engine.generate([prompt()], GREEDY, adapter="one")
    assert found.usage.num_hit_tokens == 0
    assert found.completions[0].token_ids == truth(other, prompt())
    engine.adapters.unload("copy")
    with pytest.raises(ModelNotFound, match="copy"):
        hits("copy")
    engine.adapters.load("again", folder / "one")
    assert hits("again") == 60


def test_a_running_request_keeps_its_adapter(made: tuple[Path, dict[str, Any]]) -> None:
    folder, merged = made
    engine = make(folder)
    engine.core.add("r", prompt(), GREEDY, adapter="one")
    tokens: list[int] = []
    for step in range(40):
        if step == 4:
            engine.adapters.unload("one")
        tokens += [token for output in engine.core.step() for token in output.deltas[0].token_ids]
    assert tokens == truth(merged["one"], prompt())


def test_beams_of_an_adapter(made: tuple[Path, dict[str, Any]]) -> None:
    folder, merged = made
    [found] = make(folder, lease_share=0.0).beam_search([prompt()], 3, max_tokens=8, ignore_eos=True, adapter="one")
    with torch.inference_mode():
        best = merged["one"].generate(
            torch.tensor([prompt()]), num_beams=3, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert found.completions[0].token_ids == best[0, 61:].tolist()


def test_an_activated_adapter_changes_nothing_before_its_invocation(made: tuple[Path, dict[str, Any]]) -> None:
    folder, merged = made
    before, after = prompt(3, 43), prompt(4, 9)
    tokens = before + INVOCATION + after

    def stepwise(count: int) -> list[int]:
        """The base model's KV up to the invocation, the merged model's from there on."""
        ids = list(tokens)
        with torch.inference_mode():
            for _ in range(count):
                cache = merged["base"](torch.tensor([before]), use_cache=True).past_key_values
                logits = merged["late"](torch.tensor([ids[len(before) :]]), past_key_values=cache).logits
                ids.append(int(logits[0, -1].argmax()))
        return ids[len(tokens) :]

    engine = make(folder)
    assert engine.generate([before], GREEDY)[0].completions[0].token_ids == truth(merged["base"], before)
    [found] = engine.generate([tokens], GREEDY, adapter="late")
    assert found.usage.num_hit_tokens == 40  # the base model's whole blocks
    assert found.completions[0].token_ids == stepwise(12)
    [warm] = engine.generate([tokens], GREEDY, adapter="late")
    assert warm.usage.num_hit_tokens == len(tokens) - 1
    assert warm.completions[0].token_ids == stepwise(12)
    other = make(folder)  # the other way round: the base model goes on from what the adapter's request computed
    other.generate([tokens], GREEDY, adapter="late")
    [base] = other.generate([tokens], GREEDY)
    assert base.usage.num_hit_tokens == 40
    assert base.completions[0].token_ids == truth(merged["base"], tokens)
    assert found.completions[0].token_ids != truth(merged["late"], tokens)
    with pytest.raises(InvalidRequest, match="activated by the tokens"):
        engine.generate([before], GREEDY, adapter="late")
    engine.core.cache.check()


def test_passages_that_nobody_asked_for_step_aside_for_an_activated_adapter(made: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = made
    tokens = prompt(3, 43) + INVOCATION + prompt(4, 9)
    [expected] = make(folder).generate([tokens], GREEDY, adapter="late")
    engine = make(folder)
    default = BlendSpec((Span(3, 40),), is_default=True)
    [found] = engine.generate([tokens], GREEDY, adapter="late", blends=[default])
    assert found.completions[0].token_ids == expected.completions[0].token_ids
    assert found.usage.num_extra_tokens == 0
    with pytest.raises(InvalidRequest, match="starts within the prompt"):
        engine.generate([tokens], GREEDY, adapter="late", blends=[BlendSpec(default.spans)])


@pytest.mark.parametrize(
    ("config", "error", "named"),
    [
        ({"use_dora": True}, UnsupportedModel, "use_dora"),
        ({"bias": "all"}, UnsupportedModel, "bias"),
        ({"rank_pattern": {"q_proj": 2}}, UnsupportedModel, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedModel, "modules_to_save"),
        ({"r": 5}, WeightsError, "lora_A"),
        ({"r": None}, WeightsError, "lora_alpha"),
        ({"alora_invocation_tokens": "x"}, WeightsError, "invocation"),
    ],
)
def test_what_is_not_this_models_lora_is_refused(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, config: dict[str, Any], error: type[Exception], named: str
) -> None:
    folder, merged = made
    adapters.save_adapter(merged["base"], tmp_path, 1, modules=("q_proj",))
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    engine = make(folder)
    with pytest.raises(error, match=named):
        engine.adapters.load("bad", tmp_path)
    assert "bad" not in engine.adapters.names


def test_what_is_no_adapter_is_refused(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = made
    engine = make(folder)
    with pytest.raises(WeightsError, match="adapter_config"):
        engine.adapters.load("bad", tmp_path)
    (tmp_path / "adapter_config.json").write_bytes((folder / "one" / "adapter_config.json").read_bytes())
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x10" * 99)
    with pytest.raises(WeightsError, match="corrupt"):
        engine.adapters.load("bad", tmp_path)
    with pytest.raises(ConfigError, match="own"):
        engine.adapters.load(engine.model_name, folder / "one")
