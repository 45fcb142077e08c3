"""First tokens in full: whose they are, that what is given up is computed again, and that none is ever another's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pagoda.engine.engine import Engine
from pagoda.engine.first_tokens import FirstRows, _First
from pagoda.engine.params import SamplingParams
from pagoda.kernels import KVView
from pagoda.kv.keys import Scope
from pagoda.model.batch import ForwardBatch
from pagoda.model.decoder import Decoder
from tests.model import adapters, models, tokenizers_made_here

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
INVOCATION = [7, 8, 9]
FIRST = 40


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model's folder, and the model as Transformers has it; Gemma's layers have windows of 24 tokens, but for two."""
    tokenizer = tokenizers_made_here.byte_level()
    sizes: dict[str, Any] = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 256}
    if request.param == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * 2
        sizes |= {"sliding_window": 24, "num_hidden_layers": 4, "layer_types": kinds}
    model = models.build(request.param, **sizes)
    folder = models.save(model, tmp_path_factory.mktemp(request.param))
    return tokenizers_made_here.save(tokenizer, folder), model


def make(folder: Path, **options: Any) -> Engine:
    settings: dict[str, Any] = {"dtype": "float32", "kv_format": "int4", "kv_memory": "4MiB", "block_size": 8}
    return Engine(str(folder), progress=False, **(settings | {"token_budget": 48, "max_num_seqs": 8} | options))


def prompt(first: int, length: int = 45) -> list[int]:
    return [first, *np.random.default_rng(first).integers(10, 300, length - 1).tolist()]


def outputs(engine: Engine, inputs: list[list[int]], adapter: str | None = None) -> list[list[int]]:
    found = engine.generate(inputs, GREEDY, adapter=adapter)
    engine.core.cache.check()
    return [list(each.completions[0].token_ids) for each in found]


def table(engine: Engine) -> FirstRows:
    staged = engine._runner._staged
    assert staged is not None
    return staged.first_rows


def held(engine: Engine, token: int, adapter: str = "") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the row of a first token has, layer by layer: keys and values `[num_kv_heads, head_dim]`."""
    rows = table(engine)
    row = rows._rows[_First(token, "", "", adapter)]
    return [(view.keys[row, :, 0], view.values[row, :, 0]) for view in rows._views]


def check_rows(engine: Engine, token: int, model: transformers.PreTrainedModel, adapter: str = "") -> None:
    with torch.inference_mode():
        wanted = model(torch.tensor([[token]]), use_cache=True).past_key_values
    for layer, (keys, values) in enumerate(held(engine, token, adapter)):
        torch.testing.assert_close(keys, wanted.layers[layer].keys[0, :, 0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values, wanted.layers[layer].values[0, :, 0], rtol=1e-4, atol=1e-4)


def check_nothing_leaked(engine: Engine) -> None:
    rows = table(engine)
    num_rows = len(rows._views[0].keys)
    assert sorted([*rows._free, *rows._rows.values()]) == list(range(num_rows))


def test_a_row_is_what_the_model_makes_of_the_token_alone(made: tuple[Path, Any]) -> None:
    folder, model = made
    engine = make(folder, max_num_seqs=4)
    outputs(engine, [prompt(first) for first in (FIRST, 41, 42)])
    for first in (FIRST, 41, 42):
        check_rows(engine, first, model)
    check_nothing_leaked(engine)


def test_tokens_that_were_given_up_are_computed_again(made: tuple[Path, Any]) -> None:
    """More beginnings than rows: all outputs are those of engines of their own, cold and after hits."""
    folder, model = made
    inputs = [prompt(FIRST + i, 30 + 3 * i) for i in range(7)]
    alone = [outputs(make(folder), [tokens])[0] for tokens in inputs]
    engine = make(folder, max_num_seqs=2)
    assert len(table(engine)._views[0].keys) == 3
    for tokens in (inputs, inputs[::-1], inputs):
        before = engine.core.cache.stats.num_hit_tokens
        assert outputs(engine, tokens) == [alone[tokens[0] - FIRST] for tokens in tokens]
        check_nothing_leaked(engine)
    assert engine.core.cache.stats.num_hit_tokens - before >= 7 * 24, "the last were warm"
    assert len(table(engine)._rows) == 3
    for first in table(engine)._rows:
        check_rows(engine, first.token, model)


def test_a_block_that_began_a_sequence_may_be_any_block_of_another(made: tuple[Path, Any]) -> None:
    folder, _ = made
    engine = make(folder, kv_memory="64KiB", token_budget=16, max_num_seqs=1)
    alone: dict[int, list[int]] = {}
    for round_ in range(2):
        for first in range(FIRST, FIRST + 5):
            tokens = prompt(first, 60)
            if not round_:
                [alone[first]] = outputs(make(folder), [tokens])
            assert outputs(engine, [tokens]) == [alone[first]]
    assert engine.core.cache.stats.num_evicted_blocks > 0


def test_no_tenant_and_no_salt_is_spared_what_another_has_computed(
    made: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the time to a first token would say with what others' prompts begin."""
    folder, _ = made
    scopes = [Scope("a"), Scope("b"), Scope("a", "pepper")]
    tokens = prompt(FIRST)
    [alone] = outputs(make(folder), [tokens])
    engine = make(folder)
    decoder, rows, passes = engine._runner.decoder, table(engine), []

    def forward(batch: ForwardBatch, kv: Sequence[KVView], *others: Any, **options: Any) -> torch.Tensor:
        passes.append(kv is rows._views)
        return Decoder.forward(decoder, batch, kv, *others, **options)

    monkeypatch.setattr(decoder, "forward", forward)
    for count, scope in enumerate([*scopes, *scopes]):
        passes.clear()
        [output] = engine.generate([tokens], GREEDY, scope=scope)
        assert list(output.completions[0].token_ids) == alone
        assert passes.count(True) == (count < len(scopes)), "one for the first of a scope, none for the next"
    assert set(rows._rows) == {_First(FIRST, scope.namespace, scope.salt, "") for scope in scopes}
    check_nothing_leaked(engine)


