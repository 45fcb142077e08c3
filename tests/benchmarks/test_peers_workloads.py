"""What the benchmark beside other engines asks for: shapes, sharing, determinism, recorded sessions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers.messages import Request, Round
from benchmarks.peers.sessions import fit, read_sessions, split_turns
from benchmarks.peers.workloads import FULL, QUICK, Sizes, Workload, workloads

TOKENS = list(range(20_000))


def made(size: Sizes = FULL, replay: list[Request] | None = None) -> dict[str, Workload]:
    return {workload.key: workload for workload in workloads(TOKENS, size, replay)}


def shared(requests: list[Request]) -> int:
    """Length of the longest prefix that all have."""
    columns = zip(*(request.tokens for request in requests), strict=False)
    return next((i for i, column in enumerate(columns) if len(set(column)) > 1), len(requests[0].tokens))


@pytest.mark.parametrize(
    ("key", "count", "prompt", "out"),
    [
        ("a", 1, 2064, 1),
        ("b", 1, 2064, 1),
        ("c", 1, 128, 128),
        ("d", 16, 128, 128),
        ("e", 32, 2080, 64),
        ("e2", 32, 7032, 128),
    ],
)
def test_shapes_are_those_of_the_specification(key: str, count: int, prompt: int, out: int) -> None:
    requests = made()[key].make(0).requests
    assert len(requests) == count
    assert {len(request.tokens) for request in requests} == {prompt}
    assert {request.max_tokens for request in requests} == {out}


@pytest.mark.parametrize(("key", "prefix"), [("b", 2048), ("e", 2048), ("e2", 7000), ("g@4", 1024)])
def test_setup_warms_the_shared_prefix_and_nothing_else(key: str, prefix: int) -> None:
    work = made()[key].make(0)
    assert len(work.setup) == 1
    assert all(shared([work.setup[0], request]) == prefix for request in work.requests)


@pytest.mark.parametrize("key", ["a", "c", "d"])
def test_cold_workloads_have_no_setup(key: str) -> None:
    assert made()[key].make(0).setup == []


def test_rounds_repeat_exactly_and_share_nothing_between_them() -> None:
    for key, workload in made(QUICK).items():
        assert workload.make(3) == made(QUICK)[key].make(3)
        first, second = workload.make(0), workload.make(1)
        assert shared([first.requests[0], second.requests[0]]) == 0


def test_open_loop_arrives_at_its_rate_however_long_requests_take() -> None:
    size = Sizes(open_seconds=2000.0, rates=(2.0, 8.0))
    for rate in size.rates:
        requests = made(size)[f"g@{rate:g}"].make(0).requests
        times = [request.at for request in requests]
        assert times == sorted(times)
        assert times[0] == 0
        assert len(times) / times[-1] == pytest.approx(rate, rel=0.1)


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="7000 tokens are wanted, the text has 5000"):
        {w.key: w for w in workloads(TOKENS[:5000], FULL, None)}["e2"].make(0)


def test_rounds_survive_the_pipe() -> None:
    work = Round([Request([1, 2], 3, at=0.5), Request([4], 1, after=0)], [Request([5], 1)])
    assert Round.from_json(json.loads(json.dumps(work.to_json()))) == work


@given(st.lists(st.tuples(st.text("ab", max_size=4), st.integers(0, 3)), min_size=1, max_size=8))
def test_turns_of_a_prompt_always_join_to_it(steps: list[tuple[str, int]]) -> None:
    """Prompts that grow, but sometimes take back the end of what they had."""
    prompts, prompt = [], "task"
    for added, taken in steps:
        prompt = prompt[: max(4, len(prompt) - taken)] + added
        prompts.append(prompt)
    split = split_turns(prompts)
    assert ["".join(turns) for turns in split] == prompts
    assert all(all(turns) for turns in split)


def test_a_prompt_that_takes_back_its_last_turn_keeps_the_others() -> None:
    assert split_turns(["t", "t1", "t12", "t1", "t13"]) == [
        ("t",),
        ("t", "1"),
        ("t", "1", "2"),
        ("t", "1"),
        ("t", "1", "3"),
    ]


def test_fit_drops_whole_turns_after_the_task_oldest_first() -> None:
    turns = [[0] * 3, [1] * 4, [2] * 2, [3] * 1]
    assert fit(turns, 10) == [0, 0, 0, 1, 1, 1, 1, 2, 2, 3]
    assert fit(turns, 9) == [0, 0, 0, 2, 2, 3]
    assert fit(turns, 5) == [0, 0, 0, 3]
    assert fit(turns, 3) is None
    assert fit([[0] * 3], 3) == [0, 0, 0]
    assert fit([[0] * 3], 2) is None


def test_sessions_chain_their_turns_and_stay_inside_the_context(tmp_path: Path) -> None:
    for name, prompts in {"one": ["aaa", "aaabb", "aaabbcccc"], "two": ["xx", "xxyyyyyyyyyy", "xxz"]}.items():
        rows = [json.dumps({"input": prompt, "output": "ok!"}) for prompt in prompts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    requests = read_sessions(
        tmp_path, lambda text: [ord(c) for c in text], context=10, max_sessions=9, max_turns=9, max_output=2
    )
    texts = ["".join(map(chr, request.tokens)) for request in requests]
    assert texts == ["aaa", "aaabb", "aaacccc", "xx", "xxz"]
    assert [request.after for request in requests] == [None, 0, 1, None, 3]
    assert {request.max_tokens for request in requests} == {2}


def test_a_folder_without_sessions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no session"):
        read_sessions(tmp_path, lambda text: [1], context=8, max_sessions=1, max_turns=1, max_output=1)
