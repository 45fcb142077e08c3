"""The request fields, their types and bounds, and how they become SamplingParams.

Unknown fields are ignored, as clients send many that change nothing here, but not those that are nearly one of
Pagoda's own. A known field that would change the answer if
it were ignored is refused: see `UNSUPPORTED`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from pagoda.engine.kv_retention import MAX_RANGES, Directive, KVRetention
from pagoda.engine.params import BeamSearch, LeaseSpec, SamplingParams, TierUse
from pagoda.errors import InvalidRequest
from pagoda.server.errors import HttpError
from pagoda.server.faults import check_spelling, typed
from pagoda.server.openai.breakpoints import PromptCacheOptions
from pagoda.server.passages import BlendOptions

MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_SALT_CHARS = 1024
RETENTION_S = 24 * 3600.0

# Field -> the values (besides null and what is empty) that ask for nothing special.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "functions": (),
    "function_call": ("none", "auto"),
    "suffix": (),
    "min_tokens": (),
    "bad_words": (),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (),
    "chat_template": (),
    "chat_template_kwargs": (),
    "documents": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": (),
    "prompt_embeds": (),
}

# Fields beyond OpenAI's and Anthropic's whose loss would go unnoticed: a misspelt one is refused.
OWN_FIELDS = (
    *("cache_salt", "tiers", "cached_content", "kv_retention", "kv_policy", "blend"),
    *("prompt_cache_retention", "prompt_cache_options"),
)

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
KVPolicyField = str | dict[str, Any]
R = TypeVar("R", bound="GenerationRequest")


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True)
    include_usage: bool = False


class RetentionRange(BaseModel):
    """Tokens of the prompt from `token_start` to before `token_end`, or to its end, and what they are worth."""

    model_config = ConfigDict(strict=True, extra="forbid")
    token_start: int
    token_end: int | None = None
    priority: int
    duration_s: float | None = None


class KVRetentionRequest(BaseModel):
    """`kv_retention`: the fields are those of TensorRT-LLM's KvCacheRetentionConfig, with shorter names."""

    model_config = ConfigDict(strict=True, extra="forbid")
    ranges: Annotated[list[RetentionRange], Field(max_length=MAX_RANGES)] = []
    decode_priority: int | None = None
    decode_duration_s: float | None = None

    @property
    def spec(self) -> KVRetention:
        """The engine's form; raises InvalidRequest."""
        ranges = [Directive(each.token_start, each.token_end, each.priority, each.duration_s) for each in self.ranges]
        return KVRetention(tuple(ranges), self.decode_priority, self.decode_duration_s)


class TierOptions(BaseModel):
    """`tiers`: what the request allows of the tiers below the device; see TierUse."""

    model_config = ConfigDict(strict=True, extra="forbid")
    max_restored_tokens: Int32 | None = None
    wait_s: float | None = None
    store: bool = True
    lossy: bool | None = None

    @property
    def spec(self) -> TierUse:
        """The engine's form; raises InvalidRequest."""
        return TierUse(self.max_restored_tokens, self.wait_s, self.store, self.lossy)


