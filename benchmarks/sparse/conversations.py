"""Conversations about a long text: the first question is known when the text's KV is compressed, the others are not.

    prompt    context + first question                      compressed at its end, or not at all
    decoded   answer . question answer . question answer    given, token by token, whatever the model would say

The first question flatters policies that look at what attends to what; the later ones are a user who asks again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.quality.tasks import tasks
from pagoda.model.tokenizer import Tokenizer

_BETWEEN = {"needle": ".\n\n", "multi_key": ".\n\n", "variables": "\n\n", "chat": ". "}
KINDS = tuple(_BETWEEN)


@dataclass(frozen=True)
class Conversation:
    """All tokens, how many of them are the prompt, and where the answers are."""

    tokens: list[int]
    num_prompt: int
    answers: list[tuple[int, int]]


def conversations(tokenizer: Tokenizer, kind: str, length: int, count: int) -> Iterator[Conversation]:
    """`count` conversations about contexts of one kind and about `length` tokens."""
    between = tokenizer.encode(_BETWEEN[kind], add_special_tokens=False)
    for task in tasks(tokenizer, kind, length, count):
        tokens = list(task.context)
        answers = []
        for question, answer in task.questions:
            tokens += [*(between if answers else []), *question]
            answers.append((len(tokens), len(tokens) + len(answer)))
            tokens += answer
        yield Conversation(tokens, answers[0][0], answers)
