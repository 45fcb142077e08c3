"""Contexts made of passages, and questions about them with known answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.quality.tasks import prose, source
from pagoda.blend.segments import BlendSpec, Span
from pagoda.model.tokenizer import Tokenizer

UNGUARDED = float("inf"), 0.0
RATIOS = {"naive": 0.0, "5%": 0.05, "10%": 0.1, "15%": 0.15, "30%": 0.3, "100%": 1.0}
VARIANTS = (*RATIOS, "guarded")
KINDS = ("lookup", "hop")
PREAMBLE = "Some notes on Python.\n\n"
_PLACES = ("harbour", "library", "observatory", "bakery", "orchard", "theatre", "museum", "station", "castle", "mill")
_WORDS = ("copper", "silver", "velvet", "thunder", "pepper", "candle", "marble", "ribbon", "saddle", "lemon", "anchor")
_NAMES = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "theta", "lambda", "epsilon")
MOST_PASSAGES = min(len(_PLACES), len(_NAMES))


@dataclass(frozen=True)
class Context:
    """Tokens of a preamble and passages, and questions about them: what to append, and the tokens of the answer."""

    kind: str
    tokens: list[int]
    spans: tuple[Span, ...]
    questions: list[tuple[list[int], list[int]]]

    def blend(self, variant: str) -> BlendSpec | None:
        """What a variant asks for."""
        if variant in RATIOS:
            return BlendSpec(self.spans, RATIOS[variant], *UNGUARDED)
        return BlendSpec(self.spans) if variant == "guarded" else None

    def reordered(self, seed: int) -> Context:
        """The same passages in another order."""
        tokens, spans = self.tokens[: self.spans[0].start], []
        for span in random.Random(seed).sample(self.spans, len(self.spans)):
            spans.append(Span(len(tokens), len(tokens) + span.stop - span.start))
            tokens = tokens + self.tokens[span.start : span.stop]
        return Context(self.kind, tokens, tuple(spans), self.questions)


def contexts(tokenizer: Tokenizer, kind: str, count: int, passages: int, size: int) -> Iterator[Context]:
    """`count` contexts of `passages` passages of about `size` tokens each."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    for index in range(count):
        rng = random.Random(f"{kind} {index}")
        lines, asked = _facts(kind, passages, rng)
        tokens, spans = tokenizer.encode(PREAMBLE), []  # with the start token, if the model has one
        texts = prose() if kind == "lookup" else source()
        for line in lines:
            first, paragraphs, room = rng.randrange(len(texts)), [], size - len(encode(line))
            while (room := room - len(encode(texts[first % len(texts)]))) > 0 or not paragraphs:
                paragraphs.append(texts[first % len(texts)])
                first += 1
            paragraphs.insert(rng.randint(0, len(paragraphs)), line)
            passage = encode("\n\n".join(paragraphs) + "\n\n")
            spans.append(Span(len(tokens), len(tokens) + len(passage)))
            tokens += passage
        yield Context(
            kind, tokens, tuple(spans), [(encode(question), encode(f" {answer}")) for question, answer in asked]
        )


def _facts(kind: str, passages: int, rng: random.Random) -> tuple[list[str], list[tuple[str, str]]]:
    """A line for each passage, and the questions: about each passage, or each pair of them."""
    if kind == "lookup":
        places, words = rng.sample(_PLACES, passages), rng.sample(_WORDS, passages)
        facts = [(f"Remember the code {place}", word) for place, word in zip(places, words, strict=True)]
        return [f"{question} {answer}." for question, answer in facts], rng.sample(facts, passages)
    names, half = rng.sample(_NAMES, passages), passages // 2
    values = [str(rng.randrange(1000, 10000)) for _ in range(half)]
    given = [f"{name} = {value}" for name, value in zip(names, values, strict=False)]
    copied = [f"{name} = {of}" for name, of in zip(names[half : 2 * half], names, strict=False)]
    rest = ["pass"] * (passages - 2 * half)
    asked = [(f"# The value of {name} is", value) for name, value in zip(names[half:], values, strict=False)]
    return [*given, *copied, *rest], rng.sample(asked, half)
