"""Engines with every KV format: outputs depend on neither the cache nor the batch, and nothing is left behind."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagoda.engine.engine import Engine
from pagoda.engine.outputs import StepStats
from pagoda.engine.params import SamplingParams
from pagoda.errors import ConfigError, ModelError
from pagoda.kv.keys import Scope
from pagoda.kv.lease import TierUse
from pagoda.kv.room import StagedRoom
from pagoda.kv.staging import StagedPool
from pagoda.kv.tiered import TieredCache
from tests.model import models, tokenizers_made_here
from tests.waiting import PATIENCE_S

LENGTH = 12
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
FORMATS = ["fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "int8/int4"]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizers_made_here.byte_level()
    sizes: dict[str, Any] = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 256}
    if request.param == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * 2
        sizes |= {"sliding_window": 24, "num_hidden_layers": 4, "layer_types": kinds}
    made = models.save(models.build(request.param, **sizes), tmp_path_factory.mktemp(request.param))
    return tokenizers_made_here.save(tokenizer, made)


def make(folder: Path, **options: Any) -> Engine:
    settings = {"dtype": "float32", "kv_memory": "4MiB", "max_num_seqs": 16, "token_budget": 48, "block_size": 8}
    return Engine(str(folder), progress=False, **(settings | options))


def prompts(count: int, shared: int = 43) -> list[list[int]]:
    rng = np.random.default_rng(5)
    common = rng.integers(3, 300, shared).tolist()
    return [common + rng.integers(3, 300, 1 + 5 * i).tolist() for i in range(count)]


def outputs(engine: Engine, inputs: list[list[int]]) -> list[tuple[int, ...]]:
    found = [generation.completions[0].token_ids for generation in engine.generate(inputs, GREEDY)]
    engine.core.cache.check()
    assert engine.core.cache.num_held_blocks == 0
    return [tuple(tokens) for tokens in found]


def of_both(llama: list[str], gemma: list[str]) -> pytest.MarkDecorator:
    """Each model with formats of its own: together they take long."""
    cases = [("llama", name) for name in llama] + [("gemma3", name) for name in gemma]
    return pytest.mark.parametrize(("folder", "kv_format"), cases, indirect=["folder"])


@of_both(FORMATS, ["int8", "int4"])
def test_outputs_are_the_same_however_they_are_computed(folder: Path, kv_format: str) -> None:
    inputs = prompts(3)
    one_at_a_time = [outputs(make(folder, kv_format=kv_format), [tokens])[0] for tokens in inputs]
    engine = make(folder, kv_format=kv_format)
    assert outputs(engine, inputs) == one_at_a_time  # cold, batched
    before = engine.core.cache.stats.num_hit_tokens
    assert outputs(engine, inputs) == one_at_a_time  # warm
    granule = 8 if kv_format == "int4" else 1
    hits = sum((len(tokens) - 1) // granule * granule for tokens in inputs)
    assert engine.core.cache.stats.num_hit_tokens - before == hits
    assert outputs(make(folder, kv_format=kv_format, token_budget=16), inputs) == one_at_a_time
    assert preempted(make(folder, kv_format=kv_format), inputs) == one_at_a_time


def preempted(engine: Engine, inputs: list[list[int]]) -> list[tuple[int, ...]]:
    """Outputs of requests that are all sent back to the queue every fifth step."""
    for index, tokens in enumerate(inputs):
        engine.core.add(str(index), tokens, GREEDY)
    said: list[tuple[int, ...]] = [()] * len(inputs)
    for step in itertools.takewhile(lambda _: engine.core.has_work, itertools.count(1)):
        for output in engine.core.step():
            said[int(output.request_id)] += tuple(output.deltas[0].token_ids)
        if step % 5 == 0:
            engine.core._scheduler.preempt_all()
            engine.core.cache.check()
    return said


def test_forks_and_beams_share_a_block_that_is_being_filled(folder: Path) -> None:
    engine = make(folder, kv_format="int4", max_num_seqs=4, token_budget=16)
    [tokens] = prompts(1)
    alone = outputs(make(folder, kv_format="int4"), [tokens])[0]
    [many] = engine.generate([tokens], SamplingParams(n=7, max_tokens=LENGTH, temperature=0.0, ignore_eos=True))
    assert {tuple(each.token_ids) for each in many.completions} == {alone}
    [beams] = engine.beam_search([tokens], 3, max_tokens=LENGTH, ignore_eos=True)
    [again] = make(folder, kv_format="int4").beam_search([tokens], 3, max_tokens=LENGTH, ignore_eos=True)
    assert beams.completions[0].token_ids == again.completions[0].token_ids
    engine.core.cache.check()


def test_the_staging_area_does_not_grow_with_requests_that_come_and_go(folder: Path) -> None:
    engine = make(folder, kv_format="int4", max_num_seqs=2, token_budget=16)
    pool = engine._runner._pool
    assert isinstance(pool, StagedPool)
    room = pool.staging.room
    num_groups = len(engine.core.cache.layout.groups)
    assert room == StagedRoom(num_passing=num_groups * 16 // 8, num_lasting=num_groups * (2 + 1))
    for seed in range(12):
        engine.core.add(f"r{seed}", prompts(1, 30 + seed)[0], GREEDY)
        for _ in range(6):
            engine.core.step()
        engine.core.abort(f"r{seed}")
    assert pool.staging.room == room
    assert outputs(engine, prompts(2)) == outputs(make(folder, kv_format="int4"), prompts(2))


def test_memory_counts_the_staging_area(folder: Path) -> None:
    sizes = {}
    for kv_format in ("fp32", "int8", "int4"):
        engine = make(folder, kv_format=kv_format, kv_memory="2MiB", max_num_seqs=4, token_budget=16)
        info = engine.cache_info()
        assert 0.95 * (2 << 20) < info.bytes_total <= 2 << 20
        sizes[kv_format] = info.tokens_total
    assert sizes["int8"] > 3 * sizes["fp32"] * 16 / 18  # heads of 16 values: 2 of 18 bytes are scales
    assert sizes["int4"] > sizes["int8"]


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_small_pool_runs_fewer_samples_at_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make(folder, kv_format="int4", kv_memory="512KiB")
    assert engine.config.max_num_seqs == 8
    assert "at most 8 run, not 16" in caplog.text
    assert "raise `--kv-memory`" in caplog.text
    assert engine.cache_info().bytes_total <= 512 << 10
    pool = engine._runner._pool
    assert isinstance(pool, StagedPool)
    room = pool.staging.room
    inputs = prompts(12, 20)
    assert outputs(engine, inputs) == outputs(make(folder, kv_format="int4"), inputs)
    assert pool.staging.room == room


def test_layers_that_are_skipped_are_stored_as_computed(folder: Path) -> None:
    engine = make(folder, kv_format="int4", kv_skip_layers=(0,))
    layout = engine.core.cache.layout
    assert [part.dtype for part in layout.layers[0].parts] == ["float32"] * 2
    assert layout.layers[1].parts[0].dtype == "uint8"
    inputs = prompts(3)
    assert outputs(engine, inputs) == [outputs(engine, [tokens])[0] for tokens in inputs]
    all_layers = range(engine.spec.num_layers)
    assert outputs(make(folder, kv_format="int4", kv_skip_layers=all_layers), inputs) == outputs(make(folder), inputs)


def test_blocks_are_as_large_as_the_format_likes_them(folder: Path) -> None:
    assert make(folder, kv_format="int4", block_size=None).cache_info().block_size == 32
    assert make(folder, kv_format="int8", block_size=None).cache_info().block_size == 16


@of_both(["int8", "int4"], [])  # Gemma's embedding is its output matrix as well: a bad one is bad for all
def test_a_request_that_goes_wrong_spoils_no_other(folder: Path, kv_format: str) -> None:
    engine = make(folder, kv_format=kv_format)
    inputs = prompts(3)
    good = outputs(engine, inputs)
    bad_token = 301
    engine._runner.decoder.weights.embedding[bad_token] = torch.nan
    for at in (41, 60):  # in a block that begins like others' and in one that does not
        bad = [*inputs[2][:43], *range(3, 40)]
        bad[at] = bad_token
        for name, tokens in (("bad", bad), ("good", inputs[2])):
            engine.core.add(name, tokens, GREEDY)
        failures, said = [], []
        while engine.core.has_work:
            for output in engine.core.step():
                if output.failure is not None:
                    failures.append((output.request_id, output.failure))
                elif output.request_id == "good":
                    said += output.deltas[0].token_ids
        assert [name for name, _ in failures] == ["bad"]
        assert isinstance(failures[0][1], ModelError)
        assert tuple(said) == good[2]
    assert outputs(engine, inputs) == good


@of_both(["int8", "fp8_e4m3"], ["int4"])
def test_what_a_tier_has_comes_back_and_only_in_its_own_format(folder: Path, kv_format: str, tmp_path: Path) -> None:
    tiers = [f"disk:{tmp_path}:64MiB"]
    [tokens] = prompts(1, 80)
    first = make(folder, kv_format=kv_format, tiers=tiers)
    expected = outputs(first, [tokens])
    first.close()

    def ask(**options: Any) -> tuple[list[list[int]], int]:
        engine = make(folder, tiers=tiers, **options)
        waits = replace(GREEDY, tier_use=TierUse(wait_s=math.inf))
        found = [generation.completions[0].token_ids for generation in engine.generate([tokens], waits)]
        engine.close()
        return found, engine.core.cache.stats.num_restored_tokens

    assert ask(kv_format=kv_format) == ([list(each) for each in expected], 80)
    for other in {"int8", "int4", "fp8_e5m2", "auto"} - {kv_format}:
        assert ask(kv_format=other)[1] == 0
    assert ask(kv_format=kv_format, kv_skip_layers=(1,))[1] == 0


def test_scopes_and_second_turns_hit_whole_blocks_only(folder: Path) -> None:
    engine = make(folder, kv_format="int4")
    [tokens] = prompts(1, 30)  # 31 tokens
    [first] = engine.generate([tokens], GREEDY)
    turn = [*tokens, *first.completions[0].token_ids, 7, 8]
    [second] = engine.generate([turn], GREEDY)
    assert second.usage.num_hit_tokens == (len(tokens) + LENGTH - 1) // 8 * 8
    other = [*tokens[:20], 5, 6, 7]
    [parted] = engine.generate([other], GREEDY)
    assert parted.usage.num_hit_tokens == 16
    [apart] = engine.generate([turn], GREEDY, scope=Scope(salt="other"))
    assert apart.usage.num_hit_tokens == 0
    assert apart.completions[0].token_ids == second.completions[0].token_ids


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_format": "int3"}, "int3"),
        ({"kv_format": "int8", "kv_skip_layers": (99,)}, "99"),
        ({"kv_format": "int4", "kv_memory": "8KiB"}, "too little"),
    ],
)
def test_settings_are_checked(folder: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make(folder, **options)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_lossy_tier_serves_only_those_who_allow_it_and_nobody_after_them(folder: Path) -> None:
    engine = make(folder, tiers=["dram:16MiB?write=through&codec=int8"])
    cache = engine.core.cache
    assert isinstance(cache, TieredCache)
    [tokens] = prompts(1, 80)
    exact = outputs(engine, [tokens])
    assert cache.hierarchy.flush(PATIENCE_S)
    for lossy in (None, False, True, True, None):
        cache.clear()
        use = TierUse(wait_s=math.inf, lossy=lossy)
        [found] = engine.generate([tokens], replace(GREEDY, tier_use=use))
        assert found.usage.num_hit_tokens == (80 if lossy else 0)
        cache.check()
        if lossy:
            assert cache.num_cached_blocks == 0  # nothing of it is for others
        else:
            assert [tuple(found.completions[0].token_ids)] == exact
    engine.close()


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_tier_that_packs_without_loss_serves_everyone(folder: Path, tmp_path: Path) -> None:
    engine = make(folder, tiers=[f"disk:{tmp_path}:16MiB?codec=split"])
    cache = engine.core.cache
    assert isinstance(cache, TieredCache)
    [tokens] = prompts(1, 80)
    exact = outputs(engine, [tokens])
    assert cache.hierarchy.flush(PATIENCE_S)
    cache.clear()
    [found] = engine.generate([tokens], replace(GREEDY, tier_use=TierUse(wait_s=math.inf)))
    assert found.usage.num_hit_tokens == 80
    assert [tuple(found.completions[0].token_ids)] == exact
    engine.close()


@of_both(["int8"], ["int4"])
def test_audits_of_honest_engines_raise_no_alarm(folder: Path, kv_format: str) -> None:
    class Watch:
        num_audited = num_mismatches = 0

        def on_step(self, stats: StepStats) -> None:
            self.num_audited += stats.num_audited_blocks
            self.num_mismatches += stats.num_audit_mismatches

        def on_admitted(self, num_query_tokens: int, num_hit_tokens: int) -> None: ...

        def on_finished(self, stats: object) -> None: ...

    engine, watch = make(folder, kv_format=kv_format, audit=1.0), Watch()
    engine.core.observers.append(watch)
    for _ in range(3):
        outputs(engine, prompts(3))
    assert watch.num_audited > 0
    assert watch.num_mismatches == 0
