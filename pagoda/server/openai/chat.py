"""/v1/chat/completions: messages to a prompt, samples to assistant messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pagoda.engine.outputs import Completion, Delta, TokenLogprob
from pagoda.engine.params import Span
from pagoda.errors import InvalidRequest
from pagoda.server.alignment import stable_tokens
from pagoda.server.backend import Scope, Tokenizer
from pagoda.server.body import parse_object
from pagoda.server.errors import in_words_of
from pagoda.server.ids import new_id
from pagoda.server.openai.breakpoints import find_marks, place_marks
from pagoda.server.openai.cached import start_of
from pagoda.server.openai.respond import Job, Served, alternatives, finite
from pagoda.server.openai.schema import ChatRequest, validate
from pagoda.server.passages import Passages, is_marked

ROLES = ("system", "developer", "user", "assistant", "tool")


def prepare_chat(served: Served, body: bytes, namespace: str) -> tuple[Job, ChatWording]:
    """Parse, render and tokenize a request. Takes time in proportion to the body: call it from a thread.

    Raises:
        RequestError: whatever is wrong with it.
    """
    request = validate(ChatRequest, parse_object(body))
    model = served.resolve(request.model)
    tokenizer = served.engine.tokenizer
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    with in_words_of(max_tokens=request.limit_field):
        params = request.sampling_params(
            tokenizer.vocab_size,
            max_tokens=getattr(request, request.limit_field),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )
    start = start_of(served, namespace, request, request.tools)
    tools = start.tools if start.tools and request.tool_choice != "none" else None

    def encode(
        messages: Sequence[Any], passages: Passages, add_generation_prompt: bool = False
    ) -> tuple[list[int], tuple[Span, ...]]:
        said = [*start.messages, *normalize_messages(messages, passages)]
        shown = passages.hide_tools(tools, "tools") if tools else None
        text = tokenizer.render_chat(said, shown, add_generation_prompt)
        if shown and add_generation_prompt:
            served.tools.check(text, lambda: tokenizer.render_chat(said, None, add_generation_prompt), passages)
        return passages.encode(text, tokenizer)

    def next_turn(answer: str) -> list[int]:
        said = [*start.messages, *normalize_messages(request.messages), {"role": "assistant", "content": answer}]
        return stable_tokens(said, tools, tokenizer)

    passages = served.blend.passages(request.blend)
    prompt, spans = encode(request.messages, passages, add_generation_prompt=True)

    def encode_cut(messages: Sequence[Any]) -> list[int]:
        return encode(messages, served.blend.passages(request.blend))[0]

    leases = place_marks(find_marks(request.messages), request.prompt_cache_options, prompt, encode_cut)
    job = Job(
        id=new_id("chatcmpl"),
        model=model,
        prompts=[prompt],
        params=params,
        scope=Scope(namespace, start.cache_salt),
        priority=request.priority,
        stream=bool(request.stream),
        include_usage=request.include_usage,
        leases=[[*request.leases(len(prompt)), *leases]],
        blends=[served.blend.spec(request.blend, passages, spans)],
        limit_field=request.limit_field,
        next_turn=None if spans else next_turn,  # what goes on from blended KV goes on from nothing that is cached
    )
    return job, ChatWording(tokenizer)


def normalize_messages(messages: Sequence[Any], passages: Passages | None = None) -> list[dict[str, Any]]:
    """Messages as chat templates take them: text parts joined by newlines, `developer` as `system`.

    Args:
        passages: hides those that are marked, or found; without, they are text like any other.

    Raises:
        InvalidRequest: there are none, or one is malformed or holds other than text; `param` says which.
    """
    if not messages:
        raise InvalidRequest("messages is empty: send at least one", param="messages")
    return [_normalize(message, f"messages[{index}]", passages) for index, message in enumerate(messages)]


def _normalize(message: Any, where: str, passages: Passages | None) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    normal: dict[str, Any] = {"role": "system" if role == "developer" else role}
    if tool_calls := message.get("tool_calls"):
        _check_tool_calls(tool_calls, f"{where}.tool_calls")
        normal["tool_calls"] = tool_calls
    content = message.get("content")
    if content is None and role == "assistant" and tool_calls:
        content = ""

    def show(text: str, part: Mapping[str, Any], place: str) -> str:
        marked = is_marked(message, where) or is_marked(part, place)
        return text if passages is None else passages.hide(text, marked=marked, role=role)

    normal["content"] = _text(content, f"{where}.content", show)
    for name in ("name", "tool_call_id"):
        if (value := message.get(name)) is not None:
            if not isinstance(value, str):
                raise InvalidRequest(f"{where}.{name} must be a string", param=f"{where}.{name}")
            normal[name] = value
    return normal


def _text(content: Any, where: str, show: Callable[[str, Mapping[str, Any], str], str]) -> str:
    if isinstance(content, str):
        return show(content, {}, where)
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{where} must be a string or a non-empty list of text parts", param=where)
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = f"{kind!r} parts are not supported" if isinstance(kind, str) else "a part must be an object"
            raise InvalidRequest(f"{where}[{index}]: {shown[:200]}; this model takes text only", param=where)
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}[{index}].text must be a string", param=where)
        texts.append(show(part["text"], part, f"{where}[{index}]"))
    return "\n".join(texts)


def _check_tool_calls(tool_calls: Any, where: str) -> None:
    def well_formed(call: Any) -> bool:
        function = call.get("function") if isinstance(call, dict) else None
        return isinstance(function, dict) and isinstance(function.get("name"), str) and "arguments" in function

    if not isinstance(tool_calls, list) or not all(well_formed(call) for call in tool_calls):
        raise InvalidRequest(f"{where} must be a list of function calls with a name and arguments", param=where)


class ChatWording:
    """Samples as `chat.completion` and `chat.completion.chunk` choices."""

    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, choice: int) -> Iterable[dict[str, Any]]:
        """The role, which OpenAI's streams tell first."""
        delta = {"role": "assistant", "content": ""}
        yield {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, choice: int, delta: Delta) -> dict[str, Any]:
        """The new text; the last chunk of a sample may have none."""
        return {
            "index": choice,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
        }

    def whole(self, choice: int, completion: Completion) -> dict[str, Any]:
        """The assistant's message."""
        return {
            "index": choice,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": completion.finish_reason,
        }

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not entries:
            return None
        content = [
            {
                **self._token(entry.token_id, finite(entry.logprob)),
                "top_logprobs": [self._token(*pair) for pair in alternatives(entry)],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }
