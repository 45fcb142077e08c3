"""Passages reused at any position, over real decoders with random weights."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pagoda.engine.engine import Engine
from pagoda.engine.params import BeamSearch, BlendSpec, SamplingParams, Span
from pagoda.engine.prefill_speed import PrefillSpeed
from pagoda.errors import ContextTooLong, InvalidRequest
from pagoda.kv.keys import Scope
from pagoda.sparse.spec import parse_kv_policy
from tests.model import models, tokenizers_made_here
from tests.waiting import PATIENCE_S

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
UNGUARDED = float("inf"), 0.0
RNG = np.random.default_rng(11)
SYSTEM, QUESTION, *DOCUMENTS = (RNG.integers(3, 300, n).tolist() for n in (21, 13, 45, 64, 37))


@pytest.fixture(scope="module", params=["llama", "llama-rope-yarn", "full-and-window", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return build(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return build("llama", tmp_path_factory.mktemp("llama"))


def build(name: str, folder: Path) -> tuple[Path, Any]:
    tokenizer = tokenizers_made_here.byte_level()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512, "num_hidden_layers": 4}
    if name == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * 2
        reference = models.build("gemma3", sliding_window=32, layer_types=kinds, **sizes)
    elif name == "full-and-window":
        reference = models.build("qwen2-mixed-windows", sliding_window=32, max_window_layers=2, **sizes)
    else:
        reference = models.build(name, **sizes)
    return tokenizers_made_here.save(tokenizer, models.save(reference, folder)), reference


def make(folder: Path, **options: Any) -> Engine:
    settings = {"dtype": "float32", "kv_memory": "4MiB", "max_num_seqs": 16, "token_budget": 48, "block_size": 8}
    return Engine(str(folder), progress=False, **(settings | options))


def prompt(*documents: int, system: list[int] = SYSTEM) -> tuple[list[int], tuple[Span, ...]]:
    """A system prompt, documents by number, and a question; where the documents are."""
    tokens, spans = list(system), []
    for number in documents:
        spans.append(Span(len(tokens), len(tokens) + len(DOCUMENTS[number])))
        tokens += DOCUMENTS[number]
    return tokens + QUESTION, tuple(spans)


@contextmanager
def logits_of(engine: Engine) -> Iterator[list[torch.Tensor]]:
    """The logits of every step."""
    seen: list[torch.Tensor] = []
    decoder = engine._runner.decoder
    forward = decoder.forward

    def spy(*args: Any, **options: Any) -> torch.Tensor:
        seen.append(forward(*args, **options))
        return seen[-1]

    decoder.forward = spy  # type: ignore[method-assign]
    yield seen
    del decoder.forward


def run(engine: Engine, tokens: list[int], blend: BlendSpec | None, params: SamplingParams = GREEDY) -> Any:
    [generation] = engine.generate([tokens], params, blends=[blend])
    engine.core.cache.check()
    assert engine.core.cache.num_held_blocks == 0
    assert not engine.core.has_work
    return generation


def last_logits(engine: Engine, tokens: list[int], blend: BlendSpec | None) -> tuple[torch.Tensor, Any]:
    """The logits after a prompt, and its usage."""
    with logits_of(engine) as seen:
        generation = run(engine, tokens, blend, SamplingParams(max_tokens=1, temperature=0.0))
    return seen[-1][-1], generation.usage


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1), (2,)])
def test_at_ratio_one_logits_are_those_of_full_prefill(model: tuple[Path, Any], order: tuple[int, ...]) -> None:
    tokens, spans = prompt(*order)
    expected, _ = last_logits(make(model[0]), tokens, None)
    engine = make(model[0])
    for _ in ("passages computed", "passages found"):
        found, usage = last_logits(engine, tokens, BlendSpec(spans, ratio=1.0))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert usage.num_blended_tokens == 0
        assert usage.num_recomputed_tokens > 0


def test_a_passage_where_it_was_computed_is_exact_at_any_ratio(model: tuple[Path, Any]) -> None:
    """At position 0 nothing precedes it: as a prefix if it is found as one, and as a passage too."""
    tokens, spans = prompt(1, system=[])
    expected, _ = last_logits(make(model[0]), tokens, None)
    for ratio in (0.0, 0.15, 0.5):
        found, usage = last_logits(make(model[0]), tokens, BlendSpec(spans, ratio, *UNGUARDED))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert usage.num_hit_tokens == len(DOCUMENTS[1])
    engine = make(model[0])
    run(engine, [*tokens[: spans[0].stop], 5], None)
    engine.core.cache.lookup = lambda *_: engine.core.cache._hit(engine.core.cache.find(RNG.integers(3, 9, 0), Scope()))
    found, usage = last_logits(engine, tokens, BlendSpec(spans, 0.0, 0.0, 0.0))  # nothing deviates: nothing to guard
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert usage.num_hit_tokens == 0
    assert usage.num_blended_tokens == len(DOCUMENTS[1])


def test_prompts_of_one_passage_order_are_exact_once_computed(model: tuple[Path, Any]) -> None:
    tokens, spans = prompt(0, 1)
    engine = make(model[0])
    expected, _ = last_logits(engine, tokens, None)
    found, usage = last_logits(engine, tokens, BlendSpec(spans, 0.0, *UNGUARDED))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert usage.num_hit_tokens == len(tokens) - 1
    assert usage.num_blended_tokens == 0


@pytest.mark.parametrize("budget", [16, 48, 512])
def test_naive_reuse_equals_a_reference_that_pastes_keys_and_values(llama: tuple[Path, Any], budget: int) -> None:
    """Layers 0 and 1 of the whole prompt, the others of each passage after the start token alone, then the question."""
    folder, reference = llama
    tokens, spans = prompt(2, 0, 1)
    expected = pasted(reference, tokens, spans)
    found, usage = last_logits(make(folder, token_budget=budget), tokens, BlendSpec(spans, 0.0, *UNGUARDED))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert usage.num_blended_tokens == sum(span.stop - span.start for span in spans)
    assert usage.num_recomputed_tokens == 0
    whole = models.reference_logits(reference, tokens)[-1]
    assert (found - whole).abs().max() > 0.01  # or this test would show nothing


def pasted(reference: Any, tokens: list[int], spans: tuple[Span, ...]) -> torch.Tensor:
    question = spans[-1].stop
    with torch.inference_mode():
        whole = caches(reference, tokens[:question], 0)
        alone = [(span, caches(reference, behind_the_start(tokens, span), span.start - 1)) for span in spans]
        past = transformers.DynamicCache()
        for layer, (keys, values) in enumerate(whole):
            keys, values = keys.clone(), values.clone()
            for span, cache in alone if layer > 1 else ():
                for mine, theirs in zip((keys, values), cache[layer], strict=True):
                    mine[:, :, span.start : span.stop] = theirs[:, :, 1:]
            past.update(keys, values, layer)
        rest = torch.tensor([tokens[question:]])
        places = torch.arange(question, len(tokens))
        return reference(rest, past_key_values=past, position_ids=places[None], cache_position=places).logits[0, -1]


def behind_the_start(tokens: list[int], span: Span) -> list[int]:
    return tokens[:1] + tokens[span.start : span.stop]


def caches(reference: Any, tokens: list[int], first: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    places = torch.arange(first, first + len(tokens))[None]
    cache = reference(torch.tensor([tokens]), position_ids=places, use_cache=True).past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers]


def test_more_recomputed_is_nearer_to_full_prefill(llama: tuple[Path, Any]) -> None:
    tokens, spans = prompt(2, 0, 1)
    expected, _ = last_logits(make(llama[0]), tokens, None)
    errors = []
    for ratio in (0.0, 0.5, 0.9, 1.0):
        found, usage = last_logits(make(llama[0]), tokens, BlendSpec(spans, ratio, *UNGUARDED))
        errors.append(float((found - expected).norm()))
        share = usage.num_recomputed_tokens / (usage.num_recomputed_tokens + usage.num_blended_tokens)
        assert share == pytest.approx(ratio, abs=0.05)
    assert errors[-1] < 1e-3 < errors[2] < errors[0]


def test_what_was_computed_before_makes_no_difference(model: tuple[Path, Any]) -> None:
    tokens, spans = prompt(2, 1)
    blend = BlendSpec(spans, 0.2, *UNGUARDED)
    cold = run(make(model[0]), tokens, blend)
    engine = make(model[0])
    for number in (0, 1, 2):
        other, of_other = prompt(number, 0)
        run(engine, other, BlendSpec(of_other))
    for _ in range(2):
        warm = run(engine, tokens, blend)
        assert warm.completions[0].token_ids == cold.completions[0].token_ids
    assert warm.usage.num_blended_tokens >= cold.usage.num_blended_tokens


def test_blended_kv_is_found_by_nobody(model: tuple[Path, Any]) -> None:
    tokens, spans = prompt(2, 0, 1)
    expected, _ = last_logits(make(model[0]), tokens, None)
    engine = make(model[0])
    run(engine, tokens, BlendSpec(spans, 0.1, *UNGUARDED))
    hit = engine.core.cache.lookup(np.array(tokens, dtype=np.int32), Scope())
    assert hit.num_tokens <= len(SYSTEM)  # what precedes the first passage is exact, and for all to share
    found, usage = last_logits(engine, tokens, None)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert usage.num_hit_tokens >= len(SYSTEM) // 8 * 8


def test_others_run_in_the_same_steps_and_notice_nothing(model: tuple[Path, Any]) -> None:
    folder, _ = model
    blended = [prompt(2, 0, 1), prompt(1, 2)]
    plain = [RNG.integers(3, 300, n).tolist() for n in (5, 40, 90)]
    alone = [run(make(folder), tokens, None).completions[0].token_ids for tokens in plain]
    blends = [BlendSpec(spans, 0.2, *UNGUARDED) for _, spans in blended]
    alone += [
        run(make(folder), tokens, blend).completions[0].token_ids
        for (tokens, _), blend in zip(blended, blends, strict=True)
    ]
    engine = make(folder, token_budget=64)
    inputs = [*plain, *(tokens for tokens, _ in blended)]
    for _ in range(2):
        together = engine.generate(inputs, GREEDY, blends=[None, None, None, *blends])
        engine.core.cache.check()
        # Chunks fall elsewhere, and each has its own choice: the blended ones may differ where the plain may not.
        assert [each.completions[0].token_ids for each in together][:3] == alone[:3]
    assert together[3].usage.num_blended_tokens > 0
    assert engine.core.cache.num_held_blocks == 0


def test_a_passage_twice_in_one_prompt_is_computed_once(llama: tuple[Path, Any]) -> None:
    engine = make(llama[0])
    tokens, spans = prompt(1, 1)
    generation = run(engine, tokens, BlendSpec(spans, 0.0, *UNGUARDED))
    assert generation.usage.num_blended_tokens == 2 * len(DOCUMENTS[1])
    # the system prompt, one passage alone, and the request's lookups: no second computation of the passage
    assert engine.core.cache.stats.num_query_tokens == len(tokens) + 1 + len(DOCUMENTS[1])


def test_a_passage_is_known_behind_its_start_token_only(llama: tuple[Path, Any]) -> None:
    """KV of the same tokens behind another token, or behind none, is another's, here and in tiers."""
    engine = make(llama[0], tiers=["dram:16MiB"], kv_memory="1MiB")
    cache = engine.core.cache
    bare, other = DOCUMENTS[1], [SYSTEM[0] + 1, *DOCUMENTS[1]]
    for tokens in (bare, other):
        run(engine, [*tokens, 5], None)
    cache.clear()
    assert cache.hierarchy.flush(PATIENCE_S)
    tokens, spans = prompt(1)
    before = cache.stats.num_restored_tokens
    run(engine, tokens, BlendSpec(spans, 0.0, *UNGUARDED))
    assert cache.stats.num_restored_tokens == before
    assert cache.find(np.array(behind_the_start(tokens, spans[0])), Scope()).num_tokens == 1 + len(DOCUMENTS[1])
    for known in (bare, other):
        assert cache.find(np.array(known), Scope()).num_tokens <= 1
    engine.close()


