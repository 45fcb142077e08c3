"""The engine over a fake model: batching, sharing, preemption, stopping, and what is left behind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pagoda.engine.core import EngineCore
from pagoda.engine.outputs import FinishReason
from pagoda.engine.params import BeamSearch, LeaseSpec, SamplingParams
from pagoda.engine.step_plan import Rows
from pagoda.errors import ContextTooLong, InvalidRequest
from pagoda.kv.keys import Scope
from pagoda.kv.radix import RadixTree
from tests.engine.fakes import EOS, VOCAB, FakeTokenizer, expected_output, make_core, random_load, run


def greedy(max_tokens: int = 8, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)  # type: ignore[arg-type]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def assert_idle(core: EngineCore) -> None:
    core.cache.check()
    assert core.cache.num_held_blocks == 0
    core.cache.clear()
    assert core.cache.num_free_blocks == core.cache.num_blocks


def test_a_batch_equals_one_at_a_time() -> None:
    core, _ = make_core(num_blocks=200)
    prompts = {f"r{i}": prompt(i, 5 + 7 * i) for i in range(8)}
    for name, tokens in prompts.items():
        core.add(name, tokens, greedy(10))
    done = run(core)
    for name, tokens in prompts.items():
        assert done[name][0].token_ids == expected_output(tokens, 10)
        assert done[name][0].finish_reason is FinishReason.LENGTH
    assert_idle(core)


def test_a_second_turn_computes_only_what_is_new() -> None:
    core, runner = make_core()
    first = prompt(1, 30)
    core.add("a", first, greedy(9))
    answer = run(core)["a"][0].token_ids
    before = runner.num_computed
    second = first + answer + prompt(2, 5)
    core.add("b", second, greedy(4))
    outputs = [output for output in core.step() if output.request_id == "b"]
    # The answer's last token was sampled but never computed; all before it is a hit, whatever the block size.
    assert outputs[0].usage.num_hit_tokens == len(first) + len(answer) - 1
    assert runner.num_computed - before == 1 + 5


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    core, runner = make_core(num_blocks=100, token_budget=16)
    shared = prompt(3, 40)
    for i in range(6):
        core.add(f"r{i}", [*shared, 1 + i], greedy(3))
    done = run(core)
    for i in range(6):
        assert done[f"r{i}"][0].token_ids == expected_output([*shared, 1 + i], 3)
    # 40 shared tokens once; each request then its own token and the two tokens it feeds back.
    assert runner.num_computed == 40 + 6 * 3
    assert_idle(core)


def test_requests_behind_one_prefix_are_neighbours_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    core, runner = make_core(num_blocks=200, token_budget=64)
    prefixes = {"a": prompt(3, 24), "b": prompt(4, 24)}
    for i in range(6):
        core.add(f"{'ab'[i % 2]}{i}", prefixes["ab"[i % 2]] + prompt(10 + i, 3), greedy(6))
    batches: list[str] = []
    execute = runner.execute

    def noting(plan: list[Rows]) -> torch.Tensor:
        batches.append("".join(rows.sample.request.request_id[0] for rows in plan))
        return execute(plan)

    monkeypatch.setattr(runner, "execute", noting)
    run(core)
    full = [batch for batch in batches[2:] if len(batch) == 6]
    assert full
    assert set(full) <= {"aaabbb", "bbbaaa"}


def test_waiters_go_on_when_the_computing_request_is_aborted() -> None:
    core, _ = make_core(token_budget=16)
    shared = prompt(4, 48)
    core.add("first", [*shared, 1], greedy(3))
    core.add("second", [*shared, 2], greedy(3))
    core.step()
    assert (core.num_running, core.num_waiting) == (1, 1)
    [output] = core.abort("first")
    assert output.finished
    assert output.deltas[0].finish_reason is FinishReason.ABORT
    assert run(core)["second"][0].token_ids == expected_output([*shared, 2], 3)
    assert core.abort("first") == []
    assert_idle(core)


def test_decodes_go_on_during_a_long_prefill() -> None:
    core, runner = make_core(num_blocks=200, token_budget=16)
    core.add("short", prompt(5, 4), greedy(30))
    core.step()
    core.add("long", prompt(6, 200), greedy(1))
    for _ in range(10):
        outputs = core.step()
        assert [output.request_id for output in outputs] == ["short"]
        assert sum(runner.steps[-1]) == 16
    run(core)


@pytest.mark.parametrize("windows", [(None,), (None, 9, 9), (9,)])
def test_preemption_changes_no_output(windows: tuple[int | None, ...]) -> None:
    core, _ = make_core(num_blocks=24 * len(windows), windows=windows, token_budget=16, max_model_len=96)
    prompts = {f"r{i}": prompt(10 + i, 10 + i) for i in range(6)}
    for name, tokens in prompts.items():
        core.add(name, tokens, greedy(50))
    done = run(core)
    for name, tokens in prompts.items():
        assert done[name][0].token_ids == expected_output(tokens, 50)
    if windows == (None,):
        assert core._scheduler.num_preempted > 0
        assert core._scheduler.num_preempted < 30  # no thrash
    assert_idle(core)


def test_the_oldest_request_is_never_preempted() -> None:
    core, _ = make_core(num_blocks=24, token_budget=16, max_model_len=96)
    for i in range(4):
        core.add(f"r{i}", prompt(20 + i, 10), greedy(60))
    finished = []
    while core.has_work:
        finished += [output.request_id for output in core.step() if output.finished]
    assert finished == ["r0", "r1", "r2", "r3"]


def test_parallel_samples_share_the_prompt() -> None:
    core, runner = make_core(num_blocks=100, token_budget=64)
    tokens = prompt(7, 42)  # 10 whole blocks and 2 tokens in an eleventh
    core.add("r", tokens, SamplingParams(n=8, max_tokens=6, temperature=5.0, seed=1, ignore_eos=True))
    core.step()
    core.step()
    assert core.num_running == 8
    # 10 shared; each sample but the last writer copied the tail block.
    assert core.cache.num_held_blocks == 10 + 8
    done = run(core)["r"]
    assert [completion.finish_reason for completion in done] == [FinishReason.LENGTH] * 8
    assert runner.num_computed == 42 + 8 * 5  # the prompt once; then each sample feeds back all but its last token
    assert_idle(core)


def test_seeded_samples_differ_from_each_other_but_not_from_run_to_run() -> None:
    def once() -> list[list[int]]:
        core, _ = make_core(num_blocks=100)
        core.add("r", prompt(8, 10), SamplingParams(n=4, max_tokens=12, temperature=5.0, seed=3))
        return [completion.token_ids for completion in run(core)["r"]]

    first, second = once(), once()
    assert first == second
    assert len({tuple(tokens) for tokens in first}) > 1


def test_stop_strings_and_tokens() -> None:
    tokens = prompt(9, 12)
    text = FakeTokenizer().decode(expected_output(tokens, 20))
    core, _ = make_core()
    core.add("string", tokens, greedy(20, stop=(text[7:10],)))
    core.add("token", tokens, greedy(20, stop_token_ids=frozenset({expected_output(tokens, 5)[4]})))
    done = run(core)
    assert done["string"][0].text == text[: text.index(text[7:10])]
    assert done["string"][0].stop_reason == text[7:10]
    at = expected_output(tokens, 20).index(expected_output(tokens, 5)[4])
    assert done["token"][0].text == text[:at]
    assert done["token"][0].finish_reason is FinishReason.STOP


def test_eos_ends_a_sample_unless_ignored() -> None:
    core, _ = make_core()
    core.add("stops", prompt(1, 5), greedy(9, logit_bias={EOS: 100.0}))
    core.add("goes on", prompt(1, 5), greedy(9, logit_bias={EOS: 100.0}, ignore_eos=True))
    done = run(core)
    assert done["stops"][0].token_ids == [EOS]
    assert done["stops"][0].finish_reason is FinishReason.STOP
    assert done["goes on"][0].token_ids == [EOS] * 9


def test_scopes_share_nothing() -> None:
    core, _ = make_core()
    tokens = prompt(1, 40)
    for scope in (Scope("a"), Scope("b"), Scope("a", salt="x")):
        core.add(repr(scope), tokens, greedy(2), scope=scope)
        [output] = [output for _ in range(10) for output in core.step() if output.finished]
        assert output.usage.num_hit_tokens == 0
    core.add("again", tokens, greedy(2), scope=Scope("a"))
    [output] = [output for _ in range(10) for output in core.step() if output.finished]
    assert output.usage.num_hit_tokens == 39


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "error"),
    [
        ([], 1, InvalidRequest),
        ([-1], 1, InvalidRequest),
        ([VOCAB], 1, InvalidRequest),
        ([1] * 512, 1, ContextTooLong),
        ([1] * 100, 413, ContextTooLong),
        ([1] * 250, 30, ContextTooLong),  # fits the context, never the pool
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(
    tokens: list[int], max_tokens: int, error: type[Exception]
) -> None:
    core, _ = make_core(num_blocks=64)
    with pytest.raises(error, match=r"\d|empty"):
        core.add("r", tokens, greedy(max_tokens))
    assert not core.has_work
    assert_idle(core)


def test_request_ids_are_unique_while_they_run() -> None:
    core, _ = make_core()
    core.add("r", [1, 2], greedy(1))
    with pytest.raises(InvalidRequest, match="in use"):
        core.add("r", [1, 2], greedy(1))
    run(core)
    core.add("r", [1, 2], greedy(1))
    run(core)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm"])
def test_queue_policies(policy: str) -> None:
    core, _ = make_core(num_blocks=100, max_num_seqs=1, token_budget=64, queue_policy=policy)
    known = prompt(1, 40)
    core.add("warm", known, greedy(1))
    run(core)
    core.add("first", prompt(2, 20), greedy(1), priority=5)
    core.add("urgent", prompt(3, 20), greedy(1), priority=-1)
    core.add("known", [*known, 1], greedy(1), priority=5)
    for request in core._requests.values():  # age counts: 20 ms more are worth as much as 40 tokens of prefix
        request.arrived_at = 0.0
    order = []
    while core.has_work:
        order += [output.request_id for output in core.step() if output.finished]
    assert (
        order
        == {
            "fcfs": ["first", "urgent", "known"],
            "priority": ["urgent", "first", "known"],
            "lpm": ["known", "first", "urgent"],
        }[policy]
    )


def test_random_load_leaks_nothing() -> None:
    core, _ = make_core(num_blocks=40, token_budget=24, max_num_seqs=6, max_model_len=120)
    random_load(core, np.random.default_rng(0), num_steps=600, arrivals=0.3, max_tokens=40)
    assert_idle(core)


def test_no_tokens_asked_for_computes_the_prompt_and_generates_nothing() -> None:
    core, runner = make_core()
    warm = prompt(7, 37)
    core.add("warm", warm, greedy(0))
    core.add("other", prompt(8, 9), greedy(4))
    done = run(core)
    assert done["warm"][0].token_ids == []
    assert done["warm"][0].finish_reason is FinishReason.LENGTH
    assert done["other"][0].token_ids == expected_output(prompt(8, 9), 4)
    before = runner.num_computed
    core.add("next", [*warm, 5, 6], greedy(1))
    [output] = [output for output in core.step() if output.request_id == "next"]
    assert output.usage.num_hit_tokens == len(warm)
    assert runner.num_computed - before == 2
    assert_idle(core)


def test_no_tokens_of_several_samples_make_no_sense() -> None:
    with pytest.raises(InvalidRequest, match="n must be 1"):
        greedy(0, n=2)


def test_admission_matches_the_tree_once(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _ = make_core()
    core.add("first", prompt(1, 30), greedy(2))
    run(core)
    matches = []
    match = RadixTree.match
    monkeypatch.setattr(RadixTree, "match", lambda *args: matches.append(args) or match(*args))
    core.add("second", prompt(1, 30) + prompt(2, 9), greedy(4))
    run(core)
    assert len(matches) == 1
    past = core.history.find("second")
    assert past is not None
    assert past.explanation.num_hit_tokens == 30
    assert_idle(core)


@pytest.mark.parametrize("params", [greedy(9), greedy(9, n=3), greedy(9, beam=BeamSearch(2), n=2)])
def test_logits_that_are_not_finite_fail_their_request_alone(params: SamplingParams) -> None:
    core, runner = make_core(num_blocks=100)
    execute = runner.execute

    def broken(plan: Sequence[Rows]) -> torch.Tensor:
        logits = execute(plan)
        asking = [rows for rows in plan if rows.needs_logits]
        for row, rows in zip(logits, asking, strict=True):
            if rows.sample.request.request_id == "bad" and rows.sample.num_output_tokens == 2:
                row[:] = float("nan")
        return logits

    runner.execute = broken  # type: ignore[method-assign]
    bad, good = prompt(4, 20), prompt(5, 20)
    core.add("bad", bad, params)
    core.add("good", good, greedy(9))
    outputs = [output for _ in range(40) for output in core.step()]
    [last] = [output for output in outputs if output.request_id == "bad" and output.finished]
    assert "not finite" in str(last.failure)
    assert core.cache.lookup(np.array(bad), Scope()).num_tokens == 0  # nobody continues what it computed
    tokens = [
        token for output in outputs if output.request_id == "good" for d in output.deltas for token in d.token_ids
    ]
    assert tokens == expected_output(good, 9)
    assert_idle(core)


def test_a_warm_up_that_fails_leaves_nothing_leased() -> None:
    core, runner = make_core(num_blocks=200)
    execute = runner.execute
    runner.execute = lambda plan: execute(plan) * float("nan")  # type: ignore[method-assign]
    core.add("warm", prompt(4, 20), greedy(0), leases=[LeaseSpec(20, 60.0)])
    outputs = [output for _ in range(4) for output in core.step()]
    assert outputs[-1].failure is not None
    assert not core.cache.retention.leases
    assert_idle(core)
