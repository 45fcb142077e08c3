"""A validated request through the engine and out, in one piece or as a stream, in the wording of its endpoint."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from pagoda import __version__
from pagoda.engine.outputs import (
    Completion,
    Delta,
    Explanation,
    FinishReason,
    LeaseOutcome,
    RequestOutput,
    SparseReport,
    TokenLogprob,
    Usage,
)
from pagoda.engine.params import DEFAULT_RATIO, BlendSpec, LeaseSpec, SamplingParams
from pagoda.errors import ModelNotFound, RequestAborted
from pagoda.server.backend import Backend, Scope
from pagoda.server.block_names import block_names, wants_block_names
from pagoda.server.disconnect import until_disconnect
from pagoda.server.explain import explain_report, explained, wants_explanation
from pagoda.server.ids import id_headers, name_answer
from pagoda.server.leases import lease_report
from pagoda.server.ledger import Ledger, written
from pagoda.server.named_caches import NamedCaches
from pagoda.server.next_turn import NextTurn, Prefiller
from pagoda.server.openai.response_store import ResponseStore
from pagoda.server.passages import BlendDefaults
from pagoda.server.stream import Chunk, EventStream, TextEvent, event, merge
from pagoda.server.tools import ToolCheck

if TYPE_CHECKING:
    from pagoda.server.tracing import Tracing  # needs an optional package

LOWEST_LOGPROB = -9999.0  # what OpenAI writes for minus infinity, which JSON cannot


@dataclass(frozen=True, kw_only=True)
class PromptJob:
    """One prompt to run, and what its answer is called. `next_turn` tells what a chat goes on from."""

    id: str
    model: str
    prompt: Sequence[int]
    params: SamplingParams
    scope: Scope
    priority: int
    stream: bool
    leases: tuple[LeaseSpec, ...]
    blend: BlendSpec | None
    next_turn: NextTurn | None = None


@dataclass(frozen=True)
class Served:
    """The engine, the names that clients may call its model by, and what is kept for them between requests.

    With a `prefiller`, the next turn of a conversation is computed as soon as its answer is there.
    """

    engine: Backend
    model_names: tuple[str, ...]
    caches: NamedCaches = field(default_factory=NamedCaches)
    ledger: Ledger = field(default_factory=Ledger)
    responses: ResponseStore = field(default_factory=ResponseStore)
    prefiller: Prefiller | None = None
    tracing: Tracing | None = None
    blend: BlendDefaults = field(default_factory=lambda: BlendDefaults(DEFAULT_RATIO))
    tools: ToolCheck = field(default_factory=ToolCheck)
    created: int = field(default_factory=lambda: int(time.time()))

    def stream(
        self,
        request: Request,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        scope: Scope,
        adapter: str | None,
        next_turn: NextTurn | None = None,
        **settings: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`Backend.stream`, on the account of whoever sent the request, and explained if its header asks for that."""
        stream = self.engine.stream(prompt, params, request_id=request_id, scope=scope, adapter=adapter, **settings)
        if self.tracing is not None:
            stream = self.tracing.follow(stream, request_id, request.headers)
        if self.prefiller is not None and next_turn is not None and params.n == 1 and params.max_tokens != 0:
            stream = self.prefiller.follow(stream, next_turn, scope, adapter, params.tier_use)
        if wants_explanation(request):
            stream = explained(stream, self.engine, request_id, request.state.namespace)
        return self.ledger.metered(stream, request.state.account)

    def run(self, request: Request, job: PromptJob) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The stream of a job, which names the answer to the request."""
        name_answer(request, job.id)
        stream = self.stream(
            request,
            job.prompt,
            job.params,
            request_id=job.id,
            scope=job.scope,
            priority=job.priority,
            leases=job.leases,
            blend=job.blend,
            next_turn=job.next_turn,
            adapter=self.adapter(job.model),
        )
        return merge([stream])

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names, and those of the adapters that are loaded now."""
        return (*self.model_names, *(name for name in self.engine.adapters if name not in self.model_names))

    def adapter(self, name: str) -> str | None:
        """The adapter that a served name means; None if it is the model itself."""
        return None if name in self.model_names else name

    def resolve(self, name: str | None) -> str:
        """The served name that a request means, the model's or an adapter's; without a name, the model's first.

        Raises:
            ModelNotFound: no model of that name is served.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.names:
            known = ", ".join(self.names)
            raise ModelNotFound(f"The model {name[:200]!r} is not served here; there is: {known}.", param="model")
        return name


@dataclass(frozen=True)
class Job:
    """What to run. Choice `i * params.n + j` of the answer is sample `j` of prompt `i`.

    `leases` and `blends` are each prompt's; without `blends` none has passages.
    `next_turn` tells what a chat goes on from. `limit_field` is what the request calls its `max_tokens`.
    """

    id: str
    model: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    scope: Scope
    priority: int
    stream: bool
    include_usage: bool
    leases: Sequence[Sequence[LeaseSpec]]
    blends: Sequence[BlendSpec | None] = ()
    next_turn: NextTurn | None = None
    limit_field: str = "max_tokens"


class Wording(Protocol):
    """How an endpoint says things. One instance serves one answer and may keep state."""

    answer_object: str
    chunk_object: str

    def opening(self, choice: int) -> Iterable[dict[str, Any]]:
        """The chunk choices to send before a choice's first delta."""

    def chunk(self, choice: int, delta: Delta) -> dict[str, Any]:
        """The chunk choice of a delta."""

    def whole(self, choice: int, completion: Completion) -> dict[str, Any]:
        """The choice of a finished sample."""