def test_two_requests_wait_for_one_computation(llama: tuple[Path, Any]) -> None:
    engine = make(llama[0])
    one, two = prompt(0, 1), prompt(1, 2)
    blends = [BlendSpec(spans, 0.0, *UNGUARDED) for _, spans in (one, two)]
    engine.generate([one[0], two[0]], GREEDY, blends=blends)
    alone = sum(1 + len(document) for document in DOCUMENTS)
    assert engine.core.cache.stats.num_query_tokens == len(one[0]) + len(two[0]) + alone


@pytest.mark.parametrize("shift", range(8))
def test_a_block_border_may_cut_a_passage_anywhere(llama: tuple[Path, Any], shift: int) -> None:
    folder, reference = llama
    tokens, spans = prompt(0, 2, system=SYSTEM[: 9 + shift])
    found, _ = last_logits(make(folder), tokens, BlendSpec(spans, 0.0, *UNGUARDED))
    torch.testing.assert_close(found, pasted(reference, tokens, spans), rtol=1e-4, atol=1e-4)


def test_empty_and_tiny_passages_are_computed_as_other_text(llama: tuple[Path, Any]) -> None:
    tokens, _ = prompt(0)
    expected, _ = last_logits(make(llama[0]), tokens, None)
    spans = (Span(0, 0), Span(3, 10), Span(30, 30), Span(len(tokens), len(tokens)))
    found, usage = last_logits(make(llama[0]), tokens, BlendSpec(spans, 0.0, *UNGUARDED))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert usage.num_blended_tokens == usage.num_recomputed_tokens == 0


