"""SamplingParams: what a caller may ask of the sampler, validated once."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pagoda.blend.chunks import cut_passages as cut_passages
from pagoda.blend.segments import DEFAULT_RATIO as DEFAULT_RATIO
from pagoda.blend.segments import BlendSpec as BlendSpec
from pagoda.blend.segments import Span as Span
from pagoda.engine.kv_retention import KVRetention
from pagoda.errors import InvalidRequest
from pagoda.kinds import is_integer, is_number
from pagoda.kv.lease import TierUse as TierUse

if TYPE_CHECKING:  # reading one needs torch, having none does not
    from pagoda.sparse.spec import KVPolicy

MAX_SAMPLES = 128

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_FLAGS = ("ignore_eos", "skip_special_tokens", "continues_text")

# What shapes a draw, and the values that do not. A stop string would end a beam between two tokens.
_DRAWING: Mapping[str, object] = {
    "best_of": None,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "stop": (),
}


@dataclass(frozen=True, slots=True)
class LeaseSpec:
    """A wish that the first `num_tokens` of a prompt stay cached for `ttl_s` seconds, and again as long at every hit.

    With a `name` it is a lease of its own, which hits do not prolong.

    Raises:
        InvalidRequest: either is not positive.
    """

    num_tokens: int
    ttl_s: float
    name: str = ""

    def __post_init__(self) -> None:
        has_tokens = is_integer(self.num_tokens) and self.num_tokens >= 1
        if not has_tokens or not is_number(self.ttl_s) or not 0 < self.ttl_s < math.inf:
            raise InvalidRequest(f"a lease needs tokens and seconds, got {self.num_tokens!r} and {self.ttl_s!r}")


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Search for the likeliest outputs with `width` beams; names and meanings are Transformers' generation settings'.

    A finished beam is ranked by its log-probability over `length ** length_penalty`. The search ends when `width` are
    finished and no beam at its present length is better (`early_stopping=False`), none at any length could be
    (`"never"`), or at once (`True`).

    Raises:
        InvalidRequest: a field is out of range; `param` names it.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if not is_integer(self.width) or not 1 <= self.width <= MAX_SAMPLES:
            raise InvalidRequest(f"the beam width must be between 1 and {MAX_SAMPLES}, got {self.width!r}", param="n")
        if not is_number(self.length_penalty) or not -10.0 <= self.length_penalty <= 10.0:
            message = f"length_penalty must be between -10 and 10, got {self.length_penalty!r}"
            raise InvalidRequest(message, param="length_penalty")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            message = f"early_stopping must be true, false or 'never', got {self.early_stopping!r}"
            raise InvalidRequest(message, param="early_stopping")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Field names and meanings follow vLLM's and OpenAI's.

    `temperature=0` is greedy. `top_k=0`, `top_p=1` and `min_p=0` switch those filters off. `max_tokens=None` means up
    to the model's context; 0 computes the prompt, so that it is cached, and generates nothing. `logprobs=None` asks
    for none, `0` for the chosen token's alone, `k` for the `k` likeliest as well. `best_of` draws more samples than
    `n` and returns those of the highest mean log-probability, at the end. `beam` searches instead of drawing: then
    nothing that shapes a draw may be set, and `n` of its beams are returned. `kv_retention` says which of the request's
    tokens stay in the cache before others. `kv_policy` drops KV within the request, where the engine's default does not
    say it all; what `parse_kv_policy` reads may be given as it is, and is read here. `continues_text` says that the
    output goes on from the prompt's text, so that a SentencePiece model's leading space belongs to it.

    Raises:
        InvalidRequest: a field is out of range or of another type, or does not go with another; `param` names it.
    """

    n: int = 1
    best_of: int | None = None
    beam: BeamSearch | None = None
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    continues_text: bool = False
    kv_retention: KVRetention | None = None
    tier_use: TierUse = field(default_factory=TierUse)
    kv_policy: KVPolicy | str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        def check(ok: bool, param: str, message: str) -> None:
            if not ok:
                raise InvalidRequest(f"{param} {message}, got {getattr(self, param)!r}", param=param)

        def convert(param: str, value: object) -> None:
            object.__setattr__(self, param, value)

        self._check_types(check)
        convert("stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        convert("stop_token_ids", frozenset(self.stop_token_ids))
        if self.kv_policy is not None:
            from pagoda.engine.kv_policy import as_policy

            convert("kv_policy", as_policy(self.kv_policy))
        check(1 <= self.n <= MAX_SAMPLES, "n", f"must be between 1 and {MAX_SAMPLES}")
        check(
            self.best_of is None or self.n <= self.best_of <= MAX_SAMPLES,
            "best_of",
            f"must be between n ({self.n}) and {MAX_SAMPLES}",
        )
        check(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "must be at least 0")
        is_one = self.num_samples == 1 and self.beam is None
        check(self.max_tokens != 0 or is_one, "n", "must be 1 where max_tokens is 0: nothing is generated")
        check(0.0 <= self.temperature <= 100.0, "temperature", "must be between 0 and 100")
        check(self.top_k >= 0, "top_k", "must be 0 (off) or more")
        check(0.0 < self.top_p <= 1.0, "top_p", "must be in (0, 1]")
        check(0.0 <= self.min_p <= 1.0, "min_p", "must be in [0, 1]")
        check(0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", "must be in (0, 100]")
        check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "must be between -2 and 2")
        check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "must be between -2 and 2")
        check(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "must be between 0 and 20")
        check(len(self.stop) <= 16 and all(self.stop), "stop", "takes at most 16 strings, none of them empty")
        check(
            len(self.logit_bias) <= 1024 and all(-100 <= b <= 100 for b in self.logit_bias.values()),
            "logit_bias",
            "takes at most 1024 tokens with biases between -100 and 100",
        )
        if self.beam is not None:
            check(self.n <= self.beam.width, "n", f"must not exceed the beam width of {self.beam.width}")
            check(self.temperature in (0.0, 1.0), "temperature", "has no meaning in a beam search")
            for name, default in _DRAWING.items():
                check(getattr(self, name) == default, name, "has no meaning in a beam search")

    def _check_types(self, check: Callable[[bool, str, str], None]) -> None:
        """What has another type would fail, or mean something else, only in the midst of a step that others share."""
        for name in ("n", "top_k"):
            check(is_integer(getattr(self, name)), name, "must be a whole number")
        for name in ("best_of", "max_tokens", "seed", "logprobs"):
            check(
                getattr(self, name) is None or is_integer(getattr(self, name)), name, "must be a whole number or None"
            )
        for name in _NUMBERS:
            value = getattr(self, name)
            check(is_number(value) and math.isfinite(value), name, "must be a finite number")
        for name in _FLAGS:
            check(isinstance(getattr(self, name), bool), name, "must be true or false")
        strings, ids, biases = self.stop, self.stop_token_ids, self.logit_bias
        is_stop = isinstance(strings, str | Sequence) and all(isinstance(each, str) for each in strings)
        check(is_stop, "stop", "must be a string or a sequence of them")
        is_ids = isinstance(ids, Collection) and all(is_integer(each) for each in ids)
        check(is_ids, "stop_token_ids", "must be token ids")
        is_bias = isinstance(biases, Mapping) and all(is_integer(t) and is_number(b) for t, b in biases.items())
        check(is_bias, "logit_bias", "must be numbers by token id")
        check(self.beam is None or isinstance(self.beam, BeamSearch), "beam", "must be a BeamSearch")
        is_retention = self.kv_retention is None or isinstance(self.kv_retention, KVRetention)
        check(is_retention, "kv_retention", "must be a KVRetention")
        check(isinstance(self.tier_use, TierUse), "tier_use", "must be a TierUse")

    @property
    def wished_policy(self) -> KVPolicy | None:
        """`kv_policy`, which is read by now."""
        assert not isinstance(self.kv_policy, str | Mapping), "__post_init__ reads it"
        return self.kv_policy

    @property
    def num_samples(self) -> int:
        """Samples that the prompt forks into; beams fork and die as they go."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether only the end tells which samples are returned."""
        return self.beam is not None or self.num_samples > self.n
