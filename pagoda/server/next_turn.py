"""Prefill of the next turn: what a finished answer will be in the next request's prompt is computed while nobody waits.

    answer ends ── messages + answer in the chat template ── tokens ── computed, with no token to generate

The tree has the answer's tokens as they were sampled. The next turn's prompt has them as the template writes the text
and the tokenizer cuts it: other tokens, or at least an end marker more. If the user goes on, that part hits as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from pagoda.engine.outputs import FinishReason, RequestOutput
from pagoda.engine.params import SamplingParams, TierUse
from pagoda.errors import PagodaError
from pagoda.server.backend import Backend, Scope

NextTurn = Callable[[str], list[int]]  # the tokens that any prompt begins with that goes on after this answer

_LAST = 1 << 30
logger = logging.getLogger(__name__)


class Prefiller:
    """Follows answers, and computes in the background what comes after them."""

    def __init__(self, engine: Backend) -> None:
        self._engine = engine
        self._tasks: set[asyncio.Task[None]] = set()

    async def follow(
        self,
        stream: AsyncGenerator[RequestOutput, None],
        next_turn: NextTurn,
        scope: Scope,
        adapter: str | None,
        tier_use: TierUse,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The stream of one sample; when it has ended by itself, its next turn is prefilled.

        What the request does not let be stored in tiers, its next turn does not either.
        """
        text = ""
        reason: FinishReason | None = None
        async with aclosing(stream):
            async for output in stream:
                for delta in output.deltas:
                    text, reason = text + delta.text, delta.finish_reason
                yield output
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            params = SamplingParams(max_tokens=0, tier_use=TierUse(store=tier_use.store))
            task = asyncio.create_task(self._prefill(next_turn, text, scope, adapter, params))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _prefill(
        self, next_turn: NextTurn, text: str, scope: Scope, adapter: str | None, params: SamplingParams
    ) -> None:
        try:
            tokens = await asyncio.to_thread(next_turn, text)
            stats = self._engine.stats()
            if stats.num_waiting or stats.pressure.level:
                return  # others need the time or the room more
            async for _ in self._engine.stream(tokens, params, scope=scope, priority=_LAST, adapter=adapter):
                pass
        except PagodaError as error:
            logger.debug("a next turn was not prefilled: %s", error)
