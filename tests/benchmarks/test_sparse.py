"""The benchmark of sparse policies: conversations, and what is asked of an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.quality.compare import Compared
from benchmarks.quality.forced import Forced
from benchmarks.sparse.conversations import KINDS, Conversation, conversations
from benchmarks.sparse.quality import POLICIES, Point, Questions, figures
from benchmarks.sparse.report import show, write
from pagoda.engine.outputs import SparseReport
from tests.sparse.conftest import llama, make_engine  # noqa: F401 - a fixture
from tests.sparse.conftest import text as random_text


def test_a_conversation_asks_after_its_prompt_and_again(llama: tuple[Path, Any]) -> None:  # noqa: F811
    tokenizer = make_engine(llama[0]).tokenizer
    for kind in KINDS:
        [one] = conversations(tokenizer, kind, 3000, 1)
        assert one.answers[0][0] == one.num_prompt
        assert len(one.answers) == 4
        assert one.answers[-1][1] == len(one.tokens)
        told = tokenizer.decode(one.tokens)
        for first, last in one.answers:
            assert told.count(tokenizer.decode(one.tokens[first:last]).strip()) >= 2, (
                "in the context, and as the answer"
            )


def test_full_kv_is_compared_with_itself_and_a_policy_with_it(llama: tuple[Path, Any]) -> None:  # noqa: F811
    forced = Forced(make_engine(llama[0]))
    questions = Questions(forced, lambda _: None)
    told = Conversation(random_text(160), 120, [(120, 125), (140, 145), (150, 160)])
    full, report = questions.ask(told, None)
    again, _ = questions.ask(told, None)
    assert report is None
    assert [len(logits) for logits in full] == [5, 5, 10]
    assert all(torch.equal(one, other) for one, other in zip(full, again, strict=True))
    for name, policy in POLICIES.items():
        asked, report = questions.ask(told, policy(80))
        assert report is not None, name
        assert report.num_returned_blocks > 0
        assert asked[0].shape == full[0].shape
        torch.testing.assert_close(asked[0][0], full[0][0], msg=f"{name}: the prompt's own last row is exact")
        assert not torch.allclose(asked[2][-1], full[2][-1]), name
    same, _ = questions.ask(told, {"name": "infinigen", "budget": 160})
    assert all(torch.equal(one, other) for one, other in zip(full, same, strict=True))


def test_the_report_shows_and_draws_every_part(tmp_path: Path) -> None:
    def compared(right: bool) -> Compared:
        return Compared([0.1, 0.2], [0.5, 0.4], [0.6, 0.7], [True, right], [True, right], [True, True])

    point = Point([[compared(True), compared(False), compared(True)]], [SparseReport("h2o", 1, 100, 400, 7, 20, 4096)])
    measured = [{"policy": "h2o", "fraction": fraction, **point.summary()} for fraction in (0.5, 0.2)]
    full = figures([[compared(True)] * 3])
    assert full["exact_match"]["value"] == 1.0
    assert measured[0]["known"]["exact_match"]["value"] == 1.0
    assert measured[0]["asked_again"]["exact_match"]["value"] == 0.5
    assert measured[0]["num_returned_blocks"] == 20
    task = {"kind": "needle", "length": 512, "counts": True, "full": full, "points": measured}
    streaming = {
        "window": 64,
        "bounds": [1, 50, 100],
        "runs": {"4 sinks": {"perplexity": [9.0, 8.5], "most_blocks": 5}},
    }
    speed = {"decode_tokens_per_s": 10.0, "prefill_s": 1.5, "held_blocks": 7, "host_bytes": 0}
    report = {
        "quality": [task, {**task, "kind": "chat", "counts": False, "points": []}],
        "kvpress": [{"kind": "needle", "length": 512, "points": measured}],
        "streaming": streaming,
        "throughput": {"batch": 1, "length": 512, "fraction": 0.2, "policies": {"full": speed}},
    }
    console = Console(record=True, width=200)
    show(report, console)
    shown = console.export_text()
    for part in (
        "needle, 512 tokens: full KV answers 100%",
        "chat, 512 tokens",
        "does not count",
        "kvpress: needle",
        "8.50",
    ):
        assert part in shown
    assert [path.name for path in write(report, tmp_path)] == ["sparse.json", "sparse.png"]
    assert json.loads((tmp_path / "sparse.json").read_text()) == report