class GenerationRequest(BaseModel):
    """What all endpoints take. `None` is absent: OpenAI's clients send nulls. SamplingParams checks the ranges."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int32 | None = None
    max_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Int64 | None = None
    stop: StopString | list[StopString] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # OpenAI's of old.
    best_of: Int32 | None = None
    # Beyond OpenAI's; the names are vLLM's.
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None
    priority: Int32 = 0
    tiers: TierOptions | None = None
    cached_content: str | None = None
    # The key is OpenAI's hint for routing; with one replica there is nothing to route, and the cache needs no hint.
    prompt_cache_key: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    kv_retention: KVRetentionRequest | None = None
    kv_policy: KVPolicyField | None = None
    blend: BlendOptions | None = None

    def leases(self, num_prompt_tokens: int) -> tuple[LeaseSpec, ...]:
        """What `prompt_cache_retention` asks for a prompt: only `24h` is more than every prompt gets."""
        return (LeaseSpec(num_prompt_tokens, RETENTION_S),) if self.prompt_cache_retention == "24h" else ()

    @property
    def is_prewarm(self) -> bool:
        """Whether only the prompt is to be computed."""
        return self.prompt_cache_options is not None and self.prompt_cache_options.prewarm is True

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, vocab_size: int, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The engine's form of these fields.

        Args:
            vocab_size: token ids must be below it.
            max_tokens: `None` is up to the context. A prewarming request generates none.
            logprobs: as SamplingParams'.

        Raises:
            InvalidRequest: a field is out of range; `param` names it.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only for stream=true", param="stream_options")
        same_names = (
            *("n", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty"),
            *("min_p", "repetition_penalty", "ignore_eos", "skip_special_tokens"),
        )
        given = {name: value for name in same_names if (value := getattr(self, name)) is not None}
        beam = self._beam_search()
        params = SamplingParams(
            **given,
            best_of=self.best_of if beam is None else None,
            beam=beam,
            max_tokens=0 if self.is_prewarm else max_tokens,
            logprobs=logprobs,
            kv_retention=None if self.kv_retention is None else self.kv_retention.spec,
            top_k=0 if self.top_k in (None, -1) else self.top_k,  # vLLM's clients write "off" as -1
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=frozenset(check_token_ids(self.stop_token_ids or [], vocab_size, "stop_token_ids")),
            logit_bias=_logit_bias(self.logit_bias or {}, vocab_size),
            tier_use=TierUse() if self.tiers is None else self.tiers.spec,
            kv_policy=self.kv_policy,
        )
        if self.stream and params.is_ranked:
            what = "a beam search" if beam else "best_of above n"
            raise InvalidRequest(f"{what} cannot stream: only its end tells which samples are returned", param="stream")
        return params

    def _beam_search(self) -> BeamSearch | None:
        """The search that `use_beam_search` asks for, with `best_of` or else `n` beams."""
        if self.use_beam_search:
            width = self.best_of if self.best_of is not None else self.n
            penalty = 1.0 if self.length_penalty is None else self.length_penalty
            return BeamSearch(1 if width is None else width, penalty, self.early_stopping or False)
        for name, harmless in (("length_penalty", (None, 1.0)), ("early_stopping", (None, False))):
            if getattr(self, name) not in harmless:
                raise InvalidRequest(f"{name} is only for use_beam_search=true", param=name)
        return None


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: list[Any]
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None

    @property
    def limit_field(self) -> str:
        """The field that bounds the answer: OpenAI's of today before that of old."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: Any
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


def validate(kind: type[R], fields: Mapping[str, Any]) -> R:
    """The typed request in a JSON object.

    Raises:
        InvalidRequest: a field is missing, of the wrong type or out of bounds.
        HttpError: a field asks for what this server cannot do.
    """
    for name, harmless in UNSUPPORTED.items():
        value = fields.get(name)
        if value and value not in harmless:
            raise HttpError(400, "unsupported_parameter", f"{name} is not supported by this server.", param=name)
    if fields.get("tool_choice") not in (None, "none", "auto"):
        message = "tool_choice may only be 'none' or 'auto': this server cannot force or parse tool calls."
        raise HttpError(400, "unsupported_parameter", message, param="tool_choice")
    check_spelling(fields, kind.model_fields, OWN_FIELDS)
    return typed(kind, fields)


def check_token_ids(ids: list[int], vocab_size: int, param: str) -> list[int]:
    """`ids`, unchanged.

    Raises:
        InvalidRequest: one is not in the vocabulary.
    """
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InvalidRequest(f"{param} has a token id outside 0..{vocab_size - 1}", param=param)
    return ids


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    if not all(key.isascii() and key.isdecimal() and len(key) < 10 for key in biases):
        raise InvalidRequest("logit_bias maps token ids, written as strings, to numbers", param="logit_bias")
    ids = check_token_ids([int(key) for key in biases], vocab_size, "logit_bias")
    return dict(zip(ids, biases.values(), strict=True))
