"""InfiniGen and Quest in the engine: what is attended to, what is on the host, and that nothing is lost or kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda import Engine, SamplingParams
from pagoda.engine.outputs import Generation
from pagoda.errors import InvalidRequest
from pagoda.kv.lease import Lease
from pagoda.sparse.recall_sequence import RecallingSequence
from pagoda.sparse.spec import parse_kv_policy
from tests.sparse.conftest import make_engine, make_model, text
from tests.sparse.masked import Masked

POLICIES: dict[str, dict[str, Any]] = {
    "infinigen": {"name": "infinigen", "budget": 56, "recent": 8, "part": 0.5},
    "quest": {"name": "quest", "budget": 56, "recent": 8, "block": 8},
}
NUM_PROMPT, NUM_OUTPUT = 120, 40


def generate(engine: Engine, prompt: list[int], policy: dict[str, Any] | None, count: int = NUM_OUTPUT) -> Generation:
    wish = None if policy is None else parse_kv_policy(policy)
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=5, kv_policy=wish)
    [generation] = engine.generate([prompt], params)
    engine.core.cache.check()
    assert engine.core.cache.num_held_blocks == 0
    memory = engine.core.sparsity.memory
    assert memory.recall.host.num_held_bytes == 0
    return generation


class Seen:
    """Notes, for every decoded token, layer and KV head, which tokens were on the device as it attended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: dict[int, dict[int, list[list[int]]]] = {}
        original = RecallingSequence.before_attention

        def noted(sequence: RecallingSequence, layer: int, q: torch.Tensor, lease: Lease, start: int) -> None:
            original(sequence, layer, q, lease, start)
            kv = sequence._kv
            if kv is not None and layer in sequence._layers:
                unit = kv.sketch.unit
                fetched = kv.resident[layer][..., None] * unit + torch.arange(unit)
                recent = list(range(kv.num_units * unit, start))
                of_heads = [sorted({*row, *recent}) for row in fetched.flatten(1).tolist()]
                self.tokens.setdefault(start, {})[layer] = of_heads

        monkeypatch.setattr(RecallingSequence, "before_attention", noted)


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Layers enough to look ahead."""
    return make_model(tmp_path_factory.mktemp("deep"), "llama", num_hidden_layers=5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("infinigen", [(0, 0), (1, 1), (2, 3), (2, 2), (3, 4)]),
        ("quest", [(layer, layer) for layer in range(5)]),
    ],
)
def test_upper_layers_are_foretold(
    deep: tuple[Path, Any], name: str, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs of the layer that the model is at, and the one whose needs are asked for."""
    engine = make_engine(deep[0])
    recall = engine.core.sparsity.memory.recall
    at, asked = [0], []
    original = RecallingSequence.before_layer

    def before_layer(sequence: RecallingSequence, layer: int, *given: Any) -> None:
        at[0] = layer
        original(sequence, layer, *given)

    def queries(layer: int, residual: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        asked.append((at[0], layer))
        return recall.queries(layer, residual, positions)

    def rotated(layer: int, own: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        asked.append((at[0], layer))
        return recall.rotated(layer, own, positions)

    monkeypatch.setattr(RecallingSequence, "before_layer", before_layer)
    memory = replace(engine.core.sparsity.memory, recall=replace(recall, queries=queries, rotated=rotated))
    engine.core.sparsity = replace(engine.core.sparsity, memory=memory)
    generate(engine, text(NUM_PROMPT), POLICIES[name], 3)
    assert asked == 2 * expected


@pytest.mark.parametrize("kind", ["llama", "hybrid", "window_first", "deep"])
@pytest.mark.parametrize("name", POLICIES)
def test_every_step_is_dense_attention_to_what_is_on_the_device(
    name: str, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reference = request.getfixturevalue(kind)
    prompt = text(NUM_PROMPT)
    seen = Seen(monkeypatch)
    got = generate(make_engine(folder), prompt, POLICIES[name])
    masked = Masked(reference)
    tokens = prompt + got.completions[0].token_ids
    for now, token in enumerate(tokens[:-1]):
        everything = [[list(range(now))] * masked.num_kv_heads] * masked.num_layers
        of_layers = seen.tokens.get(now, {})
        assert bool(of_layers) == (now >= NUM_PROMPT)
        kept = [of_layers.get(layer, all_of) for layer, all_of in enumerate(everything)]
        assert all(len(head) < POLICIES[name]["budget"] for layer in of_layers.values() for head in layer)
        logits, _ = masked.step(token, kept, packed=False)
        if now >= NUM_PROMPT - 1:
            top = got.completions[0].logprobs[now - NUM_PROMPT + 1].top
            ids, values = zip(*top, strict=True)
            torch.testing.assert_close(torch.tensor(values), logits.log_softmax(-1)[list(ids)], rtol=0.0, atol=2e-3)
    assert len({tuple(head) for layer in seen.tokens[NUM_PROMPT + 9].values() for head in layer}) > 2


@pytest.mark.parametrize("name", POLICIES)
def test_blocks_come_back_and_all_bytes_are_reported(llama: tuple[Path, Any], name: str) -> None:
    engine = make_engine(llama[0])
    cache = engine.core.cache
    wish = parse_kv_policy(POLICIES[name])
    params = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True, kv_policy=wish)
    engine.core.add("r", text(NUM_PROMPT), params)
    held, reports = [], []
    while engine.core.has_work:
        reports += [output.sparse for output in engine.core.step()]
        held.append(cache.num_held_blocks)
        cache.check()
    assert max(held) == NUM_PROMPT // 8
    assert max(held[4:]) <= 56 // 8
    report = reports[-2]
    whole = int(cache.layout.bytes_per_token * (NUM_PROMPT + NUM_OUTPUT - 2))
    assert whole <= report.host_bytes < 2 * whole
    assert 0 < report.sketch_bytes < whole
    assert report.fetched_bytes > 0
    assert report.num_dropped_tokens == 0
    assert report.num_kept_tokens <= 56
    assert report.returned_bytes == report.num_returned_blocks * cache.layout.pool_block_bytes > 0


@pytest.mark.parametrize("name", POLICIES)
def test_within_the_budget_nothing_is_different(llama: tuple[Path, Any], name: str) -> None:
    engine, prompt = make_engine(llama[0]), text(NUM_PROMPT)
    full = generate(engine, prompt, None)
    got = generate(engine, prompt, POLICIES[name] | {"budget": NUM_PROMPT + NUM_OUTPUT})
    assert got.completions[0].token_ids == full.completions[0].token_ids
    assert got.sparse is None


@pytest.mark.parametrize("name", POLICIES)
def test_others_still_hit_the_exact_prefix(llama: tuple[Path, Any], name: str) -> None:
    engine, prompt = make_engine(llama[0]), text(NUM_PROMPT)
    sparse = generate(engine, prompt, POLICIES[name])
    again = generate(engine, prompt, POLICIES[name])
    dense = generate(engine, prompt, None)
    assert again.usage.num_hit_tokens == dense.usage.num_hit_tokens == NUM_PROMPT - 1
    assert again.completions[0].token_ids == sparse.completions[0].token_ids != dense.completions[0].token_ids
    assert dense.completions[0].token_ids == generate(make_engine(llama[0]), prompt, None).completions[0].token_ids


def test_sparse_requests_in_one_batch_with_dense_ones(llama: tuple[Path, Any]) -> None:
    prompts = [text(NUM_PROMPT - 13 * i, seed=i) for i in range(5)]
    wishes = [POLICIES["infinigen"], None, POLICIES["quest"], POLICIES["infinigen"], POLICIES["quest"]]
    alone = [
        generate(make_engine(llama[0]), prompt, wish).completions[0].token_ids
        for prompt, wish in zip(prompts, wishes, strict=True)
    ]
    params = [
        SamplingParams(
            max_tokens=NUM_OUTPUT,
            temperature=0.0,
            ignore_eos=True,
            kv_policy=None if wish is None else parse_kv_policy(wish),
        )
        for wish in wishes
    ]
    together = make_engine(llama[0]).generate(prompts, params)
    assert [each.completions[0].token_ids for each in together] == alone


@pytest.mark.parametrize("name", POLICIES)
def test_a_preempted_request_comes_to_the_same_end(llama: tuple[Path, Any], name: str) -> None:
    prompt = text(NUM_PROMPT)
    alone = generate(make_engine(llama[0]), prompt, POLICIES[name]).completions[0].token_ids
    engine = make_engine(llama[0])
    wish = parse_kv_policy(POLICIES[name])
    engine.core.add(
        "r", prompt, SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True, kv_policy=wish)
    )
    tokens: list[int] = []
    steps = 0
    while engine.core.has_work:
        for output in engine.core.step():
            tokens += [token for delta in output.deltas for token in delta.token_ids]
        steps += 1
        if steps in (12, 30):
            engine.core._scheduler.preempt_all()
            assert engine.core.sparsity.memory.recall.host.num_held_bytes == 0
            engine.core.cache.check()
    assert tokens == alone


def test_an_aborted_request_leaves_no_host_memory(llama: tuple[Path, Any]) -> None:
    engine = make_engine(llama[0])
    wish = parse_kv_policy(POLICIES["quest"])
    engine.core.add("r", text(NUM_PROMPT), SamplingParams(max_tokens=40, kv_policy=wish))
    for _ in range(8):
        engine.core.step()
    host = engine.core.sparsity.memory.recall.host
    assert host.num_held_bytes > 0
    engine.core.abort("r")
    assert host.num_held_bytes == 0


def test_what_host_memory_cannot_hold_is_refused(llama: tuple[Path, Any]) -> None:
    engine = make_engine(llama[0], host_memory=1)  # a block of 64 tokens
    wish = parse_kv_policy(POLICIES["quest"])
    with pytest.raises(InvalidRequest, match=r"^quest keeps .* host memory, which holds 64: `--host-memory`") as asked:
        engine.core.add("r", text(NUM_PROMPT), SamplingParams(max_tokens=40, kv_policy=wish))
    assert asked.value.param == "kv_policy"
    default = make_engine(llama[0], host_memory=1, kv_policy=POLICIES["quest"])
    with pytest.raises(InvalidRequest, match=r"^the server's default kv_policy .*: quest .*--host-memory") as told:
        default.core.add("r", text(NUM_PROMPT), SamplingParams(max_tokens=40))
    assert told.value.param is None
    without = make_engine(llama[0], host_memory=None)
    with pytest.raises(InvalidRequest, match="has none"):
        without.core.add("r", text(NUM_PROMPT), SamplingParams(max_tokens=40, kv_policy=wish))


def test_requests_wait_for_host_memory_that_others_hold(llama: tuple[Path, Any]) -> None:
    """Room for one at a time: the second is computed when the first is done, and loses nothing."""
    prompts = [text(NUM_PROMPT, seed=seed) for seed in (1, 2)]
    alone = [generate(make_engine(llama[0]), p, POLICIES["quest"]).completions[0].token_ids for p in prompts]
    probe = make_engine(llama[0]).core.sparsity.memory.recall.host
    engine = make_engine(llama[0], host_memory=4 * 64 * probe.bytes_per_token)
    wish = parse_kv_policy(POLICIES["quest"])
    params = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True, kv_policy=wish)
    together = engine.generate(prompts, params)
    assert [each.completions[0].token_ids for each in together] == alone


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "infinigen", "budget": 20}, "budget must be at least 33"),
        ({"name": "quest", "budget": 50}, "budget must be at least"),
        ({"name": "infinigen", "budget": 100, "alpha": -1}, "alpha must be 0 or more"),
        ({"name": "infinigen", "budget": 100, "alpha": "much"}, 'alpha must be a number, got "much"'),
        ({"name": "infinigen", "budget": 100, "alpha": True}, "alpha must be a number, got true"),
        ({"name": "infinigen", "budget": 100, "recent": 1.5}, "recent must be a whole number, got 1.5"),
        ({"name": "quest", "budget": 100, "block": "8"}, "block must be a whole number"),
        ({"name": "infinigen", "budget": 100, "part": 0}, "part must be above 0"),
        ({"name": "infinigen", "budget": 100, "recent": 0}, "recent must be at least 1"),
        ({"name": "quest", "budget": 100, "block": 0}, "block must be between"),
        ({"name": "quest", "budget": 100, "alpha": 3}, "no setting 'alpha'"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_kv_policy(given)
