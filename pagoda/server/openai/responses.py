"""/v1/responses: input items to a prompt, the answer to an output item; conversations go on by `previous_response_id`.

Streams are the events that OpenAI's client knows: created, in_progress, output_item.added, content_part.added,
output_text.delta ..., output_text.done, content_part.done, output_item.done, completed or incomplete.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from pagoda.engine.outputs import Completion, FinishReason, RequestOutput
from pagoda.engine.params import Span
from pagoda.errors import InvalidRequest, RequestAborted
from pagoda.server.backend import Scope, Tokenizer
from pagoda.server.block_names import block_names, wants_block_names
from pagoda.server.body import parse_object
from pagoda.server.disconnect import until_disconnect
from pagoda.server.errors import HttpError, describe
from pagoda.server.explain import about_cache
from pagoda.server.ids import id_headers, new_id
from pagoda.server.ledger import written
from pagoda.server.openai.breakpoints import find_marks, place_marks
from pagoda.server.openai.cached import start_of
from pagoda.server.openai.chat import normalize_messages
from pagoda.server.openai.respond import PromptJob, Served, blend_usage
from pagoda.server.openai.response_store import Conversation, Message, Shelf
from pagoda.server.openai.schema import GenerationRequest, Int32, validate
from pagoda.server.passages import FIELD as PASSAGE
from pagoda.server.passages import Passages
from pagoda.server.stream import NamedEventStream

_UNSUPPORTED = ("background", "conversation", "include", "max_tool_calls", "prompt", "top_logprobs")
_PART_TYPES = ("input_text", "output_text", "text")


class ResponsesRequest(GenerationRequest):
    """The body of /v1/responses."""

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: Annotated[Int32, Field(ge=1)] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[dict[str, Any]] | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class ResponseJob(PromptJob):
    """What to run. `earlier` and `new` are the conversation without instructions; `new` came with this request."""

    request: ResponsesRequest
    earlier: Conversation
    new: tuple[Message, ...]


def prepare_response(served: Served, shelf: Shelf, body: bytes, namespace: str) -> ResponseJob:
    """Parse, render and tokenize a request. Takes time in proportion to the body: call it from a thread.

    Raises:
        RequestError: whatever is wrong with it.
    """
    fields = parse_object(body)
    for name in _UNSUPPORTED:
        if fields.get(name):
            raise HttpError(400, "unsupported_parameter", f"{name} is not supported by this server.", param=name)
    request = validate(ResponsesRequest, fields)
    if (request.text or {}).get("format", {"type": "text"}) != {"type": "text"}:
        raise HttpError(400, "unsupported_parameter", "text.format may only be text.", param="text")
    model = served.resolve(request.model)
    tokenizer = served.engine.tokenizer
    params = request.sampling_params(tokenizer.vocab_size, max_tokens=request.max_output_tokens, logprobs=None)
    if params.n != 1:
        raise InvalidRequest("n must be 1", param="n")
    given = _given(request.input)
    new = normalize_messages(given)
    earlier = _earlier(shelf, request.previous_response_id)
    start = start_of(served, namespace, request, [_tool(tool) for tool in request.tools or ()])
    if request.cached_content is not None and request.instructions:
        raise InvalidRequest("instructions are part of the cached content: leave them out", param="instructions")
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    tools = start.tools if start.tools and fields.get("tool_choice") != "none" else None

    def encode(
        messages: Sequence[Any], passages: Passages, add_generation_prompt: bool = False
    ) -> tuple[list[int], tuple[Span, ...]]:
        whole = [*system, *start.messages, *earlier.messages, *normalize_messages(messages, passages)]
        shown = passages.hide_tools(tools, "tools") if tools else None
        text = tokenizer.render_chat(whole, shown, add_generation_prompt)
        if shown and add_generation_prompt:
            served.tools.check(text, lambda: tokenizer.render_chat(whole, None, add_generation_prompt), passages)
        return passages.encode(text, tokenizer)

    passages = served.blend.passages(request.blend)
    prompt, spans = encode(given, passages, add_generation_prompt=True)

    def encode_cut(messages: Sequence[Any]) -> list[int]:
        return encode(messages, served.blend.passages(request.blend))[0]

    marked = place_marks(find_marks(given), request.prompt_cache_options, prompt, encode_cut)
    return ResponseJob(
        id=new_id("resp"),
        model=model,
        request=request,
        earlier=earlier,
        new=tuple(new),
        prompt=prompt,
        params=params,
        scope=Scope(namespace, start.cache_salt),
        priority=request.priority,
        stream=bool(request.stream),
        leases=(*request.leases(len(prompt)), *marked),
        blend=served.blend.spec(request.blend, passages, spans),
    )


def _earlier(shelf: Shelf, response_id: str | None) -> Conversation:
    if response_id is None:
        return Conversation()
    earlier = shelf.get(response_id)
    if earlier is None:
        message = f"Response {response_id[:200]!r} is not kept here: this server keeps a bounded number, in memory."
        raise HttpError(404, "previous_response_not_found", message, param="previous_response_id")
    return earlier


def _given(given: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Input as chat messages, not checked yet."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise InvalidRequest("input is empty", param="input")
    return [_message(item, f"input[{index}]") for index, item in enumerate(given)]


def _message(item: Any, where: str) -> dict[str, Any]:
    """An input item as a chat message; `normalize_messages` checks what is left to check."""
    if not isinstance(item, dict):
        raise InvalidRequest(f"{where} must be an object", param="input")
    kind = item.get("type", "message")
    if kind == "message":
        content = item.get("content")
        parts = content if isinstance(content, str) else _parts(content, where)
        return {"role": item.get("role"), "content": parts, PASSAGE: item.get(PASSAGE)}
    if kind == "function_call":
        function = {name: item[name] for name in ("name", "arguments") if name in item}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        output = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        return {**output, PASSAGE: item.get(PASSAGE)}
    raise InvalidRequest(f"{where}: items of type {str(kind)[:100]!r} are not supported", param="input")


def _parts(content: Any, where: str) -> list[Any]:
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be a string or a list of parts", param="input")
    return [
        {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in _PART_TYPES else part
        for part in content
    ]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequest("tools may only be functions", param="tools")
    function = {name: value for name, value in tool.items() if name not in ("type", PASSAGE)}
    return {"type": "function", "function": function, PASSAGE: tool.get(PASSAGE)}


async def respond_response(request: Request, served: Served, shelf: Shelf, job: ResponseJob) -> Response:
    """Run a job and keep its conversation. A refusal, or the client leaving, raises before any status is sent.

    Raises:
        RequestError: the engine refuses the job, or it was aborted.
    """
    if wants_block_names(request):
        return await block_names(served.engine, [job.prompt], job.scope, served.adapter(job.model))
    outputs = served.run(request, job)
    answer = _Answer(job, shelf, served.engine.tokenizer)
    headers = id_headers(job.id)
    if job.stream:

        async def first() -> tuple[int, RequestOutput]:
            return await anext(outputs)

        return _ResponseEvents(await until_disconnect(request.receive, first()), outputs, answer, headers)

    async def collect() -> dict[str, Any]:
        async for _, output in outputs:
            answer.add(output)
        return answer.finished()

    return JSONResponse(await until_disconnect(request.receive, collect()), headers=headers)


class _Answer:
    """The response as it grows. An EventEncoder."""

    def __init__(self, job: ResponseJob, shelf: Shelf, tokenizer: Tokenizer) -> None:
        self._job = job
        self._shelf = shelf
        self._tokenizer = tokenizer
        self._completion = Completion(0)
        self._output: RequestOutput | None = None
        self._created = int(time.time())
        self._item_id = new_id("msg")
        self._num_events = 0

    def add(self, output: RequestOutput) -> None:
        self._output = output
        for delta in output.deltas:
            self._completion.add(delta)

    def finished(self) -> dict[str, Any]:
        """The final response; keeps the conversation."""
        if self._completion.finish_reason in (None, FinishReason.ABORT):
            raise RequestAborted("The request was aborted: the server is shutting down.")
        if self._job.request.store is not False and not self._job.request.is_prewarm:
            answer = {"role": "assistant", "content": self._completion.text}
            earlier, new = self._job.earlier, (*self._job.new, answer)
            self._shelf.put(Conversation((*earlier.messages, *new), (*earlier.ids, self._job.id)), len(new))
        return self._response(self._status(), [] if self._job.request.is_prewarm else [self._item(self._status())])

    def _status(self) -> str:
        if self._job.request.is_prewarm:
            return "completed"
        return "incomplete" if self._completion.finish_reason is FinishReason.LENGTH else "completed"

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        request, params = self._job.request, self._job.params
        response = {
            "id": self._job.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._job.model,
            "output": items,
            "parallel_tool_calls": False,
            "previous_response_id": request.previous_response_id,
            "store": request.store is not False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": request.tools or [],
            "top_p": params.top_p,
            "usage": None if status == "in_progress" else self._usage(),
        }
        if (
            status != "in_progress"
            and self._output is not None
            and (about := about_cache(self._output, self._tokenizer))
        ):
            response["pagoda"] = about
        return response

    def _usage(self) -> dict[str, Any]:
        assert self._output is not None
        usage = self._output.usage
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.num_hit_tokens,
                "cache_write_tokens": sum(written(usage, self._output.leases).values()),
                **blend_usage(usage),
            },
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        }

    def _item(self, status: str) -> dict[str, Any]:
        content = [self._part()] if status != "in_progress" else []
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._completion.text, "annotations": [], "logprobs": []}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterable[dict[str, Any]]:
        at = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        if self._output is None:
            yield self._event("response.created", response=self._response("in_progress", []))
            yield self._event("response.in_progress", response=self._response("in_progress", []))
        if self._output is None and not self._job.request.is_prewarm:
            yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress"))
            yield self._event("response.content_part.added", **at, part=self._part())
        self.add(output)
        for delta in output.deltas:
            if delta.text:
                yield self._event("response.output_text.delta", **at, delta=delta.text, logprobs=[])

    def closing(self) -> Iterable[dict[str, Any]]:
        at = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        final = self.finished()
        if not self._job.request.is_prewarm:
            yield self._event("response.output_text.done", **at, text=self._completion.text, logprobs=[])
            yield self._event("response.content_part.done", **at, part=self._part())
            yield self._event("response.output_item.done", output_index=0, item=self._item(self._status()))
        yield self._event(f"response.{self._status()}", response=final)


class _ResponseEvents(NamedEventStream):
    """Errors are events of type `error`."""

    def encode_error(self, error: Exception) -> bytes:
        fault = describe(error)[1]["error"]
        return self.encode({"type": "error", "code": fault["code"], "message": fault["message"], "param": None})
