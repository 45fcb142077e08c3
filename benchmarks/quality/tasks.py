"""Generated long-context tasks with known answers, after RULER (arXiv:2404.06654), written to suit small base models.

    needle      lone facts of different kinds in a long text                 "The ferry leaves from pier" -> 4821
    multi_key   many facts of one form: the right one must be told apart     "Remember the code harbour" -> copper
    variables   assignments that copy each other, in source code             "# The value of beta is" -> 4821
    chat        something a user said many turns ago                         "Your dog's name is" -> Rex

Questions are the beginning of a sentence that the text has already said, so that a model without any training for
instructions can go on. A context carries several questions, which share its KV in the prefix cache: as many as are
asked for, but no more than there are facts of a kind.
"""

from __future__ import annotations

import inspect
import pydoc_data.topics
import random
import string
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from pagoda.model.tokenizer import Tokenizer

QUESTIONS = 4  # about each context, unless told otherwise
_PLACES = ("harbour", "library", "observatory", "bakery", "orchard", "theatre", "museum", "station", "castle", "mill")
_WORDS = ("copper", "silver", "velvet", "thunder", "pepper", "candle", "marble", "ribbon", "saddle", "lemon", "anchor")
_FACTS = (
    "The ferry leaves from pier",
    "The locker in the hall has number",
    "Maria's telephone extension is",
    "The train to the coast is number",
    "The treasure is buried at marker",
    "The old map was printed in lot",
    "The experiment was run with seed",
    "The parcel was sent with receipt",
)
_VARIABLES = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "theta")
_PERSONAL = {
    "dog's name": ("Rex", "Bella", "Max", "Luna"),
    "favourite colour": ("green", "blue", "red", "yellow"),
    "home town": ("Paris", "London", "Rome", "Berlin"),
    "favourite fruit": ("apple", "banana", "orange", "cherry"),
    "instrument": ("piano", "violin", "guitar", "drums"),
    "sister's name": ("Anna", "Sarah", "Emma", "Laura"),
    "favourite animal": ("elephant", "tiger", "dolphin", "horse"),
    "favourite season": ("spring", "summer", "autumn", "winter"),
}


@dataclass(frozen=True)
class Task:
    """A context of about `length` tokens, and questions about it: what to append, and the tokens of the answer."""

    kind: str
    length: int
    context: list[int]
    questions: list[tuple[list[int], list[int]]]


@cache
def prose() -> tuple[str, ...]:
    """Paragraphs of the Python language reference, which ships with Python (PSF licence)."""
    text = "\n\n".join(pydoc_data.topics.topics.values())
    return tuple(paragraph for paragraph in text.split("\n\n") if 80 < len(paragraph) < 1000)


@cache
def source() -> tuple[str, ...]:
    """Functions and small classes of Python's standard library, as text."""
    text = "\n".join(inspect.getsource(module) for module in (textwrap, string, inspect, random, typing))
    return tuple(part for part in text.split("\n\n\n") if 80 < len(part) < 1500)


def tasks(
    tokenizer: Tokenizer, kind: str, length: int, count: int, *, questions: int = QUESTIONS, seed: int = 0
) -> Iterator[Task]:
    """`count` contexts of one kind and about `length` tokens."""
    for index in range(count):
        rng = random.Random(f"{kind} {length} {seed} {index}")
        yield _MAKERS[kind](tokenizer, length, rng, questions)


def _needle(tokenizer: Tokenizer, length: int, rng: random.Random, questions: int) -> Task:
    facts = {fact: str(rng.randrange(1000, 10000)) for fact in _sample(rng, _FACTS, questions)}
    return _in_text(tokenizer, "needle", length, rng, prose(), facts, "{} {}.")


def _multi_key(tokenizer: Tokenizer, length: int, rng: random.Random, questions: int) -> Task:
    places, words = _sample(rng, _PLACES, questions), _sample(rng, _WORDS, questions)
    facts = {f"Remember the code {place}": word for place, word in zip(places, words, strict=False)}
    return _in_text(tokenizer, "multi_key", length, rng, prose(), facts, "{} {}.")