async def respond(request: Request, served: Served, job: Job, wording: Wording) -> Response:
    """Run a job. A refusal, or the client leaving, raises before any status is sent.

    Raises:
        RequestError: the engine refuses the job, or it was aborted.
    """
    if wants_block_names(request):
        return await block_names(served.engine, job.prompts, job.scope, served.adapter(job.model))
    name_answer(request, job.id)
    streams = [
        served.stream(
            request,
            prompt,
            job.params,
            request_id=f"{job.id}-{index}",
            scope=job.scope,
            priority=job.priority,
            leases=job.leases[index],
            blend=job.blends[index] if job.blends else None,
            next_turn=job.next_turn,
            adapter=served.adapter(job.model),
        )
        for index, prompt in enumerate(job.prompts)
    ]
    outputs = merge(streams)
    frame = _Frame(served, job, wording)
    headers = id_headers(job.id)
    if job.stream:

        async def first() -> tuple[int, RequestOutput]:
            return await anext(outputs)

        # The first news comes before the status line, so that a refusal can still be a 400.
        return EventStream(await until_disconnect(request.receive, first()), outputs, frame, headers)

    async def collect() -> dict[str, Any]:
        completions = [Completion(choice) for choice in range(len(job.prompts) * job.params.n)]
        async for prompt_index, output in outputs:
            frame.count(prompt_index, output)
            for delta in output.deltas:
                completions[frame.choice_of(prompt_index, delta)].add(delta)
        if any(completion.finish_reason is FinishReason.ABORT for completion in completions):
            raise RequestAborted("The request was aborted: the server is shutting down.")
        return frame.answer(completions)

    return JSONResponse(await until_disconnect(request.receive, collect()), headers=headers)


