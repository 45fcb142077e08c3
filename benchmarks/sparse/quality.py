"""Every policy at every kept fraction over the same conversations, each token of each answer against full KV."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.quality.compare import Compared, Figure, mean_of
from benchmarks.quality.forced import Forced
from benchmarks.quality.suite import PASSES
from benchmarks.sparse.conversations import Conversation, conversations
from pagoda.engine.outputs import SparseReport

Policy = Callable[[int], dict[str, Any]]

# A budget in tokens -> the request field. Windows of observation and of recent tokens are the policies' own defaults.
POLICIES: dict[str, Policy] = {
    name: (lambda budget, name=name: {"name": name, "budget": budget})
    for name in ("streaming", "h2o", "snapkv", "quest", "infinigen")
}
# The threshold bounds what crosses, the places what is there: without the one, the other alone decides.
POLICIES["infinigen, any score"] = lambda budget: {"name": "infinigen", "budget": budget, "alpha": 99}
_REPORTED = (
    "num_kept_tokens",
    "num_blocks",
    "num_returned_blocks",
    "returned_bytes",
    "host_bytes",
    "sketch_bytes",
    "fetched_bytes",
)


@dataclass
class Point:
    """One policy at one kept fraction: per conversation, its answers compared, and what the engine reported."""

    answers: list[list[Compared]] = field(default_factory=list)
    reports: list[SparseReport] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Figures of the first question and of the later ones, means over what the engine reported."""
        found: dict[str, Any] = {
            name: figures([of[first:last] for of in self.answers])
            for name, first, last in (("known", 0, 1), ("asked_again", 1, None))
        }
        for name in _REPORTED:
            found[name] = float(np.mean([getattr(report, name) for report in self.reports]))
        return found


def figures(answers: Sequence[Sequence[Compared]]) -> dict[str, Any]:
    def mean(value: Callable[[Compared], Sequence[float]]) -> Figure:
        return mean_of([[each for one in of for each in value(one)] for of in answers])

    return {
        "exact_match": asdict(mean(lambda one: [all(one.right)])),
        "answer_nll": asdict(mean(lambda one: [sum(one.nll)])),
        "answer_nll_change": asdict(mean(lambda one: [sum(one.nll) - sum(one.nll_full)])),
        "kl": asdict(mean(lambda one: one.kl)),
        "top1_agreement": asdict(mean(lambda one: one.agrees)),
        "num_answers": sum(map(len, answers)),
    }


class Questions:
    """Asks an engine. What full KV said of each conversation is kept, so that it is computed once."""

    def __init__(self, forced: Forced, tell: Callable[[str], None]) -> None:
        self._forced, self._tell = forced, tell
        self._tokenizer = forced.engine.tokenizer

    def ask(self, conversation: Conversation, policy: dict[str, Any] | None) -> tuple[list[torch.Tensor], Any]:
        """Logits before every token of every answer, `[tokens, vocab_size]` each, and the engine's report."""
        wanted = [range(*answer) for answer in conversation.answers]
        rows: dict[int, torch.Tensor] = {}
        read = self._forced.read(conversation.tokens, conversation.num_prompt, decode=True, kv_policy=policy)
        for position, logits in read:
            for offset, row in enumerate(logits):
                if any(position + offset in answer for answer in wanted):
                    rows[position + offset] = row
        return [torch.stack([rows[at] for at in answer]) for answer in wanted], self._forced.sparse

    def measure(self, kind: str, length: int, count: int, fractions: Sequence[float]) -> dict[str, Any]:
        """One kind of task: whether full KV masters it, and if so, what each policy makes of it."""
        told = list(conversations(self._tokenizer, kind, length, count))
        self._tell(f"{kind}, {length} tokens: full KV on {count} conversations")
        full = [self.ask(one, None)[0] for one in told]
        itself = [list(_compared(one, logits, logits)) for one, logits in zip(told, full, strict=True)]
        report = {"kind": kind, "length": length, "full": figures(itself), "points": []}
        report["counts"] = report["full"]["exact_match"]["value"] >= PASSES
        if not report["counts"]:
            return report
        for name, policy in POLICIES.items():
            for fraction in fractions:
                self._tell(f"{kind}, {length} tokens: {name} at {fraction:.0%}")
                point = Point()
                for one, logits in zip(told, full, strict=True):
                    asked, sparse = self.ask(one, policy(round(fraction * one.num_prompt)))
                    point.answers.append(list(_compared(one, logits, asked)))
                    point.reports.append(sparse)
                report["points"].append({"policy": name, "fraction": fraction, **point.summary()})
        gc.collect()
        return report


def _compared(
    conversation: Conversation, full: Sequence[torch.Tensor], other: Sequence[torch.Tensor]
) -> Iterator[Compared]:
    for (first, last), p, q in zip(conversation.answers, full, other, strict=True):
        compared = Compared()
        compared.add(p, q, conversation.tokens[first:last])
        yield compared