def _variables(tokenizer: Tokenizer, length: int, rng: random.Random, questions: int) -> Task:
    names = _sample(rng, _VARIABLES, questions)
    values = [str(rng.randrange(1000, 10000)) for _ in range(len(names) // 2)]
    lines = []
    for first, second, value in zip(names[::2], names[1::2], values, strict=True):
        lines += [f"{first} = {value}", f"{second} = {first}"]
    asked = {f"# The value of {name} is": values[names.index(name) // 2] for name in names}
    # A copy must come after what it copies, so the order is kept.
    return _assemble(tokenizer, "variables", length, rng, source(), lines, asked, keep_order=True)


def _in_text(
    tokenizer: Tokenizer,
    kind: str,
    length: int,
    rng: random.Random,
    filler: Sequence[str],
    facts: dict[str, str],
    form: str,
) -> Task:
    lines = [form.format(question, answer) for question, answer in facts.items()]
    return _assemble(tokenizer, kind, length, rng, filler, lines, facts)


def _assemble(
    tokenizer: Tokenizer,
    kind: str,
    length: int,
    rng: random.Random,
    filler: Sequence[str],
    lines: list[str],
    asked: dict[str, str],
    *,
    keep_order: bool = False,
) -> Task:
    """Filler with the lines strewn in."""
    paragraphs = _filler(tokenizer, filler, length - sum(len(_encode(tokenizer, line)) + 2 for line in lines) - 40, rng)
    if not keep_order:
        rng.shuffle(lines)
    places = sorted(rng.randint(0, len(paragraphs)) for _ in lines)
    for before, (place, line) in enumerate(zip(places, lines, strict=True)):
        paragraphs.insert(place + before, line)
    context = tokenizer.encode("\n\n".join(paragraphs) + "\n\n")
    questions = [(_encode(tokenizer, question), _encode(tokenizer, f" {answer}")) for question, answer in asked.items()]
    return Task(kind, length, context, questions)


def _filler(tokenizer: Tokenizer, texts: Sequence[str], length: int, rng: random.Random, extra: int = 1) -> list[str]:
    """Texts from a random place on, in their order, of at most `length` tokens, each with `extra` tokens around it."""
    first, room, chosen = rng.randrange(len(texts)), length, []
    for offset in range(len(texts)):
        text = texts[(first + offset) % len(texts)]
        room -= len(_encode(tokenizer, text)) + extra
        if room < 0:
            break
        chosen.append(text)
    return chosen


def _chat(tokenizer: Tokenizer, length: int, rng: random.Random, questions: int) -> Task:
    facts = {topic: rng.choice(_PERSONAL[topic]) for topic in _sample(rng, sorted(_PERSONAL), questions)}
    told = [
        {"role": "user", "content": f"Please remember this: my {topic} is {answer}."} for topic, answer in facts.items()
    ]
    rng.shuffle(told)
    request = "Please quote the next paragraph."
    around = len(_encode(tokenizer, f"\nUser: {request}\nAssistant: ")) + 10
    told_tokens = sum(len(_encode(tokenizer, turn["content"])) + 2 * around for turn in told)
    paragraphs = _filler(tokenizer, prose(), length - told_tokens - 2 * around, rng, around)
    messages = [
        message
        for turn in told
        for message in (turn, {"role": "assistant", "content": "Thank you, I will remember that."})
    ]
    for paragraph in paragraphs:
        messages.append({"role": "user", "content": request})
        messages.append({"role": "assistant", "content": paragraph})
    if tokenizer.has_chat_template:
        asked = [*messages, {"role": "user", "content": "What did I tell you about myself? Answer in one sentence."}]
        context = tokenizer.encode(tokenizer.render_chat(asked), add_special_tokens=False)
    else:
        script = "\n".join(f"{message['role'].title()}: {message['content']}" for message in messages)
        context = tokenizer.encode(f"{script}\nUser: What did I tell you about myself?\nAssistant: ")
    questions = [
        (_encode(tokenizer, f"You told me that your {topic} is"), _encode(tokenizer, f" {answer}"))
        for topic, answer in facts.items()
    ]
    return Task("chat", length, context, questions)


def _sample(rng: random.Random, facts: Sequence[str], count: int) -> list[str]:
    return rng.sample(facts, min(count, len(facts)))


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


_MAKERS: dict[str, Callable[[Tokenizer, int, random.Random, int], Task]] = {
    "needle": _needle,
    "multi_key": _multi_key,
    "variables": _variables,
    "chat": _chat,
}
KINDS = tuple(_MAKERS)
