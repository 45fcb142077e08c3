"""The benchmark of sparse policies: conversations, and what is asked of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.quality.forced import Forced
from benchmarks.sparse.conversations import KINDS, Conversation, conversations
from benchmarks.sparse.quality import POLICIES, Questions
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
