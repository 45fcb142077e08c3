"""The benchmark of sparse policies: conversations, and what is asked of an engine."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.quality.compare import Compared
from benchmarks.sparse import quality
from benchmarks.sparse.conversations import KINDS, Conversation, conversations
from benchmarks.sparse.quality import POLICIES, Question, ask, with_budget
from benchmarks.sparse.records import Record, Records
from benchmarks.sparse.report import show, write
from benchmarks.sparse.summary import summary
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
    engine = make_engine(llama[0], num_blocks=400)
    told = Conversation(random_text(160), 120, [(120, 125), (140, 145), (150, 160)])
    questions = [Question(told, None), Question(told, None), *(Question(told, with_budget(p, 80)) for p in POLICIES)]
    ask(engine, questions)
    full, again, *others = questions
    assert full.sparse is None
    assert [len(logits) for logits in full.answers] == [5, 5, 10]
    for one, other in zip(full.answers, again.answers, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    for name, policy in zip(POLICIES, others, strict=True):
        assert policy.sparse is not None, name
        assert policy.sparse.num_returned_blocks > 0
        torch.testing.assert_close(policy.answers[0][0], full.answers[0][0], rtol=1e-3, atol=1e-3)
        assert not torch.allclose(policy.answers[2][-1], full.answers[2][-1], atol=1e-3), name
        alone = Question(told, with_budget(name, 80))
        ask(make_engine(llama[0]), [alone])
        torch.testing.assert_close(alone.answers[2], policy.answers[2], rtol=1e-3, atol=1e-3)


def test_what_is_told_is_what_the_model_reads(llama: tuple[Path, Any]) -> None:  # noqa: F811
    """The logits are those of the conversation's own tokens, not of what the model would have said."""
    told = Conversation(random_text(60), 40, [(40, 44), (50, 60)])
    question = Question(told, None)
    ask(make_engine(llama[0]), [question])
    with torch.inference_mode():
        expected = llama[1](torch.tensor([told.tokens])).logits[0]
    torch.testing.assert_close(question.answers[1], expected[49:59], rtol=1e-3, atol=1e-3)


def test_a_run_goes_on_where_it_stopped(llama: tuple[Path, Any], tmp_path: Path) -> None:  # noqa: F811
    said: list[str] = []
    engine = make_engine(llama[0], num_blocks=400)

    def measure(indices: range, *policies: str) -> None:
        quality.measure(engine, "needle", 120, indices, policies, [0.5], Records(tmp_path), said.append)

    conversation = Conversation(random_text(160), 120, [(120, 125), (140, 145)])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("benchmarks.sparse.quality.conversations", lambda *_: [conversation] * 3)
        measure(range(1, 2), "streaming")
        measure(range(2), "streaming", "infinigen")
    assert [line.rpartition(": ")[2] for line in said] == ["2 to ask", "5 to ask"]  # full KV again for conversation 1
    [path] = tmp_path.iterdir()
    with path.open("a") as file:
        file.write('{"kind": "nee')  # killed as it wrote
    records = Records(tmp_path)
    assert len(list(records)) == 6
    [task] = summary(records)
    assert [(point["policy"], point["all"]["right"]["n"]) for point in task["points"]] == [
        ("full", 2),
        ("infinigen", 2),
        ("streaming", 2),
    ]
    assert task["points"][0]["all"]["kl"]["value"] == 0.0
    assert task["points"][1]["sketch_share"] > 0
    assert task["points"][2]["num_returned_blocks"] > 0


def test_the_report_shows_and_draws_every_part(tmp_path: Path) -> None:
    def compared(right: bool) -> Compared:
        return Compared([0.1, 0.2], [0.5, 0.4], [0.6, 0.7], [True, right], [True, right], [True, True])

    def record(kind: str, policy: str, fraction: float, *right: bool) -> Record:
        done = None if policy == "full" else asdict(SparseReport(policy, 1, 100, 400, 7, 20, 4096, 9, 8, 50))
        return Record(kind, 512, 0, policy, fraction, [compared(each) for each in right], 10, 100.0, done)

    records = [
        record("needle", "full", 1.0, True, True, True),
        record("needle", "h2o", 0.5, True, False, True),
        record("chat", "full", 1.0, True, False, False),
    ]
    chat, needle = summary(records)
    assert (chat["counts"], needle["counts"]) == (False, True)
    h2o = needle["points"][1]
    assert h2o["known"]["right"]["value"] == 1.0
    assert h2o["asked_again"]["right"]["value"] == 0.5
    assert h2o["all"]["right_change"]["value"] == pytest.approx(-1 / 3)
    assert h2o["all"]["perplexity_change"]["value"] == pytest.approx(math.expm1(0.2))
    assert h2o["fetched_per_step"] == 50 / 10 / 100
    speed = {"decode_tokens_per_s": 10.0, "first_step_s": 1.5, "held_blocks": 7, "sketch_bytes": 0, "host_bytes": 0}
    streaming = {"sinks": 4, "window": 64, "bounds": [1, 50, 100], "perplexity": [9.0, 8.5], "most_blocks": [5, 5]}
    report = {
        "quality": [chat, needle],
        "streaming": [streaming],
        "throughput": {"batch": 1, "length": 512, "policies": {"full": speed}},
    }
    console = Console(record=True, width=200)
    show(report, console)
    shown = console.export_text()
    for part in ("needle, 512 tokens", "chat, 512 tokens: does not count", "8.50, 5", "100.0"):
        assert part in shown
    assert [path.name for path in write(report, tmp_path)] == ["sparse.json", "sparse.png"]
    assert json.loads((tmp_path / "sparse.json").read_text()) == report
