"""/v1/completions: raw prompts, several at once, as text, token ids, or text in parts that may be passages."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pagoda.engine.outputs import Completion, Delta, TokenLogprob
from pagoda.engine.params import SamplingParams, Span
from pagoda.errors import InvalidRequest
from pagoda.server.backend import Scope, Tokenizer
from pagoda.server.body import parse_object
from pagoda.server.ids import new_id
from pagoda.server.openai.cached import prompt_start_of
from pagoda.server.openai.respond import Job, Served, alternatives, finite
from pagoda.server.openai.schema import CompletionRequest, check_token_ids, validate
from pagoda.server.passages import Passages, is_marked

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint alone
MAX_CHOICES = 1024
_PARTS = '[{"type": "text", "text": "..."}, ...]'


def prepare_completion(served: Served, body: bytes, namespace: str) -> tuple[Job, CompletionWording]:
    """Parse and tokenize a request. Takes time in proportion to the body: call it from a thread.

    Raises:
        RequestError: whatever is wrong with it.
    """
    request = validate(CompletionRequest, parse_object(body))
    model = served.resolve(request.model)
    tokenizer = served.engine.tokenizer
    if request.echo and request.logprobs is not None:
        raise InvalidRequest("echo with logprobs is not supported: a prompt's own are not computed", param="echo")
    settings = request.sampling_params(
        tokenizer.vocab_size,
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=request.logprobs,
    )
    params = replace(settings, continues_text=True)
    start, salt = prompt_start_of(served, namespace, request)
    given = _split(request.prompt, params)
    if request.blend is not None and not any(map(_is_parts, given)):
        raise InvalidRequest(f"blend is for prompts in parts: {_PARTS}", param="blend")
    passages = [served.blend.passages(request.blend) for _ in given]
    prompts = [_read(one, start, tokenizer, hiding) for one, hiding in zip(given, passages, strict=True)]
    options = request.prompt_cache_options
    job = Job(
        id=new_id("cmpl"),
        model=model,
        prompts=[prompt.tokens for prompt in prompts],
        params=params,
        scope=Scope(namespace, salt),
        priority=request.priority,
        stream=bool(request.stream),
        include_usage=request.include_usage,
        leases=[
            [*request.leases(count), *(options.implicit(count) if options else ())]
            for count in (len(prompt.tokens) for prompt in prompts)
        ],
        blends=[
            served.blend.spec(request.blend, hidden, prompt.spans)
            for hidden, prompt in zip(passages, prompts, strict=True)
        ],
    )
    echoes = [prompt.text_of(tokenizer) for prompt in prompts] if request.echo else []
    return job, CompletionWording(tokenizer, [text for text in echoes for _ in range(params.n)])


@dataclass(frozen=True)
class _Prompt:
    """One prompt; `text` is what was given of it, if it was given as text."""

    tokens: list[int]
    spans: tuple[Span, ...] = ()
    text: str | None = None

    def text_of(self, tokenizer: Tokenizer) -> str:
        return tokenizer.decode(self.tokens, skip_special_tokens=False) if self.text is None else self.text


def _split(prompt: Any, params: SamplingParams) -> list[Any]:
    """Each prompt as given."""
    prompts = prompt if isinstance(prompt, list) and not (_is_token_ids(prompt) or _is_parts(prompt)) else [prompt]
    each = params.beam.width if params.beam else params.num_samples
    if not prompts:
        message = f"prompt is an empty list: give a string, token ids, or a list of 1 to {MAX_CHOICES} of these"
        raise InvalidRequest(message, param="prompt")
    if len(prompts) * each > MAX_CHOICES:
        message = f"{len(prompts)} prompts, times {each} (n or best_of), exceed a request's {MAX_CHOICES} choices"
        raise InvalidRequest(message, param="prompt")
    return prompts


def _read(given: Any, start: str, tokenizer: Tokenizer, passages: Passages) -> _Prompt:
    """A prompt, after `start`."""
    if isinstance(given, str):
        prompt = _Prompt(tokenizer.encode(start + given), text=given)
    elif start and not _is_parts(given):
        raise InvalidRequest("prompt must be text to go on from cached_content", param="prompt")
    elif _is_token_ids(given):
        prompt = _Prompt(check_token_ids(given, tokenizer.vocab_size, "prompt"))
    elif _is_parts(given):
        texts = [_text(part, f"prompt[{index}]") for index, part in enumerate(given)]
        shown = [
            passages.hide(text, marked=is_marked(part, f"prompt[{index}]"), role="user")
            for index, (part, text) in enumerate(zip(given, texts, strict=True))
        ]
        special = tokenizer.encode("")  # what begins every prompt
        prompt = _Prompt(*passages.encode(start + "".join(shown), tokenizer, special), "".join(texts))
    else:
        raise InvalidRequest(
            f"prompt must be a string, a list of token ids, a list of text parts, or a list of any of them: {_PARTS}",
            param="prompt",
        )
    if not prompt.tokens:
        raise InvalidRequest("prompt has no tokens", param="prompt")
    return prompt


def _text(part: Any, where: str) -> str:
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where} must be a part with text: {_PARTS}", param=where)
    text: str = part["text"]
    return text


def _is_token_ids(value: Any) -> bool:
    # type() and not isinstance(): JSON's true is an int to Python.
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _is_parts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


class CompletionWording:
    """Samples as `text_completion` choices, each after its echoed prompt where `echoes` has one per choice."""

    answer_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, echoes: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._offsets: dict[int, int] = defaultdict(int)
        self._utf8: dict[int, codecs.IncrementalDecoder] = defaultdict(
            lambda: codecs.getincrementaldecoder("utf-8")("replace")
        )

    def opening(self, choice: int) -> Iterable[dict[str, Any]]:
        """The echoed prompt."""
        if self._echoes:
            yield _choice(choice, self._echoes[choice], None, None)

    def chunk(self, choice: int, delta: Delta) -> dict[str, Any]:
        """The new text."""
        return _choice(choice, delta.text, self._logprobs(choice, delta.logprobs), delta.finish_reason)

    def whole(self, choice: int, completion: Completion) -> dict[str, Any]:
        """The whole text."""
        text = (self._echoes[choice] if self._echoes else "") + completion.text
        return _choice(choice, text, self._logprobs(choice, completion.logprobs), completion.finish_reason)

    def _logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not entries:
            return None
        tokens = [self._token(entry.token_id) for entry in entries]
        offsets: list[int] = []
        for entry in entries:
            offsets.append(self._offsets[choice])
            text = self._utf8[choice].decode(self._tokenizer.token_bytes(entry.token_id))
            self._offsets[choice] += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            # As OpenAI does, the chosen token is listed even where it is not among the likeliest.
            "top_logprobs": [
                {self._token(token_id): logprob for token_id, logprob in alternatives(entry)}
                | {token: finite(entry.logprob)}
                for token, entry in zip(tokens, entries, strict=True)
            ],
            "text_offset": offsets,
        }

    def _token(self, token_id: int) -> str:
        """A token's text; a part of a character as OpenAI writes it, or several would be one key of `top_logprobs`."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
