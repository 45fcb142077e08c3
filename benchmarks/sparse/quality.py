"""Every policy at every kept fraction over the same conversations, each token of each answer against full KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import torch

from benchmarks.quality.compare import Compared
from benchmarks.quality.forced import Forced
from benchmarks.sparse.conversations import Conversation, conversations
from benchmarks.sparse.records import Record, Records
from pagoda.engine.kv_policy import parse_kv_policy
from pagoda.engine.outputs import SparseReport

# Windows of observation and of recent tokens are the policies' own defaults.
POLICIES = ("streaming", "h2o", "snapkv", "pyramid", "quest", "infinigen")


def with_budget(policy: str, budget: int) -> dict[str, Any]:
    """The request field of a policy that is written as a line of text, `infinigen:alpha=5`, with a budget in tokens."""
    parsed = parse_kv_policy(f"{policy}{',' if ':' in policy else ':'}budget={budget}")
    settings = {name: value for name, value in asdict(parsed).items() if value is not None}
    return {"name": parsed.name, **settings}


class Questions:
    """Asks an engine, conversation by conversation: what full KV says of one is computed once for all policies."""

    def __init__(self, forced: Forced, tell: Callable[[str], None]) -> None:
        self._forced, self._tell = forced, tell

    def ask(
        self, conversation: Conversation, policy: dict[str, Any] | None, *, share: bool = False
    ) -> tuple[list[torch.Tensor], SparseReport | None]:
        """Logits before every token of every answer, `[tokens, vocab_size]` each, and the engine's report.

        Args:
            share: the prompt may be hit in the cache, and stays there.
        """
        wanted = [range(*answer) for answer in conversation.answers]
        rows: dict[int, torch.Tensor] = {}
        read = self._forced.read(
            conversation.tokens, conversation.num_prompt, decode=True, share=share, kv_policy=policy
        )
        for position, logits in read:
            for offset, row in enumerate(logits):
                if any(position + offset in answer for answer in wanted):
                    rows[position + offset] = row
        return [torch.stack([rows[at] for at in answer]) for answer in wanted], self._forced.sparse

    def measure(
        self,
        kind: str,
        length: int,
        indices: range,
        policies: Sequence[str],
        fractions: Sequence[float],
        records: Records,
    ) -> None:
        """Add what is missing of these conversations, full KV included."""
        engine = self._forced.engine
        cells = [("full", 1.0), *product(policies, fractions)]
        told = conversations(engine.tokenizer, kind, length, indices.stop)
        for index, conversation in enumerate(told):
            missing = [cell for cell in cells if (kind, length, index, *cell) not in records]
            if index not in indices or not missing:
                continue
            self._tell(f"{kind}, {length} tokens, conversation {index}: {len(missing)} to ask")
            num_prompt, num_tokens = conversation.num_prompt, len(conversation.tokens)
            full, _ = self.ask(conversation, None, share=True)
            for policy, fraction in missing:
                asked, sparse = full, None
                if policy != "full":
                    field = with_budget(policy, round(fraction * num_prompt))
                    # h2o goes by what it sees computed; of the others, a hit leaves what they go by.
                    asked, sparse = self.ask(conversation, field, share=field["name"] != "h2o")
                answers = list(_compared(conversation, full, asked))
                kv_bytes = float(engine.core.cache.layout.bytes_per_token * num_prompt)
                done = None if sparse is None else asdict(sparse)
                num_steps = num_tokens - num_prompt
                records.add(Record(kind, length, index, policy, fraction, answers, num_steps, kv_bytes, done))


def _compared(
    conversation: Conversation, full: Sequence[torch.Tensor], other: Sequence[torch.Tensor]
) -> Iterator[Compared]:
    for (first, last), p, q in zip(conversation.answers, full, other, strict=True):
        compared = Compared()
        compared.add(p, q, conversation.tokens[first:last])
        yield compared
