"""SamplingParams: what a caller may ask of the sampler, validated once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pagoda.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class LeaseSpec:
    """A wish that the first `num_tokens` of a prompt stay cached for `ttl_s` seconds, and again as long at every hit.

    Raises:
        InvalidRequest: either is not positive.
    """

    num_tokens: int
    ttl_s: float

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or not 0 < self.ttl_s < math.inf:
            raise InvalidRequest(f"a lease needs tokens and seconds, got {self.num_tokens} and {self.ttl_s}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Field names and meanings follow vLLM's and OpenAI's.

    `temperature=0` is greedy. `top_k=0`, `top_p=1` and `min_p=0` switch those filters off. `max_tokens=None` means up
    to the model's context. `logprobs=None` asks for none, `0` for the chosen token's alone, `k` for the `k` likeliest
    as well.

    Raises:
        InvalidRequest: a field is out of range; `param` names it.
    """

    n: int = 1
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

    def __post_init__(self) -> None:
        def check(ok: bool, param: str, message: str) -> None:
            if not ok:
                raise InvalidRequest(f"{param} {message}, got {getattr(self, param)!r}", param=param)

        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            check(math.isfinite(getattr(self, name)), name, "must be a finite number")
        check(1 <= self.n <= 128, "n", "must be between 1 and 128")
        check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "must be at least 1")
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