def test_a_prompt_may_end_in_a_passage_or_be_one(llama: tuple[Path, Any]) -> None:
    engine = make(llama[0])
    tokens, spans = prompt(0, 1)
    tokens = tokens[: spans[-1].stop]
    for blend in (BlendSpec(spans, 0.0, *UNGUARDED), BlendSpec((Span(0, len(tokens)),), 0.0, *UNGUARDED)):
        assert len(run(engine, tokens, blend).completions[0].token_ids) == GREEDY.max_tokens


def test_bad_passages_are_refused_and_start_nothing(llama: tuple[Path, Any]) -> None:
    engine = make(llama[0])
    tokens, _ = prompt(0)
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (InvalidRequest, "after the prompt", lambda: run(engine, tokens, BlendSpec((Span(0, len(tokens) + 1),)))),
        (ContextTooLong, "512", lambda: run(engine, tokens * 9, BlendSpec((Span(4, 9 * len(tokens) - 4),)))),
        (InvalidRequest, "BlendSpecs", lambda: engine.generate([tokens], GREEDY, blends=[None, None])),
    ]
    for kind, message, call in refused:
        with pytest.raises(kind, match=message):
            call()
        assert not engine.core.has_work
        assert engine.core.cache.num_free_blocks == engine.core.cache.num_blocks


