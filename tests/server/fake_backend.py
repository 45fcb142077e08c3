"""A backend that computes nothing but behaves: streams, stops, drains, aborts, shares prefixes, reports, keeps count.

Its tokens are UTF-8 bytes (0..255) and two chat markers. Its answer to any prompt is the words of `STORY`, rotated by
the sample's index; greedy or not makes no difference.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagoda.engine.outputs import (
    AgeHistogram,
    Delta,
    EngineObserver,
    Explanation,
    FinishReason,
    LeaseOutcome,
    MissReason,
    RequestOutput,
    RequestStats,
    StepStats,
    TierReport,
    TokenLogprob,
    Usage,
)
from pagoda.engine.params import BlendSpec, LeaseSpec, SamplingParams
from pagoda.engine.pressure.report import PressureReport
from pagoda.errors import ContextTooLong, InvalidRequest, LeaseRefused, Overloaded, RequestAborted
from pagoda.kv.keys import Scope

STORY = "once upon a time a pagoda kept every block it had ever seen. "
IM_START, IM_END = 256, 257
BLOCK_SIZE = 16
NUM_BLOCKS = 1000


class FakeTokenizer:
    vocab_size = 258

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        import threading

        self.threads.add(threading.current_thread().name)
        ids: list[int] = []
        for index, part in enumerate(text.split("<|im_start|>")):
            ids += [IM_START] * (index > 0)
            for end_index, piece in enumerate(part.split("<|im_end|>")):
                ids += [IM_END] * (end_index > 0) + list(piece.encode())
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        if messages and messages[-1]["content"] == "unrenderable":
            raise InvalidRequest("the chat template refuses this", param="messages")
        text = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools or ())
        text += "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else (b"<|im_start|>", b"<|im_end|>")[token_id - 256]


@dataclass(frozen=True)
class FakeStats:
    num_blocks: int
    num_free_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_running: int
    num_waiting: int
    block_size: int = BLOCK_SIZE
    num_leased_blocks: int = 3
    lease_limit_blocks: int = 500
    num_leases: int = 2
    num_leases_refused: int = 1
    host_bytes: int = 4096
    fetched_bytes: int = 512
    pressure: PressureReport = field(default_factory=PressureReport)


class FakeAdmin:
    """The leases of a FakeBackend."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend

    def explanation(self, request_id: str, tenant: str) -> Explanation | None:
        return None

    def check_room(self, tokens: Sequence[int], scope: Scope) -> None:
        if self._backend.no_room is not None:
            raise LeaseRefused(self._backend.no_room)

    def lease_names(self) -> set[str]:
        return {name for _, name in self._backend.leases}

    def end_named(self, tenant: str, name: str) -> None:
        self._backend.leases.pop((tenant, name), None)

    def postpone(self, tenant: str, name: str, ttl_s: float) -> None:
        self._backend.leases[tenant, name] = ttl_s