def test_rows_in_bfloat16_are_what_tiles_read(tmp_path: Path) -> None:
    tokenizer = tokenizers_made_here.byte_level()
    model = models.build("llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=256, head_dim=64)
    folder = tokenizers_made_here.save(tokenizer, models.save(model.bfloat16(), tmp_path))
    engine = make(folder, dtype="bfloat16", block_size=16)
    outputs(engine, [prompt(FIRST), prompt(41)])
    with torch.inference_mode():
        wanted = model.float()(torch.tensor([[FIRST]]), use_cache=True).past_key_values
    for layer, part in enumerate(held(engine, FIRST)):
        for got, want in zip(part, (wanted.layers[layer].keys, wanted.layers[layer].values), strict=True):
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got.float(), want[0, :, 0], rtol=5e-2, atol=5e-2)
    for _, values in held(engine, FIRST):
        values.fill_(torch.nan)  # so whoever reads them fails, and nobody else
    for name, first in (("bad", FIRST), ("good", 41)):
        engine.core.add(name, prompt(first), GREEDY)
    failed = []
    while engine.core.has_work:
        failed += [output.request_id for output in engine.core.step() if output.failure is not None]
    assert failed == ["bad"]


def test_an_adapter_has_rows_of_its_own_from_its_first_token_on(made: tuple[Path, Any]) -> None:
    folder, model = made
    if model.config.model_type != "llama":
        pytest.skip("adapters know nothing of windows: one model is enough")
    merged = adapters.save_adapter(model, folder / "one", 1)
    adapters.save_adapter(model, folder / "late", 2, alora_invocation_tokens=INVOCATION)
    tokens = [*prompt(FIRST, 40), *INVOCATION, 11, 12]

    def with_adapters() -> Engine:
        engine = make(folder, max_num_seqs=8)
        for name in ("one", "late"):
            engine.adapters.load(name, folder / name)
        return engine

    names = (None, "one", "late")
    alone = {name: outputs(with_adapters(), [tokens], name)[0] for name in names}
    engine = with_adapters()
    for _ in range(2):
        said: dict[str, list[int]] = {str(name): [] for name in names}
        for name in names:
            engine.core.add(str(name), tokens, GREEDY, adapter=name)
        while engine.core.has_work:
            for output in engine.core.step():
                said[output.request_id] += output.deltas[0].token_ids
        assert said == {str(name): alone[name] for name in names}
    identities = {first.adapter for first in table(engine)._rows if first.token == FIRST}
    assert len(identities) == 2, "what is activated later changes no first token"
    check_rows(engine, FIRST, model)
    check_rows(engine, FIRST, merged, max(identities))


def test_new_weights_have_rows_of_their_own(made: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = made
    if model.config.model_type != "llama":
        pytest.skip("weights are weights")
    sizes = {"vocab_size": model.config.vocab_size, "max_position_embeddings": 256}
    other = models.build("llama", 2, **sizes)
    new = tokenizers_made_here.save(tokenizers_made_here.byte_level(), models.save(other, tmp_path))
    engine = make(folder)
    outputs(engine, [prompt(FIRST), prompt(41)])
    engine.reload_weights(str(new))
    assert outputs(engine, [prompt(FIRST)]) == outputs(make(new), [prompt(FIRST)])
    check_rows(engine, FIRST, other)
    assert list(table(engine)._rows) == [_First(FIRST, "", "", "")]
    check_nothing_leaked(engine)


def test_a_step_that_fails_leaves_no_row_that_was_not_computed(
    made: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = made
    engine = make(folder, max_num_seqs=2)
    outputs(engine, [prompt(first) for first in (41, 42, 43)])
    decoder = engine._runner.decoder

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of order")

    engine.core.add("one", prompt(FIRST), GREEDY)
    with monkeypatch.context() as patched:
        patched.setattr(decoder, "forward", fail)
        with pytest.raises(RuntimeError, match="out of order"):
            engine.core.step()
    check_nothing_leaked(engine)
    assert _First(FIRST, "", "", "") not in table(engine)._rows
    while engine.core.has_work:
        engine.core.step()
    check_rows(engine, FIRST, model)


def test_a_first_token_that_is_not_finite_fails_its_request_and_is_not_kept(made: tuple[Path, Any]) -> None:
    folder, model = made
    if model.config.model_type != "llama":
        pytest.skip("Gemma's embedding is its output matrix as well: a bad one is bad for all")
    engine = make(folder)
    good = outputs(engine, [prompt(41)])
    embedding = engine._runner.decoder.weights.embedding
    assert isinstance(embedding, torch.Tensor)
    sound = embedding[FIRST].clone()
    embedding[FIRST] = torch.nan
    for name, first in (("bad", FIRST), ("good", 41)):
        engine.core.add(name, prompt(first), GREEDY)
    failed = []
    while engine.core.has_work:
        failed += [output.request_id for output in engine.core.step() if output.failure is not None]
    assert failed == ["bad"]
    check_nothing_leaked(engine)
    embedding[FIRST] = sound
    assert outputs(engine, [prompt(FIRST), prompt(41)]) == [*outputs(make(folder), [prompt(FIRST)]), *good]
    check_rows(engine, FIRST, model)


def test_formats_that_quantize_tokens_one_by_one_keep_no_rows(made: tuple[Path, Any]) -> None:
    folder, _ = made
    for kv_format in ("int8", "int8/int4", "auto"):
        assert make(folder, kv_format=kv_format)._runner._staged is None