def test_quantized_keys_cannot_be_turned(llama: tuple[Path, Any]) -> None:
    tokens, spans = prompt(0)
    with pytest.raises(InvalidRequest, match="quantized"):
        make(llama[0], kv_format="int8").generate([tokens], GREEDY, blends=[BlendSpec(spans)])


def test_the_guard_computes_what_deviates_too_much(llama: tuple[Path, Any]) -> None:
    tokens, spans = prompt(2, 0, 1)
    expected, _ = last_logits(make(llama[0]), tokens, None)
    engine = make(llama[0])
    engine.core.add("r", tokens, GREEDY, blend=BlendSpec(spans, 0.1, max_deviation=0.0, min_confidence=0.0))
    request = engine.core._requests["r"]
    while engine.core.has_work:
        engine.core.step()
    assert request.blend is not None
    assert request.blend.num_whole > 0
    assert request.blend.num_whole == request.blend.num_raised
    assert request.usage.num_blended_tokens == 0
    found, _ = last_logits(make(llama[0]), tokens, BlendSpec(spans, 0.1, max_deviation=0.0, min_confidence=0.0))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


UNSURE = 1.0  # more than any probability


@pytest.mark.parametrize("params", [GREEDY, dataclasses.replace(GREEDY, n=3), SamplingParams(beam=BeamSearch(2))])
def test_a_doubted_prompt_is_computed_whole(model: tuple[Path, Any], params: SamplingParams) -> None:
    tokens, spans = prompt(2, 0, 1)
    params = dataclasses.replace(params, max_tokens=5)
    expected = run(make(model[0]), tokens, None, params)
    engine = make(model[0])
    stats: list[Any] = []
    engine.core.observers.append(types.SimpleNamespace(on_step=id, on_admitted=max, on_finished=stats.append))
    found = run(engine, tokens, BlendSpec(spans, 0.0, math.inf, UNSURE), params)
    assert [each.token_ids for each in found.completions] == [each.token_ids for each in expected.completions]
    assert found.usage.num_blended_tokens == found.usage.num_recomputed_tokens == 0
    assert (stats[0].num_blends_raised, stats[0].num_blends_whole) == (1, 1)
    # Its KV is exact now, and for all to share.
    assert run(engine, tokens, None, params).usage.num_hit_tokens == len(tokens) - 1


