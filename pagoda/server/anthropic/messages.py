"""/v1/messages: a conversation to one message, whole or as Anthropic's stream of events.

message_start ── content_block_start ── content_block_delta ... ── content_block_stop ── message_delta ── message_stop
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from pagoda.engine.outputs import Completion, Delta, FinishReason, LeaseOutcome, RequestOutput
from pagoda.engine.params import Span
from pagoda.errors import InvalidRequest, RequestAborted
from pagoda.server.alignment import stable_tokens
from pagoda.server.anthropic.breakpoints import find_breakpoints, input_usage, place_leases
from pagoda.server.anthropic.conversation import Conversation, parse_conversation
from pagoda.server.anthropic.errors import describe_error
from pagoda.server.anthropic.schema import MessagesRequest, PromptFields, validate
from pagoda.server.backend import Scope, Tokenizer
from pagoda.server.block_names import block_names, wants_block_names
from pagoda.server.body import parse_object
from pagoda.server.disconnect import until_disconnect
from pagoda.server.explain import about_cache
from pagoda.server.ids import ANTHROPIC_HEADER, id_headers, new_id
from pagoda.server.leases import lease_report
from pagoda.server.openai.cached import start_of
from pagoda.server.openai.respond import PromptJob, Served, blend_usage
from pagoda.server.passages import Passages
from pagoda.server.stream import Chunk, NamedEventStream, TextEvent, named_event


@dataclass(frozen=True, kw_only=True)
class MessageJob(PromptJob):
    """What to run. `num_breakpoints` counts those that asked for nothing, too."""

    num_breakpoints: int
    tokenizer: Tokenizer


def prepare_message(served: Served, body: bytes, namespace: str) -> MessageJob:
    """Parse, render and tokenize a request. Takes time in proportion to the body: call it from a thread.

    Raises:
        RequestError: whatever is wrong with it.
    """
    request = validate(MessagesRequest, parse_object(body))
    model = served.resolve(request.model)
    params = request.sampling_params()
    tokenizer = served.engine.tokenizer
    conversation, salt = _conversation(served, namespace, request)
    points = find_breakpoints(conversation, request.cache_control)

    def encode_cut(cut: Conversation) -> list[int]:
        return _encode(served, cut, served.blend.passages(request.blend))[0]

    passages = served.blend.passages(request.blend)
    prompt, spans = _encode_whole(served, conversation, passages)

    def next_turn(answer: str) -> list[int]:
        said = [*conversation.messages, {"role": "assistant", "content": answer}]
        return stable_tokens(said, conversation.functions, tokenizer)

    return MessageJob(
        id=new_id("msg"),
        model=model,
        prompt=prompt,
        params=params,
        scope=Scope(namespace, salt),
        priority=request.priority,
        stream=bool(request.stream),
        leases=place_leases(points, prompt, encode_cut),
        blend=served.blend.spec(request.blend, passages, spans),
        num_breakpoints=len(points),
        tokenizer=tokenizer,
        next_turn=None if spans else next_turn,  # blended KV is found by no next turn
    )


def count_tokens(served: Served, body: bytes, namespace: str) -> int:
    """Tokens of the prompt that a request would have. As slow as `prepare_message`.

    Raises:
        RequestError: whatever is wrong with it.
    """
    request = validate(PromptFields, parse_object(body))
    served.resolve(request.model)
    conversation, _ = _conversation(served, namespace, request)
    find_breakpoints(conversation, request.cache_control)
    return len(_encode_whole(served, conversation, served.blend.passages(request.blend))[0])


def _conversation(served: Served, namespace: str, request: PromptFields) -> tuple[Conversation, str]:
    """What becomes the prompt, from the named cache on that the request continues, and the salt of its KV."""
    goes_on = request.cached_content is not None
    start = start_of(served, namespace, request, request.tools if goes_on else None)
    if goes_on and request.system:
        raise InvalidRequest("system is part of the cached content: leave it out", param="system")
    shows_tools = (request.tool_choice or {}).get("type") != "none"
    conversation = parse_conversation(request.tools or () if shows_tools else (), request.system, request.messages)
    tools = tuple(start.tools) if shows_tools else ()
    return replace(conversation, start=tuple(start.messages), start_tools=tools), start.cache_salt


def _encode(served: Served, cut: Conversation, passages: Passages) -> tuple[list[int], tuple[Span, ...]]:
    """What precedes a breakpoint."""
    tokenizer = served.engine.tokenizer
    return passages.encode(cut.hiding(passages).render(tokenizer, add_generation_prompt=False), tokenizer)


def _encode_whole(served: Served, conversation: Conversation, passages: Passages) -> tuple[list[int], tuple[Span, ...]]:
    """A prompt, to which the model is to answer."""
    tokenizer, shown = served.engine.tokenizer, conversation.hiding(passages)
    text = shown.render(tokenizer, add_generation_prompt=True)
    if shown.functions:
        bare = replace(shown, tools=(), start_tools=())
        served.tools.check(text, lambda: bare.render(tokenizer, add_generation_prompt=True), passages)
    return passages.encode(text, tokenizer)


async def respond_message(request: Request, served: Served, job: MessageJob) -> Response:
    """Run a job. A refusal, or the client leaving, raises before any status is sent.

    Raises:
        RequestError: the engine refuses the job, or it was aborted.
    """
    if wants_block_names(request):
        return await block_names(served.engine, [job.prompt], job.scope, served.adapter(job.model))
    outputs = served.run(request, job)
    headers = id_headers(job.id, is_anthropic=True)
    if job.stream:

        async def first() -> tuple[int, RequestOutput]:
            return await anext(outputs)

        return _MessageEvents(await until_disconnect(request.receive, first()), outputs, _Events(job), headers)

    async def collect() -> dict[str, Any]:
        completion, output = Completion(0), None
        async for _, output in outputs:
            for delta in output.deltas:
                completion.add(delta)
        if output is None or completion.finish_reason is FinishReason.ABORT:
            raise RequestAborted("The request was aborted: the server is shutting down.")
        content = [{"type": "text", "text": completion.text}] if completion.text else []
        return {**_message(job, output, content), **_ending(completion)}

    return JSONResponse(await until_disconnect(request.receive, collect()), headers=headers)


def _message(job: MessageJob, output: RequestOutput, content: list[dict[str, Any]]) -> dict[str, Any]:
    """The message so far."""
    message = {
        "id": job.id,
        "type": "message",
        "role": "assistant",
        "model": job.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(output),
    }
    about = about_cache(output, job.tokenizer)
    if job.num_breakpoints:
        about["leases"] = _report(job, output.leases)
    if about:
        message["pagoda"] = about
    return message


def _report(job: MessageJob, outcomes: Sequence[LeaseOutcome]) -> list[dict[str, Any]]:
    unplaced = job.num_breakpoints - len(job.leases)
    why = "the chat template puts other text before this block: no prefix of the prompt ends with it"
    return [{"requested_tokens": 0, "leased_tokens": 0, "refused": why}] * unplaced + lease_report(outcomes)


def _usage(output: RequestOutput) -> dict[str, Any]:
    return {
        **input_usage(output.usage, output.leases),
        **{f"cache_{name}": count for name, count in blend_usage(output.usage).items()},
        "output_tokens": output.usage.num_output_tokens,
    }


def _ending(end: Completion | Delta) -> dict[str, Any]:
    if isinstance(end.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
    reason = "max_tokens" if end.finish_reason is FinishReason.LENGTH else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


class _Events:
    """An EventEncoder."""

    def __init__(self, job: MessageJob) -> None:
        self._job = job
        self._opened = False

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterable[Chunk]:
        if not self._opened:
            self._opened = True
            yield {"type": "message_start", "message": _message(self._job, output, [])}
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        for delta in output.deltas:
            if delta.finish_reason is FinishReason.ABORT:
                raise RequestAborted("The request was aborted: the server is shutting down.")
            if delta.text:
                yield _TEXT.of(delta.text)
            if delta.finish_reason is not None:
                yield {"type": "content_block_stop", "index": 0}
                yield {"type": "message_delta", "delta": _ending(delta), "usage": _usage(output)}

    def closing(self) -> Iterable[Chunk]:
        yield {"type": "message_stop"}


def _text_chunk(text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}


_TEXT = TextEvent(named_event, _text_chunk)


class _MessageEvents(NamedEventStream):
    """Errors in Anthropic's shape."""

    def encode_error(self, error: Exception) -> bytes:
        return self.encode(describe_error(error, self.headers[ANTHROPIC_HEADER])[1])
