"""What the engines read: real text, generated tasks with their answers, and what the full run itself goes on to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.quality.tasks import KINDS, Task, prose, source
from benchmarks.texts import source_text
from pagoda.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Case:
    """Tokens, the first one whose logits are compared, and how the engine comes by them (see forced.py)."""

    tokens: list[int]
    start: int
    decode: bool
    share: bool = False


@dataclass(frozen=True)
class Size:
    """How much is measured. A `unit` of text is a run of that many tokens, for the bootstrap.

    Of each kind of task and each of `lengths` there are so many of `contexts`, with `questions` about each.
    """

    passages: int
    passage_tokens: int
    unit: int
    kinds: tuple[str, ...]
    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    questions: int
    prompts: int
    prompt_tokens: int
    followed: int
    long_prompts: int
    long_followed: int
    gsm8k: int


QUICK = Size(1, 1024, 32, KINDS, (1024,), (2,), 4, 4, 128, 32, 1, 128, 8)
# At least 500 of everything: 64 runs in each of 8 passages, 504 questions of a kind, 500 prompts.
FULL = Size(8, 4096, 64, KINDS, (1024, 2048, 4096, 8192), (32, 16, 10, 5), 8, 500, 128, 64, 4, 2000, 500)


def corpora(extra: Path | None) -> dict[str, str]:
    """Name -> long text: the Python language reference and library source (PSF licence), and a file of the caller's."""
    found = {"prose": "\n\n".join(prose()), "source": source_text(220_000)}
    return found if extra is None else {**found, extra.stem: extra.read_text(encoding="utf-8")}


def passages(tokenizer: Tokenizer, text: str, count: int, length: int) -> list[Case]:
    """`count` passages of `length` tokens from all over a text; shorter ones if the text does not suffice."""
    tokens = tokenizer.encode(text)
    length = min(length, len(tokens) // count)
    last = len(tokens) - length
    starts = [last * number // max(1, count - 1) for number in range(count)]
    return [Case(tokens[first : first + length], 1, decode=False) for first in starts]


def answers(task: Task, *, decode: bool, share: bool) -> list[Case]:
    """One case a question, of which the answer's tokens are compared."""
    return [
        Case(task.context + question + answer, len(task.context) + len(question), decode=decode, share=share)
        for question, answer in task.questions
    ]


def prompts(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """Beginnings for free generation, from prose and source in turn."""
    texts = [tokenizer.encode("\n\n".join(parts)) for parts in (prose(), source())]

    def beginning(index: int, tokens: Sequence[int]) -> list[int]:
        places = max(1, len(tokens) - length)
        first = index * 997 % places  # a prime step visits places far apart
        return list(tokens[first : first + length])

    return [beginning(index, texts[index % 2]) for index in range(count)]