def test_a_prompt_is_doubted_before_its_first_token_alone(llama: tuple[Path, Any]) -> None:
    """Not where no token is wanted, nor where no passage was found, nor again once the answer has begun."""
    tokens, spans = prompt(2, 0)
    doubting = BlendSpec(spans, 0.0, math.inf, UNSURE)
    engine = make(llama[0])
    assert run(engine, tokens, doubting, SamplingParams(max_tokens=0)).usage.num_blended_tokens > 0
    engine.core.add("sure", tokens, GREEDY, blend=BlendSpec(spans, 0.0, *UNGUARDED))
    request = engine.core._requests["sure"]
    while request.samples[0].num_output_tokens < 3:
        engine.core.step()
    assert request.blend is not None
    request.blend.spec = doubting
    engine.core._scheduler.preempt_all()
    while engine.core.has_work:
        engine.core.step()
    assert request.usage.num_blended_tokens > 0
    assert request.blend.num_whole == 0


def test_others_go_on_in_the_step_in_which_a_prompt_is_doubted(model: tuple[Path, Any]) -> None:
    folder, _ = model
    (sure, of_sure), (doubted, of_doubted) = prompt(2, 0), prompt(0, 1)
    plain = RNG.integers(3, 300, 30).tolist()
    prompts = [doubted, plain, sure]
    expected = [run(make(folder), tokens, None).completions[0].token_ids for tokens in (doubted, plain)]
    blends = [BlendSpec(of_doubted, 0.1, math.inf, UNSURE), None, BlendSpec(of_sure, 0.1, *UNGUARDED)]
    tight = make(folder).core.cache.layout.pool_block_bytes * 70
    for kv_memory in (tight, "4MiB"):
        engine = make(folder, token_budget=512, kv_memory=kv_memory)
        found = engine.generate(prompts, GREEDY, blends=blends)
        assert [each.completions[0].token_ids for each in found[:2]] == expected
        assert len(found[2].completions[0].token_ids) == GREEDY.max_tokens
        engine.core.cache.check()
        assert engine.core.cache.num_held_blocks == 0
    assert [each.usage.num_blended_tokens > 0 for each in found] == [False, False, True]


