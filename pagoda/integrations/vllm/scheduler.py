"""The scheduler's side: names blocks, decides what is asked for, loaded, saved and kept. Has no tier and no tensor.

matched_tokens   "how much beyond this prefix?"   ask, and "later" until all workers answered
allocated        blocks for that many tokens      load
orders           what a step computes             save what it completes
finished         the end                          keep, and explain
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagoda.errors import InvalidRequest
from pagoda.integrations.vllm.explain import explain
from pagoda.integrations.vllm.keys import RequestKeys, VllmRequest, scope_of
from pagoda.integrations.vllm.messages import Answer, Ask, Keep, Load, Orders, Replies, Save, Told, together
from pagoda.integrations.vllm.params import NAME, Params, read_params
from pagoda.integrations.vllm.stats import Figures
from pagoda.kv.keys import KEY_BYTES, BlockKey, KeyChain

logger = logging.getLogger("vllm.pagoda")

_FIRST_GUESS_S_PER_TOKEN = 0.0005
_LEAST_TOKENS = 64  # of a step that says something about speed
_MAX_GHOSTS = 1 << 18

BlockIdsOf = Callable[[str], Sequence[int]]


@dataclass(slots=True, eq=False)
class _Tracked:
    """A request from its arrival to its end.

    Attributes:
        keys: None: nothing of it is looked up or saved.
        asked: the first block of the ask under way, if there is one.
        answer: what all workers have of it, once they told.
        loading: blocks of the load under way.
        num_saved: blocks from the front that are saved or need not be.
        gave_up: what was there could not be loaded: do not ask again.
        num_local: blocks of the prompt that vLLM had when it was last admitted.
        sources: the tiers of the blocks after those that we gave.
        last: how the last ask or load ended.
        written: which of the blocks last asked for, from block `written_from` on, tiers had once.
    """

    request: VllmRequest
    params: Params
    keys: RequestKeys | None
    complaint: str = ""
    asked: int | None = None
    answer: Answer | None = None
    loading: int = 0
    num_saved: int | None = None
    gave_up: bool = False
    num_local: int = 0
    sources: tuple[str, ...] = ()
    last: Answer | None = None
    written: Sequence[bool] = ()
    written_from: int = 0

    @property
    def num_there(self) -> int:
        """How many of the first blocks there were, here and in tiers, when they were last asked."""
        return self.written_from + self.last.num_there if self.last is not None else self.num_local

    @property
    def missed_was_written(self) -> bool:
        """Whether tiers once had the first block that nobody had."""
        index = self.num_local + len(self.sources) - self.written_from
        return 0 <= index < len(self.written) and self.written[index]


class SchedulerSide:
    """Decides for all requests of one vLLM engine.

    Args:
        chain: names of blocks.
        block_size: tokens in a block.
        num_workers: how many must answer an ask.
        namespace: whose all blocks are.
        clock: seconds.
    """

    def __init__(
        self,
        chain: KeyChain,
        block_size: int,
        num_workers: int,
        namespace: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.figures = Figures()
        self.s_per_token = _FIRST_GUESS_S_PER_TOKEN
        self._chain = chain
        self._block_size = block_size
        self._num_workers = num_workers
        self._namespace = namespace
        self._clock = clock
        self._requests: dict[str, _Tracked] = {}
        self._orders = Orders()
        self._answers: Told = {}
        self._loaded: Told = {}
        self._updated = 0.0
        self._written: OrderedDict[BlockKey, None] = OrderedDict()

    # -- a prompt arrives --------------------------------------------------------------------------------------------

    def matched_tokens(self, request: VllmRequest, num_local_tokens: int) -> int | None:
        """How many tokens after the first `num_local_tokens` tiers can supply; None: ask again after a step."""
        tracked = self._track(request)
        first = tracked.num_local = num_local_tokens // self._block_size
        if tracked.keys is None or tracked.gave_up or request.skip_reading_prefix_cache:
            return 0
        if tracked.asked is None:
            return None if self._ask(tracked, tracked.keys, first) else 0
        if tracked.answer is None:
            return None
        if first < tracked.asked:  # vLLM lost meanwhile what came before
            return 0
        return max(0, tracked.asked + len(tracked.answer.sources) - first) * self._block_size

    def _track(self, request: VllmRequest) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            params, complaint = Params(), ""
            try:
                params = read_params(request.kv_transfer_params)
            except InvalidRequest as error:  # raised here, it would end the engine
                complaint = str(error)
                logger.warning("request %s: %s", request.request_id, complaint)
            scope = scope_of(request, self._namespace)
            keys = None if scope is None else RequestKeys(self._chain, request, scope, self._block_size)
            tracked = self._requests[request.request_id] = _Tracked(request, params, keys, complaint)
        return tracked

    def _ask(self, tracked: _Tracked, keys: RequestKeys, first: int) -> bool:
        """Ask the workers, unless there is nothing to ask for: the last token is always computed."""
        use, size = tracked.params.use, self._block_size
        last = (tracked.request.num_tokens - 1) // size
        if use.max_restored_tokens is not None:
            last = min(last, first + use.max_restored_tokens // size)
        if first >= last:
            return False
        recompute_s = (last - first) * size * self.s_per_token
        patience_s = use.patience_s(recompute_s)
        wanted = keys.between(first, last)
        self._orders.asks.append(Ask(tracked.request.request_id, wanted, recompute_s, patience_s))
        tracked.asked, tracked.answer = first, None
        tracked.written, tracked.written_from = [key in self._written for key in wanted], first
        return True

    # -- it is admitted ----------------------------------------------------------------------------------------------

    def allocated(self, request: VllmRequest, block_ids: Sequence[int], num_tokens: int) -> None:
        """vLLM has these blocks for the request, and waits for `num_tokens` tokens after what it had itself.

        It calls this again with none when it goes on with the request.
        """
        tracked = self._track(request)
        if num_tokens and tracked.asked is not None and tracked.answer is not None:
            first, count = tracked.num_local, num_tokens // self._block_size
            skipped = first - tracked.asked
            self._orders.loads.append(Load(request.request_id, skipped, block_ids[first : first + count]))
            tracked.sources = tracked.answer.sources[skipped:][:count]
            tracked.loading = count
            if tracked.keys is not None:
                self._note(tracked.keys.between(first, first + count))
        elif tracked.asked is not None:
            tracked.sources = ()
            self._orders.ended.append(request.request_id)
        tracked.last = tracked.answer or tracked.last
        tracked.asked = tracked.answer = None

    def sources(self, request_id: str) -> tuple[str, ...]:
        """The tiers that the blocks of the load under way come from."""
        tracked = self._requests.get(request_id)
        return () if tracked is None else tracked.sources

    # -- a step ------------------------------------------------------------------------------------------------------

    def orders(self, num_scheduled: Mapping[str, int], block_ids_of: BlockIdsOf) -> Orders:
        """What the workers have to do with a step that computes so many tokens of these requests."""
        orders, self._orders = self._orders, Orders()
        orders.num_tokens, orders.started = sum(num_scheduled.values()), self._clock()
        for name, num_tokens in num_scheduled.items():
            tracked = self._requests.get(name)
            if tracked is not None and tracked.keys is not None and tracked.params.use.store:
                self._save(orders, tracked, tracked.keys, num_tokens, block_ids_of)
        return orders

    def _save(
        self, orders: Orders, tracked: _Tracked, keys: RequestKeys, num_tokens: int, block_ids_of: BlockIdsOf
    ) -> None:
        """Save the blocks that this step completes: all of their tokens are known and computed then."""
        request, size = tracked.request, self._block_size
        computed = request.num_computed_tokens
        # What vLLM had when it admitted the request was saved as it was computed; what failed to load is computed now.
        saved = computed // size if tracked.num_saved is None else min(tracked.num_saved, computed // size)
        whole = min(computed + num_tokens, request.num_tokens) // size
        tracked.num_saved = max(saved, whole)
        if whole <= saved:
            return
        block_ids = block_ids_of(request.request_id)
        for key, block_id in zip(keys.between(saved, whole), block_ids[saved:whole], strict=True):
            orders.saves.append(Save(key, block_id, tracked.params.priority))
        self._note(keys.between(saved, whole))

    def _note(self, keys: Sequence[BlockKey]) -> None:
        """Remember that tiers have, or get, these blocks: if they are missed later, they were evicted."""
        self._written.update(dict.fromkeys(keys))
        while len(self._written) > _MAX_GHOSTS:
            self._written.popitem(last=False)

    def update(self, replies: Replies | None) -> None:
        """A step is done, and the workers told this."""
        if replies is None:
            return
        if replies.step is not None:
            now, (started, num_tokens) = self._clock(), replies.step
            if num_tokens >= _LEAST_TOKENS:  # it began when it was scheduled, or when the one before it was done
                self.s_per_token += 0.2 * ((now - max(started, self._updated)) / num_tokens - self.s_per_token)
            self._updated = now
        for tracked, answer in self._complete(self._answers, replies.answers):
            if tracked.asked is not None:
                tracked.answer = answer
        for tracked, answer in self._complete(self._loaded, replies.loaded):
            tracked.gave_up = len(answer.sources) < tracked.loading
            tracked.sources, tracked.last, tracked.loading = answer.sources, answer, 0

    def _complete(self, told: Told, news: Told) -> list[tuple[_Tracked, Answer]]:
        """Take in what workers told of requests that still are; take out what all of them did."""
        told.update(together(told, {name: one for name, one in news.items() if name in self._requests}))
        names = [name for name, (count, _) in told.items() if count == self._num_workers]
        return [(self._requests[name], told.pop(name)[1]) for name in names]

    def take_figures(self) -> Figures:
        """What was counted since the last call."""
        figures, self.figures = self.figures, Figures()
        return figures

    def forget(self) -> None:
        """Let nothing be found that was written so far: vLLM resets caches when the weights in memory have changed.

        What is written from now on is found until this engine ends.
        """
        self._chain = self._chain.for_model(secrets.token_bytes(KEY_BYTES))
        for tracked in self._requests.values():
            tracked.keys = None

    # -- the end -----------------------------------------------------------------------------------------------------

    def finished(self, request: VllmRequest) -> dict[str, Any] | None:
        """A request ended: what to tell its client, in `kv_transfer_params`."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return None
        if tracked.asked is not None or tracked.loading:
            self._orders.ended.append(request.request_id)
        self._answers.pop(request.request_id, None)
        self._loaded.pop(request.request_id, None)
        if tracked.complaint:
            return {NAME: {"error": tracked.complaint}}
        if tracked.keys is None:
            return None
        num_whole = request.num_prompt_tokens // self._block_size
        computed = min(num_whole, request.num_computed_tokens // self._block_size)
        keys = tracked.keys.between(0, computed)
        if tracked.params.lease_s and computed:
            self._orders.keeps.append(Keep(keys, time.time() + tracked.params.lease_s))
        told = explain(
            num_whole=(request.num_prompt_tokens - 1) // self._block_size,
            num_local=tracked.num_local,
            sources=tracked.sources,
            outcome=tracked.last,
            num_there=tracked.num_there,
            was_written=tracked.missed_was_written,
        )
        self.figures.add("pagoda_vllm_missed_tokens", told.num_missed * self._block_size, told.reason)
        logger.info("request %s: %s", request.request_id, told.sentence(self._block_size))
        return {NAME: told.params(self._block_size)}