class FakeBackend:
    model_name = "fake"

    def __init__(self, max_model_len: int = 2048, step_s: float = 0.0) -> None:
        self.max_model_len = max_model_len
        self.step_s = step_s
        self.tokenizer = FakeTokenizer()
        self.is_healthy = False
        self.pressure = PressureReport()
        self.overloaded: Overloaded | None = None  # how every request is refused
        self.live: dict[str, int] = {}  # request id -> blocks held
        self.seen: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.num_stops = 0
        self.held_back = asyncio.Event()  # cleared, requests wait in the queue
        self.held_back.set()
        self.failure: Exception | None = None  # raised in the middle of streams
        self.refusal: str | None = None  # why no lease is granted
        self.no_room: str | None = None  # why none could be
        self.leases: dict[tuple[str, str], float] = {}  # (tenant, name) -> seconds
        self._prompts: dict[Scope, list[list[int]]] = {}
        self.tier_reports: list[TierReport] = []
        self._observers: list[EngineObserver] = []
        self._draining = False
        self._kill = False

    adapters: Sequence[str] = ()

    def block_names(self, prompt: Sequence[int], scope: Scope, adapter: str | None = None) -> list[int] | None:
        return None

    async def load_adapter(self, name: str, path: str) -> None:
        raise NotImplementedError

    async def unload_adapter(self, name: str) -> None:
        raise NotImplementedError

    async def reload_weights(self, path: str) -> str:
        raise NotImplementedError

    async def start(self) -> None:
        self.is_healthy = True

    async def stop(self, drain_s: float = 10.0) -> None:
        self.num_stops += 1
        self._draining = True
        deadline = time.monotonic() + drain_s
        while self.live and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        self._kill = True
        self.is_healthy = False

    def add_observer(self, observer: EngineObserver) -> None:
        self._observers.append(observer)

    async def manage(self, work: Callable[[Any], Any]) -> Any:
        return work(FakeAdmin(self))

    def tiers(self) -> list[TierReport]:
        return self.tier_reports

    def block_ages(self) -> list[AgeHistogram]:
        return [AgeHistogram("lifetime", ((1.0, 2), (float("inf"), 1)), 5.0)]

    def stats(self) -> FakeStats:
        held = sum(self.live.values())
        return FakeStats(NUM_BLOCKS, NUM_BLOCKS - held, held, 0, len(self.live), 0, pressure=self.pressure)

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        scope: Scope = Scope(),
        priority: int = 0,
        leases: Sequence[LeaseSpec] = (),
        adapter: str | None = None,
        blend: BlendSpec | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        if self._draining:
            raise RequestAborted("the engine is stopping")
        if self.overloaded is not None:
            raise self.overloaded
        room = self.max_model_len - len(prompt)
        if room < (1 if params.max_tokens is None else params.max_tokens):
            raise ContextTooLong(
                f"{len(prompt)} prompt tokens, and max_tokens asks for {params.max_tokens or 1} more: they "
                f"exceed the context of {self.max_model_len}",
                param="prompt" if room < 1 else "max_tokens",
            )
        request_id = request_id or uuid.uuid4().hex
        self.live[request_id] = -(-len(prompt) // BLOCK_SIZE)
        self.seen.append(
            {
                "id": request_id,
                "prompt": list(prompt),
                "params": params,
                "scope": scope,
                "priority": priority,
                "leases": leases,
                "blend": blend,
            }
        )
        start = time.monotonic()
        outcomes = tuple(
            LeaseOutcome(spec, 0 if self.refusal else spec.num_tokens // BLOCK_SIZE * BLOCK_SIZE, self.refusal)
            for spec in leases
        )
        usage, reason = Usage(len(prompt), 0, 0), FinishReason.ABORT
        try:
            await self.held_back.wait()
            num_hit = self._match(scope, list(prompt))
            spans = blend.spans if blend else ()
            num_passage = sum(max(0, span.stop - max(span.start, num_hit)) for span in spans)
            blended = (num_passage - num_passage // 4, num_passage // 4)
            for observer in self._observers:
                observer.on_admitted(len(prompt), num_hit)
            samples = [_Sample(index, params, room) for index in range(params.n)]
            if not self.refusal:
                self.leases.update({(scope.namespace, spec.name): spec.ttl_s for spec in leases if spec.name})
            while running := [s for s in samples if s.reason is None]:
                await asyncio.sleep(self.step_s)
                if self.failure is not None:
                    raise self.failure
                deltas = tuple(s.abort() if self._kill else s.step() for s in running)
                usage = Usage(len(prompt), num_hit, sum(s.num_tokens for s in samples), *blended)
                self._report_step(len(running))
                finished = all(s.reason is not None for s in samples)
                if finished:
                    reason = samples[-1].reason or FinishReason.STOP
                yield RequestOutput(request_id, deltas, usage, finished, outcomes)
        finally:
            if reason is FinishReason.ABORT:
                self.aborted.append(request_id)
            del self.live[request_id]
            seconds = time.monotonic() - start
            itl_s = (0.01,) * max(0, usage.num_output_tokens - 1)
            miss = MissReason.NONE if usage.num_hit_tokens else MissReason.NEVER_SEEN
            for observer in self._observers:
                observer.on_finished(
                    RequestStats(
                        request_id,
                        np.array(prompt),
                        scope,
                        reason,
                        usage,
                        0.001,
                        0.01,
                        itl_s,
                        seconds,
                        miss,
                        min(1, usage.num_hit_tokens),
                    )
                )

    def _match(self, scope: Scope, prompt: list[int]) -> int:
        def common(other: list[int]) -> int:
            pairs = zip(prompt[:-1], other, strict=False)
            return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt) - 1, len(other)))

        known = self._prompts.setdefault(scope, [])
        longest = max((common(other) for other in known), default=0)
        known.append(prompt)
        return longest

    def _report_step(self, num_decode: int) -> None:
        held = sum(self.live.values())
        for observer in self._observers:
            observer.on_step(StepStats(0.01, 0, num_decode, len(self.live), 0, 1, NUM_BLOCKS, held, 0, 2))


class _Sample:
    def __init__(self, index: int, params: SamplingParams, room: int) -> None:
        self.index = index
        self.params = params
        self.limit = room if params.max_tokens is None else min(params.max_tokens, room)
        words = STORY.split(" ")
        turn = index % len(words)
        self.story = " ".join(words[turn:] + words[:turn]).encode()
        self.num_tokens = 0
        self.text = ""
        self.sent = 0
        self.reason: FinishReason | None = None

    def step(self) -> Delta:
        if not self.limit:
            self.reason = FinishReason.LENGTH
            return Delta(self.index, "", (), finish_reason=self.reason)
        token = self.story[self.num_tokens % len(self.story)]
        self.num_tokens += 1
        self.text += chr(token)
        stop_reason: str | int | None = None
        if token in self.params.stop_token_ids:
            self.text = self.text[:-1]
            self.reason, stop_reason = FinishReason.STOP, token
        elif stop := next((s for s in self.params.stop if s in self.text), None):
            self.text = self.text[: self.text.index(stop)]
            self.reason, stop_reason = FinishReason.STOP, stop
        elif self.num_tokens >= self.limit:
            self.reason = FinishReason.LENGTH
        # Text that may be the start of a stop string stays back.
        held_back = 0 if self.reason else max((len(s) - 1 for s in self.params.stop), default=0)
        end = max(self.sent, len(self.text) - held_back)
        text, self.sent = self.text[self.sent : end], end
        logprobs: tuple[TokenLogprob, ...] = ()
        if self.params.logprobs is not None:
            top = tuple((65 + i, -float("inf") if i == 2 else -1.0 - i) for i in range(self.params.logprobs))
            logprobs = (TokenLogprob(token, -0.5, top),)
        return Delta(self.index, text, (token,), logprobs, self.reason, stop_reason)

    def abort(self) -> Delta:
        self.reason = FinishReason.ABORT
        return Delta(self.index, "", (), (), self.reason)