def test_scopes_do_not_share_passages(llama: tuple[Path, Any]) -> None:
    engine = make(llama[0])
    tokens, spans = prompt(0, 1)
    blend = BlendSpec(spans, 0.0, *UNGUARDED)
    for scope in (Scope("a"), Scope("b"), Scope("a", "salt"), Scope("a")):
        before = engine.core.cache.stats.num_query_tokens
        engine.generate([tokens], GREEDY, scope=scope, blends=[blend])
        computed = engine.core.cache.stats.num_query_tokens - before - len(tokens)
        first = scope != Scope("a") or before == 0
        assert computed == (2 + len(DOCUMENTS[0]) + len(DOCUMENTS[1]) if first else 0)


def test_an_abort_ends_the_passages_that_nobody_else_wants(llama: tuple[Path, Any]) -> None:
    engine = make(llama[0], token_budget=16)
    core = engine.core
    (one, of_one), (two, of_two) = prompt(0, 1), prompt(1, 2)
    core.add("one", one, GREEDY, blend=BlendSpec(of_one))
    core.add("two", two, GREEDY, blend=BlendSpec(of_two))
    core.step()
    [output] = core.abort("one")
    assert output.request_id == "one"
    live = set(core._requests)
    assert "two" in live
    assert len(live) == 3  # documents 1 and 2 are wanted, document 0 no more
    core.abort("two")
    assert not core.has_work
    assert core.cache.num_held_blocks == 0
    core.cache.check()


def test_nobody_is_told_of_passages(llama: tuple[Path, Any]) -> None:
    engine = make(llama[0])
    finished: list[str] = []
    admitted: list[int] = []

    class Observer:
        def on_step(self, stats: Any) -> None:
            pass

        def on_admitted(self, num_query_tokens: int, num_hit_tokens: int) -> None:
            admitted.append(num_query_tokens)

        def on_finished(self, stats: Any) -> None:
            finished.append(stats.request_id)

    engine.core.observers.append(Observer())
    tokens, spans = prompt(0, 1)
    engine.core.add("mine", tokens, GREEDY, blend=BlendSpec(spans))
    outputs = []
    while engine.core.has_work:
        outputs += engine.core.step()
    assert {output.request_id for output in outputs} == {"mine"}
    assert finished == ["mine"]
    assert admitted == [len(tokens)]
    assert engine.core.history.ids("") == ["mine"]


def test_samples_share_a_blended_prompt(llama: tuple[Path, Any]) -> None:
    tokens, spans = prompt(2, 0)
    blend = BlendSpec(spans, 0.1, *UNGUARDED)
    one = run(make(llama[0]), tokens, blend)
    many = run(make(llama[0]), tokens, blend, dataclasses.replace(GREEDY, n=3))
    assert [c.token_ids for c in many.completions] == [one.completions[0].token_ids] * 3


def test_too_small_a_pool_ends_in_answers_all_the_same(llama: tuple[Path, Any]) -> None:
    folder, _ = llama
    tight = make(folder, kv_memory=make(folder).core.cache.layout.pool_block_bytes * 30)
    inputs = [prompt(0, 1, 2), prompt(2, 1, 0), prompt(1, 0)]
    blends = [BlendSpec(spans, 0.1, *UNGUARDED) for _, spans in inputs]
    outputs = tight.generate([tokens for tokens, _ in inputs], GREEDY, blends=blends)
    assert all(len(output.completions[0].token_ids) == GREEDY.max_tokens for output in outputs)
    tight.core.cache.check()
    assert tight.core.cache.num_held_blocks == 0