class _Frame:
    """The fields around the choices, and the usage. An EventEncoder."""

    def __init__(self, served: Served, job: Job, wording: Wording) -> None:
        self._job = job
        self._wording = wording
        self._usages: dict[int, Usage] = {}
        self._leases: dict[int, tuple[LeaseOutcome, ...]] = {}
        self._explanations: dict[int, Explanation] = {}
        self._sparse: dict[int, SparseReport] = {}
        self._tokenizer = served.engine.tokenizer
        self._num_finished = 0
        self._texts: dict[int, TextEvent] = {}  # of the choices that have begun
        self._common = {
            "id": job.id,
            "created": int(time.time()),
            "model": job.model,
            "system_fingerprint": f"pagoda-{__version__}-{served.engine.model_name}",
        }

    def choice_of(self, prompt_index: int, delta: Delta) -> int:
        return prompt_index * self._job.params.n + delta.index

    def count(self, prompt_index: int, output: RequestOutput) -> None:
        self._usages[prompt_index] = output.usage
        self._leases[prompt_index] = output.leases
        self._num_finished += output.finished
        if output.explanation is not None:
            self._explanations[prompt_index] = output.explanation
        if output.sparse is not None:
            self._sparse[prompt_index] = output.sparse

    def answer(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = [self._wording.whole(choice, completion) for choice, completion in enumerate(completions)]
        whole = {**self._common, "object": self._wording.answer_object, "choices": choices, "usage": self._usage()}
        return {**whole, **self._pagoda()}

    def _pagoda(self) -> dict[str, Any]:
        """The field that tells what became of leases, why prompts missed and what kv_policy did, each if asked for."""
        about: dict[str, Any] = {}
        if leases := [outcome for index in sorted(self._leases) for outcome in self._leases[index]]:
            about["leases"] = lease_report(leases)
        if self._explanations:
            reports = [
                explain_report(each, self._tokenizer)
                for _, each in sorted(self._explanations.items(), key=itemgetter(0))
            ]
            about["explain"] = reports if len(self._job.prompts) > 1 else reports[0]
        if self._sparse:
            done = [asdict(each) for _, each in sorted(self._sparse.items(), key=itemgetter(0))]
            about["kv_policy"] = done if len(self._job.prompts) > 1 else done[0]
        return {"pagoda": about} if about else {}

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterable[Chunk]:
        self.count(prompt_index, output)
        for delta in output.deltas:
            choice = self.choice_of(prompt_index, delta)
            if choice not in self._texts:
                self._texts[choice] = self._text_event(choice)
                for opening in self._wording.opening(choice):
                    yield self._chunk([opening])
            if delta.text and not delta.logprobs and delta.finish_reason is None:
                yield self._texts[choice].of(delta.text)
            elif delta.text or delta.logprobs or delta.finish_reason:
                chunk = self._chunk([self._wording.chunk(choice, delta)])
                is_last = self._num_finished == len(self._job.prompts) and delta is output.deltas[-1]
                yield {**chunk, **self._pagoda()} if is_last and not self._job.include_usage else chunk

    def _text_event(self, choice: int) -> TextEvent:
        """What tells the new text of a choice, and nothing else."""
        return TextEvent(event, lambda text: self._chunk([self._wording.chunk(choice, Delta(choice, text, ()))]))

    def closing(self) -> Iterable[Chunk]:
        if self._job.include_usage:
            yield {**self._chunk([]), "usage": self._usage(), **self._pagoda()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._common, "object": self._wording.chunk_object, "choices": choices}
        return {**chunk, "usage": None} if self._job.include_usage else chunk

    def _usage(self) -> dict[str, Any]:
        usages = self._usages.values()
        num_prompt = sum(usage.num_prompt_tokens for usage in usages)
        num_output = sum(usage.num_output_tokens for usage in usages)
        num_written = sum(sum(written(self._usages[i], self._leases[i]).values()) for i in self._usages)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {
                "cached_tokens": sum(usage.num_hit_tokens for usage in usages),
                "cache_write_tokens": num_written,
                **blend_usage(*usages),
            },
        }


def blend_usage(*usages: Usage) -> dict[str, int]:
    """Of passages: prompt tokens reused, those found and computed anew, and what was computed beside the prompt."""
    counts = {
        "blended_tokens": sum(usage.num_blended_tokens for usage in usages),
        "recomputed_tokens": sum(usage.num_recomputed_tokens for usage in usages),
        "extra_computed_tokens": sum(usage.num_extra_tokens for usage in usages),
    }
    return counts if any(counts.values()) else {}


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB)


def alternatives(entry: TokenLogprob) -> list[tuple[int, float]]:
    """(token id, log-probability) of the likeliest tokens, finite."""
    return [(token_id, finite(logprob)) for token_id, logprob in entry.top]
