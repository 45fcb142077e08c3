"""/v1/completions: raw prompts, several at once, as text or token ids."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from pagoda.engine.outputs import Completion, Delta, TokenLogprob
from pagoda.engine.params import SamplingParams
from pagoda.errors import InvalidRequest
from pagoda.server.backend import Scope, Tokenizer
from pagoda.server.body import parse_object
from pagoda.server.openai.cached import prompt_start_of
from pagoda.server.openai.respond import Job, Served, alternatives, finite, new_id
from pagoda.server.openai.schema import CompletionRequest, check_token_ids, validate

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint alone
MAX_CHOICES = 1024


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
    if request.blend is not None:
        raise InvalidRequest("blend is for messages: a raw prompt has no parts to be passages", param="blend")
    settings = request.sampling_params(
        tokenizer.vocab_size,
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=request.logprobs,
    )
    params = replace(settings, continues_text=True)
    start, salt = prompt_start_of(served, namespace, request)
    prompts = _tokenize(request.prompt, start, tokenizer, params)
    options = request.prompt_cache_options
    echoes = [_prompt_text(prompt, ids, tokenizer) for prompt, ids in prompts] if request.echo else []
    job = Job(
        id=new_id("cmpl"),
        model=model,
        prompts=[ids for _, ids in prompts],
        params=params,
        scope=Scope(namespace, salt),
        priority=request.priority,
        stream=bool(request.stream),
        include_usage=request.include_usage,
        leases=[[*request.leases(len(ids)), *(options.implicit(len(ids)) if options else ())] for _, ids in prompts],
    )
    return job, CompletionWording(tokenizer, [text for text in echoes for _ in range(params.n)])


def _tokenize(prompt: Any, start: str, tokenizer: Tokenizer, params: SamplingParams) -> list[tuple[Any, list[int]]]:
    """Each prompt as given, and the token ids of it after `start`."""
    prompts = prompt if isinstance(prompt, list) and not _is_token_ids(prompt) else [prompt]
    each = params.beam.width if params.beam else params.num_samples
    if not prompts or len(prompts) * each > MAX_CHOICES:
        raise InvalidRequest(f"prompt must hold 1 to {MAX_CHOICES} prompts, times n or best_of", param="prompt")
    pairs: list[tuple[Any, list[int]]] = []
    for one in prompts:
        if isinstance(one, str):
            ids = tokenizer.encode(start + one)
        elif start:
            raise InvalidRequest("prompt must be text to go on from cached_content", param="prompt")
        elif _is_token_ids(one):
            ids = check_token_ids(one, tokenizer.vocab_size, "prompt")
        else:
            kinds = "a string, a list of token ids, or a list of either"
            raise InvalidRequest(f"prompt must be {kinds}", param="prompt")
        if not ids:
            raise InvalidRequest("prompt has no tokens", param="prompt")
        pairs.append((one, ids))
    return pairs


def _is_token_ids(value: Any) -> bool:
    # type() and not isinstance(): JSON's true is an int to Python.
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _prompt_text(prompt: Any, ids: Sequence[int], tokenizer: Tokenizer) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(ids, skip_special_tokens=False)


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