def test_passages_come_back_from_tiers(llama: tuple[Path, Any]) -> None:
    engine = make(llama[0], tiers=["dram:16MiB"], kv_memory="1MiB")
    tokens, spans = prompt(0, 1)
    blend = BlendSpec(spans, 0.0, *UNGUARDED)
    first = run(engine, tokens, blend)
    engine.core.cache.clear()
    assert engine.core.cache.hierarchy.flush(PATIENCE_S)
    assert engine.core.cache.num_cached_blocks == 0
    engine.core._scheduler.prefill_speed = PrefillSpeed(100.0)  # a busy machine restores later than it computes
    again = run(engine, tokens, blend)
    assert again.completions[0].token_ids == first.completions[0].token_ids
    assert again.usage.num_blended_tokens == first.usage.num_blended_tokens
    assert engine.core.cache.stats.num_restored_tokens > 0
    engine.close()


def test_a_window_forgets_the_middle_of_a_long_passage_which_is_computed(tmp_path: Path) -> None:
    folder, _ = build("full-and-window", tmp_path)
    engine = make(folder, kv_memory="4MiB")
    document = RNG.integers(3, 300, 200).tolist()
    tokens = SYSTEM + document + QUESTION
    blend = BlendSpec((Span(len(SYSTEM), len(SYSTEM) + 200),), 0.0, *UNGUARDED)
    expected = run(engine, tokens, blend)
    cache = engine.core.cache
    match = cache.find(np.array(tokens[:1] + document, dtype=np.int32), Scope())
    assert match.num_tokens == 201
    assert expected.usage.num_blended_tokens == 200
    evicted = cache.evict(10)  # those that slid out of the window go first
    assert evicted >= 10
    again = run(engine, tokens, blend)
    assert 0 < again.usage.num_blended_tokens < 200


def test_weights_that_change_take_passages_with_them(llama: tuple[Path, Any], tmp_path: Path) -> None:
    engine = make(llama[0])
    tokens, spans = prompt(0, 1)
    run(engine, tokens, BlendSpec(spans))
    sizes = {"vocab_size": engine.spec.vocab_size, "max_position_embeddings": 512, "num_hidden_layers": 4}
    other = models.save(models.build("llama", seed=3, **sizes), tmp_path)
    tokenizers_made_here.save(tokenizers_made_here.byte_level(), other)
    engine.reload_weights(str(other))
    expected, _ = last_logits(make(other), tokens, BlendSpec(spans, 0.0, *UNGUARDED))
    found, _ = last_logits(engine, tokens, BlendSpec(spans, 0.0, *UNGUARDED))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_passages_and_policies_that_drop_tokens_share_steps_but_no_request(llama: tuple[Path, Any]) -> None:
    folder, _ = llama
    tokens, spans = prompt(2, 0)
    plain = RNG.integers(3, 300, 90).tolist()
    blend, sparse = BlendSpec(spans, 0.1, *UNGUARDED), dataclasses.replace(GREEDY, kv_policy=parse_kv_policy("h2o:40"))
    with pytest.raises(InvalidRequest, match="kv_policy"):
        make(folder).generate([tokens], sparse, blends=[blend])
    default = make(folder, kv_policy="h2o:40").generate([tokens], GREEDY, blends=[blend])
    assert default[0].sparse is None, "the server's default is not for requests that reuse passages"
    assert default[0].completions[0].token_ids == run(make(folder), tokens, blend).completions[0].token_ids
    alone = [run(make(folder), tokens, blend), run(make(folder), plain, None, sparse)]
    engine = make(folder, token_budget=256)
    engine.generate([tokens], GREEDY, blends=[blend])
    together = engine.generate([tokens, plain], [GREEDY, sparse], blends=[blend, None])
    assert together[1].completions[0].token_ids == alone[1].completions[0].token_ids
    assert together[0].usage.num_blended_tokens > 0
    engine.core.cache.check()
    assert engine.core.cache.num_held_blocks == 0


def computed(engine: Engine) -> int:
    """Tokens that went through the engine so far."""
    return engine.core.cache.tenants.of("").num_computed_tokens


