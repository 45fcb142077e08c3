"""Forking on shared blocks: samples that are ranked, beams that die, and requests that branch off a live one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pagoda.engine.core import EngineCore
from pagoda.engine.outputs import FinishReason, RequestOutput
from pagoda.engine.params import BeamSearch, SamplingParams
from pagoda.errors import ContextTooLong, InvalidRequest
from tests.engine.fakes import EOS, VOCAB, FakeRunner, FakeTokenizer, expected_output, make_core, run


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def beams(width: int, max_tokens: int = 12, **search: object) -> SamplingParams:
    return SamplingParams(n=1, max_tokens=max_tokens, beam=BeamSearch(width, **search), logprobs=0)  # type: ignore[arg-type]


def noisy(runner: FakeRunner) -> None:
    """Give every token a likelihood of its own, a function of the context: beams fork, cross and die."""
    exact = runner.execute

    def execute(plan):  # type: ignore[no-untyped-def]
        logits = exact(plan)
        rows = (rows for rows in plan if rows.needs_logits)
        for row, planned in zip(logits, rows, strict=True):
            seed = [int(token) for token in planned.sample.tokens.view[-3:]]
            row += row.new_tensor(np.random.default_rng(seed).normal(0, 1.5, VOCAB))
        return logits

    runner.execute = execute  # type: ignore[method-assign]


def assert_idle(core: EngineCore) -> None:
    core.cache.check()
    assert core.cache.num_held_blocks == 0
    core.cache.clear()
    assert core.cache.num_free_blocks == core.cache.num_blocks


def test_best_of_8_holds_the_prompt_once() -> None:
    core, runner = make_core(num_blocks=1200, block_size=16, token_budget=512, max_model_len=2200)
    params = SamplingParams(n=1, best_of=8, max_tokens=101, temperature=5.0, seed=1, ignore_eos=True)
    core.add("r", prompt(1, 2000), params)
    outputs, most = [], 0
    while core.has_work:
        outputs += core.step()
        core.cache.check()
        most = max(most, core.cache.num_held_blocks)
    # 2,800 token slots: the prompt's 125 blocks once, and for each sample 100 tokens in 7 blocks (12 slots of tail).
    assert most == 2000 // 16 + 8 * 7
    assert most * 16 == 2800 + 8 * 12
    assert runner.num_computed == 2000 + 8 * 100
    [output] = outputs
    assert output.finished
    assert output.usage.num_output_tokens == 8 * 101
    assert_idle(core)


def test_best_of_returns_the_best_by_mean_logprob() -> None:
    drawn = SamplingParams(n=6, max_tokens=9, temperature=3.0, seed=4, ignore_eos=True, logprobs=0)
    ranked = SamplingParams(n=2, best_of=6, max_tokens=9, temperature=3.0, seed=4, ignore_eos=True)
    everything, chosen = [], []
    for params, results in ((drawn, everything), (ranked, chosen)):
        core, runner = make_core(num_blocks=200)
        noisy(runner)
        core.add("r", prompt(2, 30), params)
        results += run(core)["r"]
        assert_idle(core)
    means = {tuple(c.token_ids): np.mean([t.logprob for t in c.logprobs]) for c in everything}
    best = sorted(means, key=lambda tokens: -means[tokens])[:2]
    assert [tuple(completion.token_ids) for completion in chosen] == best
    assert [completion.index for completion in chosen] == [0, 1]
    assert [completion.score for completion in chosen] == pytest.approx([means[tokens] for tokens in best])
    assert chosen[0].logprobs == []
    assert chosen[0].text == FakeTokenizer().decode([token for token in chosen[0].token_ids if token != EOS])


def test_a_ranked_request_says_nothing_before_its_end_and_ends_when_aborted() -> None:
    core, _ = make_core(num_blocks=200)
    for name, params in {
        "beams": beams(4, 30),
        "best of": SamplingParams(n=2, best_of=5, max_tokens=30, ignore_eos=True),
    }.items():
        core.add(name, prompt(3, 30), params)
        assert [output for _ in range(12) for output in core.step()] == []
        assert core.num_running > 1
        [output] = core.abort(name)
        assert output.finished
        assert [delta.index for delta in output.deltas] == list(range(params.n))
        assert all(delta.finish_reason is FinishReason.ABORT for delta in output.deltas)
        assert_idle(core)


def exhaustive(tokens: list[int], width: int, count: int) -> list[tuple[float, list[int]]]:
    """Beam search without a cache: every beam's whole context is computed again for each token."""
    from tests.engine.fakes import next_token

    live: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(count):
        grown = []
        for score, new in live:
            context = tokens + new
            logits = np.zeros(VOCAB)
            logits[next_token(context)] = 5.0
            logits += np.random.default_rng(context[-3:]).normal(0, 1.5, VOCAB)
            logprobs = logits - np.log(np.exp(logits).sum())
            grown += [(score + logprobs[token], [*new, token]) for token in range(VOCAB)]
        live = sorted(grown, key=lambda each: -each[0])[:width]
    return live


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_beams_read_their_own_context_and_free_what_dies(windows: tuple[int | None, ...]) -> None:
    core, runner = make_core(num_blocks=300, windows=windows, block_size=4)
    noisy(runner)
    tokens = prompt(5, 41)
    params = SamplingParams(n=5, max_tokens=14, beam=BeamSearch(5), ignore_eos=True)
    core.add("r", tokens, params)
    outputs: list[RequestOutput] = []
    while core.has_work:
        outputs += core.step()
        core.cache.check()
        assert core.num_running <= 5
        if windows == (None,):  # the prompt's whole blocks, and for each beam at most what came after
            assert core.cache.num_held_blocks <= 10 + 5 * -(-(1 + 14) // 4)
    expected = exhaustive(tokens, 5, 14)
    [output] = outputs
    assert [list(delta.token_ids) for delta in output.deltas] == [new for _, new in expected]
    assert [delta.score for delta in output.deltas] == pytest.approx([score / 14 for score, _ in expected], abs=1e-4)
    assert output.usage.num_output_tokens == 5 * 14
    assert_idle(core)


def test_a_dead_beam_leaves_no_tail_behind() -> None:
    core, runner = make_core(num_blocks=300, block_size=64)
    noisy(runner)
    core.add("r", prompt(6, 70), beams(4, 40))
    run(core)
    # One whole block of the prompt, and the tails of the four beams of the last step; the others' are free again.
    assert core.cache.num_cached_blocks <= 1 + 4
    assert_idle(core)


def test_beams_wait_for_each_other_when_memory_is_short() -> None:
    names = [f"r{i}" for i in range(4)]
    wide, roomy = make_core(num_blocks=400, lease_share=0.0)
    noisy(roomy)
    # Room for one search and a little more: they preempt one another's beams, and stall, and go on.
    core, runner = make_core(num_blocks=46, lease_share=0.0, max_model_len=64, token_budget=16)
    noisy(runner)
    for each in (wide, core):
        for i, name in enumerate(names):
            each.add(name, prompt(10 + i, 12), SamplingParams(n=4, max_tokens=20, beam=BeamSearch(4), ignore_eos=True))
    expected, found = run(wide), run(core)
    assert core._scheduler.num_preempted > 0
    assert {name: [c.token_ids for c in found[name]] for name in names} == {
        name: [c.token_ids for c in expected[name]] for name in names
    }
    assert_idle(core)


def test_an_end_token_ends_a_beam_and_a_stop_token_says_so() -> None:
    core, runner = make_core(num_blocks=300)
    noisy(runner)
    core.add("ends", prompt(7, 9), SamplingParams(max_tokens=30, beam=BeamSearch(3), n=3))
    some = prompt(8, 9)
    stop = expected_output(some, 1)[0]
    short = BeamSearch(2, length_penalty=-9.0)
    core.add("stops", some, SamplingParams(max_tokens=30, beam=short, stop_token_ids=frozenset({stop})))
    done = run(core)
    for completion in done["ends"]:
        assert (completion.finish_reason is FinishReason.STOP) == (completion.token_ids[-1] == EOS)
        assert EOS not in completion.token_ids[:-1]
    [stopped] = done["stops"]
    assert stopped.token_ids[-1] == stopped.stop_reason == stop
    assert len(stopped.text) == len(stopped.token_ids) - 1
    assert_idle(core)


def test_fork_goes_on_from_a_live_request_on_its_blocks() -> None:
    core, runner = make_core(num_blocks=100)
    tokens = prompt(9, 22)
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    core.add("live", tokens, greedy)
    so_far: list[int] = []
    while len(so_far) < 5:
        so_far += [token for output in core.step() for token in output.deltas[0].token_ids]
    before = runner.num_computed, core.cache.num_held_blocks
    core.fork("live", "twin", SamplingParams(max_tokens=9, temperature=0.0))
    core.fork("live", "other", SamplingParams(n=2, max_tokens=4, temperature=9.0, seed=2, ignore_eos=True))
    assert core.cache.num_held_blocks == before[1]  # nothing was copied yet
    done = run(core)
    context = tokens + so_far
    assert [*so_far, *done["live"][0].token_ids] == expected_output(tokens, 12)
    assert done["twin"][0].token_ids == expected_output(context, 9)
    assert len(done["other"]) == 2
    # What comes after the fork, and nothing of the 27 tokens before it. Of "other" the second sample forks later.
    assert runner.num_computed - before[0] == 7 + 9 + (1 + 2 * 3)
    assert_idle(core)


def test_fork_of_a_waiting_request_waits_too() -> None:
    core, runner = make_core(num_blocks=100, max_num_seqs=1)
    greedy = SamplingParams(max_tokens=4, temperature=0.0)
    core.add("first", prompt(1, 9), greedy)
    core.step()
    core.add("second", prompt(2, 40), greedy)
    core.fork("second", "twin", greedy)
    done = run(core)
    assert done["twin"][0].token_ids == done["second"][0].token_ids == expected_output(prompt(2, 40), 4)
    assert runner.num_computed == 9 + 3 + 40 + 3 + 1 + 3
    assert_idle(core)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"best_of": 0}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 5, "beam": BeamSearch(4)}, "n"),
        ({"best_of": 4, "beam": BeamSearch(4)}, "best_of"),
        ({"temperature": 0.7, "beam": BeamSearch(4)}, "temperature"),
        ({"top_p": 0.9, "beam": BeamSearch(4)}, "top_p"),
        ({"stop": ("x",), "beam": BeamSearch(4)}, "stop"),
        ({"logit_bias": {1: 2.0}, "beam": BeamSearch(4)}, "logit_bias"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert caught.value.param == named


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"width": 0}, "n"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"early_stopping": "maybe"}, "early_stopping"),
    ],
)
def test_a_beam_search_is_checked(fields: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        BeamSearch(**{"width": 2, **fields})  # type: ignore[arg-type]
    assert caught.value.param == named


def test_searches_that_can_never_run_are_refused() -> None:
    core, _ = make_core(num_blocks=40, max_num_seqs=8, lease_share=0.0)
    with pytest.raises(InvalidRequest, match="max_num_seqs"):
        core.add("r", [1, 2], beams(9))
    with pytest.raises(ContextTooLong, match="40 for a request"):
        core.add("r", prompt(1, 60), beams(8, 40))
    core.add("fits", prompt(1, 60), beams(2, 40))
    for source, new in (("nobody", "x"), ("fits", "x"), ("fits", "fits")):
        with pytest.raises(InvalidRequest):
            core.fork(source, new, SamplingParams())
    run(core)
    assert_idle(core)


def test_random_beams_samples_and_forks_leak_nothing() -> None:
    rng = np.random.default_rng(3)
    core, runner = make_core(num_blocks=70, token_budget=24, max_num_seqs=8, max_model_len=90, lease_share=0.0)
    noisy(runner)
    names = (f"r{i}" for i in itertools.count())
    live: set[str] = set()
    for _ in range(250):
        if len(live) < 4 and rng.random() < 0.4:
            name, length = next(names), int(rng.integers(1, 30))
            kind = rng.integers(4)
            if kind == 3 and live:
                with_output = sorted(live)[0]
                try:
                    core.fork(with_output, name, SamplingParams(max_tokens=int(rng.integers(1, 9))))
                    live.add(name)
                except (InvalidRequest, ContextTooLong):
                    pass
            else:
                params = [
                    SamplingParams(n=2, best_of=4, max_tokens=10),
                    SamplingParams(n=2, max_tokens=int(rng.integers(1, 14)), beam=BeamSearch(int(rng.integers(2, 5)))),
                    SamplingParams(n=3, max_tokens=12),
                ][kind % 3]
                core.add(name, prompt(int(rng.integers(6)), length), params)
                live.add(name)
        if live and rng.random() < 0.05:
            victim = sorted(live)[int(rng.integers(len(live)))]
            core.abort(victim)
            live.discard(victim)
        live -= {output.request_id for output in core.step() if output.finished}
        core.cache.check()
    run(core)
    assert_idle(core)
