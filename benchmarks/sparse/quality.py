"""Every policy at every kept fraction over the same conversations, each token of each answer against full KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import torch

from benchmarks.quality.compare import Compared
from benchmarks.sparse.conversations import Conversation, conversations
from benchmarks.sparse.records import Record, Records
from pagoda import Engine, SamplingParams
from pagoda.engine.kv_policy import parse_kv_policy
from pagoda.engine.outputs import SparseReport
from pagoda.engine.step_plan import Rows
from pagoda.kv.keys import Scope

MOST_AT_ONCE = 16
# Windows of observation and of recent tokens are the policies' own defaults.
POLICIES = ("streaming", "h2o", "snapkv", "pyramid", "quest", "infinigen")


def with_budget(policy: str, budget: int) -> dict[str, Any]:
    """The request field of a policy that is written as a line of text, `infinigen:alpha=5`, with a budget in tokens."""
    parsed = parse_kv_policy(f"{policy}{',' if ':' in policy else ':'}budget={budget}")
    settings = {name: value for name, value in asdict(parsed).items() if value is not None}
    return {"name": parsed.name, **settings}


@dataclass
class Question:
    """A conversation under a policy: the logits before every token of its answers, and what the engine reported."""

    conversation: Conversation
    policy: dict[str, Any] | None
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    sparse: SparseReport | None = None

    @property
    def answers(self) -> list[torch.Tensor]:
        """`[tokens, vocab_size]` for each answer."""
        return [torch.stack([self.logits[at] for at in range(*answer)]) for answer in self.conversation.answers]


def ask(engine: Engine, questions: Sequence[Question]) -> None:
    """Have an engine that does nothing else read all of them at once, whatever it would say itself; fills them.

    The engine's own steps compute them, as it serves: only what its runner returns is noted, and replaced by the token
    that is to come.
    """
    core = engine.core
    runner: Any = core._runner  # private: only measurements need it
    told = {f"question-{index}": each for index, each in enumerate(questions)}
    execute = runner.execute

    def tapped(plan: Sequence[Rows]) -> torch.Tensor:
        logits: torch.Tensor = execute(plan)
        forced = torch.full_like(logits, -torch.inf)
        for row, rows in enumerate(rows for rows in plan if rows.needs_logits):
            question, position = told[rows.sample.request.request_id], len(rows.sample.tokens)
            if any(position in range(*answer) for answer in question.conversation.answers):
                question.logits[position] = logits[row].clone()
            forced[row, question.conversation.tokens[position]] = 0.0
        return forced

    for name, question in told.items():
        conversation, policy = question.conversation, question.policy
        params = SamplingParams(
            max_tokens=len(conversation.tokens) - conversation.num_prompt,
            temperature=0.0,
            ignore_eos=True,
            kv_policy=None if policy is None else parse_kv_policy(policy),
        )
        # h2o goes by what it sees computed; of the others, a hit leaves what they go by.
        scope = Scope(salt=name) if policy is not None and policy["name"] == "h2o" else Scope()
        core.add(name, conversation.tokens[: conversation.num_prompt], params, scope=scope)
    runner.execute = tapped
    try:
        while core.has_work:
            for output in core.step():
                told[output.request_id].sparse = output.sparse
    finally:
        runner.execute = execute


def measure(
    engine: Engine,
    kind: str,
    length: int,
    indices: range,
    policies: Sequence[str],
    fractions: Sequence[float],
    records: Records,
    tell: Callable[[str], None],
) -> None:
    """Add what is missing of these conversations, full KV included."""
    cells = [("full", 1.0), *product(policies, fractions)]
    told = list(conversations(engine.tokenizer, kind, length, indices.stop))
    at_once = max(1, MOST_AT_ONCE // len(cells))
    for first in range(indices.start, indices.stop, at_once):
        asked: list[tuple[int, str, float, Question]] = []
        for index in range(first, min(first + at_once, indices.stop)):
            missing = [cell for cell in cells if (kind, length, index, *cell) not in records]
            if missing and missing[0][0] != "full":
                missing.insert(0, cells[0])  # what the others are compared with
            for policy, fraction in missing:
                budget = round(fraction * told[index].num_prompt)
                wish = None if policy == "full" else with_budget(policy, budget)
                asked.append((index, policy, fraction, Question(told[index], wish)))
        tell(f"{kind}, {length} tokens, conversations from {first} on: {len(asked)} to ask")
        ask(engine, [question for *_, question in asked])
        full = {index: question.answers for index, policy, _, question in asked if policy == "full"}
        for index, policy, fraction, question in asked:
            one = told[index]
            answers = list(_compared(one, full[index], question.answers))
            kv_bytes = float(engine.core.cache.layout.bytes_per_token * one.num_prompt)
            done = None if question.sparse is None else asdict(question.sparse)
            num_steps = len(one.tokens) - one.num_prompt
            records.add(Record(kind, length, index, policy, fraction, answers, num_steps, kv_bytes, done))


def _compared(
    conversation: Conversation, full: Sequence[torch.Tensor], other: Sequence[torch.Tensor]
) -> Iterator[Compared]:
    for (first, last), p, q in zip(conversation.answers, full, other, strict=True):
        compared = Compared()
        compared.add(p, q, conversation.tokens[first:last])
        yield compared