def test_what_is_computed_beside_a_prompt_is_told_to_who_caused_it(llama: tuple[Path, Any]) -> None:
    engine = make(llama[0])
    tokens, spans = prompt(0, 1)
    blend = BlendSpec(spans, 0.0, *UNGUARDED)
    before = 0
    for is_first in (True, False):
        usage = run(engine, tokens, blend).usage
        assert (usage.num_extra_tokens >= usage.num_blended_tokens) == is_first
        own = usage.num_prompt_tokens - usage.num_hit_tokens + usage.num_output_tokens - 1
        assert computed(engine) - before == usage.num_extra_tokens + own
        before = computed(engine)
    assert usage.num_extra_tokens == 0


def test_a_passage_that_two_wait_for_is_counted_once(llama: tuple[Path, Any]) -> None:
    engine = make(llama[0])
    one, two = prompt(0, 1), prompt(1, 2)
    blends = [BlendSpec(spans, 0.0, *UNGUARDED) for _, spans in (one, two)]
    usages = [each.usage for each in engine.generate([one[0], two[0]], GREEDY, blends=blends)]
    own = sum(each.num_prompt_tokens - each.num_hit_tokens + each.num_output_tokens - 1 for each in usages)
    assert computed(engine) == own + sum(each.num_extra_tokens for each in usages)
    assert usages[1].num_extra_tokens < len(DOCUMENTS[1]) + len(DOCUMENTS[2])


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_passage_whose_first_reader_left_is_told_to_the_next(llama: tuple[Path, Any], num_steps: int) -> None:
    engine = make(llama[0], token_budget=16, max_num_seqs=8)
    (first, first_spans), (second, spans) = prompt(1), prompt(1, 2)
    expected = run(make(llama[0], token_budget=16, max_num_seqs=8), second, BlendSpec(spans, 0.0, *UNGUARDED)).usage
    engine.core.add("left", first, GREEDY, blend=BlendSpec(first_spans, 0.0, *UNGUARDED))
    for name in ("next", "last"):
        engine.core.add(name, second, GREEDY, blend=BlendSpec(spans, 0.0, *UNGUARDED))
    outputs = [output for _ in range(num_steps) for output in engine.core.step()]
    outputs += engine.core.abort("left")
    while engine.core.has_work:
        outputs += engine.core.step()
    usages = {output.request_id: output.usage for output in outputs if output.finished}
    extra = {name: usages[name].num_extra_tokens for name in ("left", "next", "last")}
    assert extra == {"left": 0, "next": expected.num_extra_tokens, "last": 0}


def test_a_doubted_blend_was_computed_for_nothing(llama: tuple[Path, Any]) -> None:
    tokens, spans = prompt(2, 0, 1)
    sure = run(make(llama[0]), tokens, BlendSpec(spans, 0.0, *UNGUARDED)).usage
    doubted = run(make(llama[0]), tokens, BlendSpec(spans, 0.0, math.inf, UNSURE)).usage
    given_up = len(tokens) - spans[0].start - sure.num_blended_tokens
    assert doubted.num_extra_tokens == sure.num_extra_tokens + given_up
    assert doubted.num_blended_tokens == 0


@pytest.mark.parametrize(("kv_format", "policy"), [("int8", None), ("auto", "h2o:40")])
def test_a_default_steps_aside_where_passages_cannot_be_reused(
    llama: tuple[Path, Any], kv_format: str, policy: str | None
) -> None:
    tokens, spans = prompt(0)
    params = dataclasses.replace(GREEDY, kv_policy=None if policy is None else parse_kv_policy(policy))
    expected = run(make(llama[0], kv_format=kv_format), tokens, None, params)
    engine = make(llama[0], kv_format=kv_format)
    found = run(engine, tokens, BlendSpec(spans, is_default=True), params)
    assert found.completions[0].token_ids == expected.completions[0].token_ids
    assert (found.usage.num_blended_tokens, found.usage.num_extra_tokens) == (0, 0)
    assert (found.sparse is None) == (policy is None)
    with pytest.raises(InvalidRequest, match=r"quantized|kv_policy"):
        run(engine, tokens, BlendSpec(spans), params)
