"""Ledger: how many tokens each API key read, wrote, computed and generated. It survives restarts if it has a file.

engine.stream ──> metered(stream, account) ──> the answer
                      └─ the last output's usage and leases, once, however the stream ends
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pagoda.engine.outputs import LeaseOutcome, RequestOutput, Usage
from pagoda.server.state_file import StateFile

SHORT_TTL_S = 300.0


class Account(NamedTuple):
    """Who pays: a tenant, and which of its keys, by the start of that key's digest. Without keys both are empty."""

    tenant: str = ""
    key: str = ""


@dataclass(slots=True)
class Counts:
    """Requests and tokens.

    `read` of the `prompt` tokens hit, and `blended` were reused from passages; the others were computed. `written_5m`
    and `written_1h` of those came under a lease, of up to five minutes or longer. `extra` tokens were computed beside
    the prompts: see `Usage`.
    """

    requests: int = 0
    prompt: int = 0
    read: int = 0
    blended: int = 0
    written_5m: int = 0
    written_1h: int = 0
    generated: int = 0
    extra: int = 0

    def add(self, other: Counts) -> None:
        """Add another's. Mutates this one."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def written(usage: Usage, outcomes: Sequence[LeaseOutcome]) -> dict[float, int]:
    """Computed prompt tokens that are newly under a lease, by its seconds. A hit's tokens are none of them."""
    created: dict[float, int] = {}
    covered = usage.num_hit_tokens
    for outcome in sorted(outcomes, key=lambda each: each.num_tokens):
        created[outcome.spec.ttl_s] = created.get(outcome.spec.ttl_s, 0) + max(0, outcome.num_tokens - covered)
        covered = max(covered, outcome.num_tokens)
    return created


class Ledger:
    """The counts of every account since `since`, Unix time. For the event loop alone, but for `save`.

    Args:
        path: where they are kept; None keeps them for the life of the process.

    Raises:
        ConfigError: there is a file that is no ledger.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file = None if path is None else StateFile(path)
        self.since = time.time()
        self._counts: dict[Account, Counts] = {}
        if self._file is not None and (loaded := self._file.load()) is not None:
            try:
                self._restore(loaded)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise self._file.fault(error) from None

    def _restore(self, loaded: Any) -> None:
        self.since = float(loaded["since"])
        for each in loaded["accounts"]:
            account = Account(str(each.pop("tenant")), str(each.pop("key")))
            self._counts[account] = Counts(**{name: int(value) for name, value in each.items()})

    def snapshot(self) -> str:
        """What the file should hold now."""
        accounts = [{**account._asdict(), **asdict(counts)} for account, counts in self._counts.items()]
        return json.dumps({"since": self.since, "accounts": accounts}, indent=1)

    def save(self, text: str) -> None:
        """Write a snapshot, from any thread, if there is a file.

        Raises:
            OSError: it cannot be written.
        """
        if self._file is not None:
            self._file.save(text)

    def accounts(self, tenant: str | None = None) -> list[tuple[Account, Counts]]:
        """A tenant's accounts, or all, by name."""
        return sorted(item for item in self._counts.items() if tenant in (None, item[0].tenant))

    async def metered(
        self, stream: AsyncGenerator[RequestOutput, None], account: Account
    ) -> AsyncGenerator[RequestOutput, None]:
        """The stream, counted when it ends. A request that ends before its first output is not counted."""
        last: RequestOutput | None = None
        try:
            async with aclosing(stream):
                async for last in stream:
                    yield last
        finally:
            if last is not None:
                self._counts.setdefault(account, Counts()).add(_counts_of(last))


def _counts_of(output: RequestOutput) -> Counts:
    usage = output.usage
    by_ttl = written(usage, output.leases)
    short = sum(tokens for ttl_s, tokens in by_ttl.items() if ttl_s <= SHORT_TTL_S)
    return Counts(
        requests=1,
        prompt=usage.num_prompt_tokens,
        read=usage.num_hit_tokens,
        blended=usage.num_blended_tokens,
        written_5m=short,
        written_1h=sum(by_ttl.values()) - short,
        generated=usage.num_output_tokens,
        extra=usage.num_extra_tokens,
    )
