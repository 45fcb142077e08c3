"""All engines over all cases, in step: what the full run and a variant say of a token is compared, and dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.quality.cases import Case, Size, answers, passages, prompts
from benchmarks.quality.compare import Compared, Figure, mean_of, pieces
from benchmarks.quality.forced import Forced
from benchmarks.quality.tasks import Task, tasks

Tell = Callable[[str], None]
PASSES = 0.7  # a task says something about a variant only if the full run masters it
_TRIED = 100  # questions after which a task that it does not master is given up


def distance(read: Sequence[Compared], unit: int) -> dict[str, Any]:
    """Figures of texts that were read, with intervals from resampling runs of `unit` tokens."""

    def mean(values: Callable[[Compared], Sequence[float]]) -> Figure:
        return mean_of([piece for each in read for piece in pieces(values(each), unit)])

    change = mean(lambda each: np.subtract(each.nll, each.nll_full).tolist())
    return {
        "kl": asdict(mean(lambda each: each.kl)),
        "perplexity_full": float(np.exp(mean(lambda each: each.nll_full).value)),
        "perplexity_change": asdict(change.through(lambda nats: float(np.expm1(nats)))),
        "top1_agreement": asdict(mean(lambda each: each.agrees)),
        "num_tokens": sum(len(each.kl) for each in read),
    }


def answered(contexts: Sequence[Sequence[Mapping[str, Compared]]]) -> dict[str, Any]:
    """Figures of the answers to the questions about contexts, with intervals from resampling contexts.

    Args:
        contexts: of each context, for each question, each variant's answer by name.
    """

    def mean(name: str, value: Callable[[Compared], float]) -> Figure:
        return mean_of([[value(question[name]) for question in questions] for questions in contexts])

    names = list(contexts[0][0])
    full = mean(names[0], lambda each: all(each.right_full))
    return {
        "num_questions": sum(map(len, contexts)),
        "exact_match_full": asdict(full),
        "answer_nll_full": asdict(mean(names[0], lambda each: sum(each.nll_full))),
        "counts": full.value >= PASSES,
        "variants": {
            name: {
                "exact_match": asdict(mean(name, lambda each: all(each.right))),
                "exact_match_change": asdict(mean(name, lambda each: all(each.right) - all(each.right_full))),
                "answer_nll_change": asdict(mean(name, lambda each: sum(each.nll) - sum(each.nll_full))),
            }
            for name in names
        },
    }


def at_once(read: Iterator[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, torch.Tensor]]:
    """What `Forced.read` yields, as one piece."""
    found = list(read)
    yield found[0][0], torch.cat([logits for _, logits in found])


class Suite:
    """One full-precision engine and the engines of the variants, all of the same model.

    Args:
        full: the run that others are measured against.
        variants: by name.
        tell: called with what comes next.
        share: whether questions about one context share its KV in the prefix cache. A policy that scores tokens while
            it computes a prompt sees less of it after a hit: measure such without.
        decode: whether answers and outputs are read one token at a time, as they are served. It takes several times as
            long, and shows of a KV format what reading them in chunks does.
    """

    def __init__(
        self,
        full: Forced,
        variants: Mapping[str, Forced],
        size: Size,
        *,
        tell: Tell,
        share: bool = True,
        decode: bool = False,
    ) -> None:
        self.full, self.variants, self.size, self.tell = full, variants, size, tell
        self.share, self.decode = share, decode
        self.tokenizer = full.engine.tokenizer
        self.max_len = min(engine.engine.max_model_len for engine in (full, *variants.values()))

    def compare(self, case: Case) -> dict[str, Compared]:
        """Every variant against the full run on one case."""
        found = {name: Compared() for name in self.variants}
        engines = [self.full, *self.variants.values()]
        reads = [each.read(case.tokens, case.start, decode=case.decode, share=case.share) for each in engines]
        if case.share:  # formats differ in where a hit ends, and so in where chunks do
            reads = [at_once(read) for read in reads]
        for (position, full), *others in zip(*reads, strict=True):
            tokens = case.tokens[position : position + len(full)]
            for compared, (at, logits) in zip(found.values(), others, strict=True):
                assert at == position, "all engines compute the same chunks"
                compared.add(full, logits, tokens)
        return found

    def text(self, corpus: str, text: str) -> Iterator[dict[str, Any]]:
        """Distances on real text that is read in chunks: after each passage, of all so far."""
        read: dict[str, list[Compared]] = {name: [] for name in self.variants}
        for number, case in enumerate(self.passages(text), start=1):
            self.tell(f"text: {corpus} {number}/{self.size.passages}, {len(case.tokens)} tokens")
            for name, compared in self.compare(case).items():
                read[name].append(compared)
            yield {name: distance(each, self.size.unit) for name, each in read.items()}

    def passages(self, text: str) -> list[Case]:
        """What is read of a text."""
        return passages(self.tokenizer, text, self.size.passages, min(self.size.passage_tokens, self.max_len))

    def tasks(self, kind: str) -> Iterator[list[Task]]:
        """The contexts of a kind, for each length those of that length."""
        for length, count in zip(self.size.lengths, self.size.contexts, strict=True):
            fits = min(length, self.max_len - 64)
            self.tell(f"task: {kind}, {fits} tokens, {count} contexts")
            yield list(tasks(self.tokenizer, kind, fits, count, questions=self.size.questions))

    def recall(self, kind: str) -> Iterator[list[dict[str, Any]]]:
        """For each length of a kind of task: who answers right, and how surprising the right answer is.

        After each context, of all so far. A length that the full run fails is given up after 100 questions; those
        that count are reported together as well, as length None.
        """
        report: list[dict[str, Any]] = []
        counted: list[Sequence[Mapping[str, Compared]]] = []
        for asked in self.tasks(kind):
            contexts: list[Sequence[Mapping[str, Compared]]] = []
            for number, task in enumerate(asked, start=1):
                cases = answers(task, decode=self.decode, share=self.share)
                contexts.append([self.compare(case) for case in cases])
                so_far = {"kind": kind, "length": task.length, **answered(contexts)}
                yield [*report, so_far]
                if number % 8 == 0:
                    self.tell(f"task: {kind}, context {number}/{len(asked)}")
                if so_far["num_questions"] >= _TRIED and not so_far["counts"]:
                    break
            report.append(so_far)
            counted += contexts if so_far["counts"] else []
        if counted:
            yield [*report, {"kind": kind, "length": None, **answered(counted)}]

    def follow(self, count: int, followed: int, what: str) -> dict[str, list[Compared]]:
        """Every variant made to say, token by token, what the full run said of its own accord."""
        found: dict[str, list[Compared]] = {name: [] for name in self.variants}
        room = self.max_len - followed
        asked = prompts(self.tokenizer, count, min(self.size.prompt_tokens, room))
        self.tell(f"{what}: the full run's {followed} tokens after {count} prompts")
        said = self.full.continuations(asked, followed)
        for number, (prompt, answer) in enumerate(zip(asked, said, strict=True), start=1):
            if number == 1 or number % 25 == 0:
                self.tell(f"{what}: prompt {number}/{count}")
            for name, compared in self.compare(Case(prompt + answer, len(prompt), decode=self.decode)).items():
                found[name].append(compared)
        return found

    def divergence(self) -> dict[str, Any]:
        """How far greedy outputs are the same: following the full run, the first other choice is where they part."""
        followed = self.size.followed
        report = {}
        for name, each in self.follow(self.size.prompts, followed, "first divergence").items():
            where = [one.first_divergence for one in each]
            parted = [position for position in where if position is not None]
            report[name] = {
                "never": asdict(mean_of([[position is None] for position in where])),
                "mean_same": asdict(mean_of([[followed if position is None else position] for position in where])),
                "median_of_parted": float(np.median(parted)) if parted else None,
            }
        return {"followed": followed, "variants": report}

    def accumulation(self) -> dict[str, Any]:
        """Whether the distance grows along a long output: mean KL in eight runs of it."""
        followed = min(self.size.long_followed, self.max_len - 64)
        bounds = np.linspace(0, followed, 9).astype(int).tolist()
        report = {}
        for name, each in self.follow(self.size.long_prompts, followed, "error accumulation").items():
            kl = np.array([one.kl for one in each])
            report[name] = [float(kl[:, first:last].mean()) for first, last in pairwise(bounds)]
        return {"bounds": bounds, "variants": report}
