"""What the engine hands out: deltas while a request runs, the whole completion at its end, and the figures of both.

A Delta, a Usage and a RequestOutput are made for every token, and a StepStats for every step; making a frozen dataclass
takes six to ten times as long: so these are not frozen, but nobody changes one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from pagoda.engine.params import LeaseSpec
from pagoda.errors import ModelError
from pagoda.kv.ages import AgeHistogram as AgeHistogram
from pagoda.kv.keys import Scope
from pagoda.kv.observe import Explanation as Explanation
from pagoda.kv.observe import MissReason as MissReason
from pagoda.kv.radix_node import TokenArray
from pagoda.kv.tier_report import TierReport as TierReport
from pagoda.sparse.report import SparseReport as SparseReport


class FinishReason(StrEnum):
    """Why a sample ended. `STOP`: an end token, stop token or stop string; `LENGTH`: max_tokens or the context."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one chosen token and of the likeliest alternatives, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Delta:
    """New output of one of a request's samples.

    `text` excludes stop strings and may be empty while a character or a possible stop string is incomplete.
    `stop_reason` is the stop string or stop token id that ended the sample, where one did. `score` is what a whole
    sample was ranked by, where it was: see `SamplingParams.is_ranked`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    score: float | None = None


@dataclass(slots=True)
class Usage:
    """Token counts of a request so far. `num_hit_tokens` of the prompt came from the cache, exactly.

    Of its passages, `num_blended_tokens` are reused as they were computed alone, and `num_recomputed_tokens` were found
    and computed anew. What is neither hit nor blended was computed. Beside the prompt, `num_extra_tokens` were computed
    for it: passages alone, which nobody had asked for before, and what a doubted blend had computed.
    """

    num_prompt_tokens: int
    num_hit_tokens: int
    num_output_tokens: int
    num_blended_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_extra_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LeaseOutcome:
    """What became of a LeaseSpec: its first `num_tokens` (whole blocks) are kept, or `refused` says why none are.

    `held_in` is where they are kept: "pool", or the name of a tier from which they are restored.
    """

    spec: LeaseSpec
    num_tokens: int
    refused: str | None = None
    held_in: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """One step's news of one request. `finished` is true exactly once, on the last.

    `leases` answers the request's LeaseSpecs, in order of their ends, as far as its prompt is computed: all of them,
    when there is any output token. `explanation` says why the prompt did not hit further, to who asked for it.
    `failure` ended it, where the model did. `sparse` is what its kv_policy did, if it outgrew its budget or may yet.
    """

    request_id: str
    deltas: tuple[Delta, ...]
    usage: Usage
    finished: bool
    leases: tuple[LeaseOutcome, ...] = ()
    explanation: Explanation | None = None
    failure: ModelError | None = None
    sparse: SparseReport | None = None


@dataclass(slots=True)
class Completion:
    """One finished sample of an offline `generate`."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    score: float | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta. Mutates this completion."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.score = delta.score


@dataclass(slots=True)
class StepStats:
    """One step of the engine, for metrics. Times are seconds; KV figures are blocks."""

    step_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    num_preempted: int
    num_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_evicted_blocks: int
    num_resumed_tokens: int = 0  # of preempted samples, restored from tiers instead of computed again
    num_audited_blocks: int = 0
    num_audit_mismatches: int = 0
    num_returned_blocks: int = 0  # by compressing sparse requests
    returned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RequestStats:
    """A finished request, for metrics. Times are seconds; `itl_s` has one entry per output token after the first.

    `prompt` is the request's own array: not to be written to. `miss_reason` says why not more of it hit, as far as that
    was known without looking into other scopes, and None if the request never ran. Of the tokens that hit,
    `num_restored_tokens` came from tiers. The guard of passages had more computed than was asked for in
    `num_blends_raised` chunks of the prompt, in `num_blends_whole` of them all; a prompt that it doubted counts as one.
    """

    request_id: str
    prompt: TokenArray
    scope: Scope
    finish_reason: FinishReason
    usage: Usage
    queue_s: float
    ttft_s: float | None
    itl_s: tuple[float, ...]
    e2e_s: float
    miss_reason: MissReason | None = None
    num_restored_tokens: int = 0
    num_blends_raised: int = 0
    num_blends_whole: int = 0


class EngineObserver(Protocol):
    """Listens to the engine. Called on the engine's thread: be quick, never block and never raise."""

    def on_step(self, stats: StepStats) -> None:
        """A forward pass ended."""

    def on_admitted(self, num_query_tokens: int, num_hit_tokens: int) -> None:
        """The last of a new request's prompt is about to be computed: so many tokens, of which so many were hits."""

    def on_finished(self, stats: RequestStats) -> None:
        """A request ended, for whatever reason."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What `Engine.generate` returns for one prompt: its samples, what they cost, and what its kv_policy did."""

    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    usage: Usage
    sparse: SparseReport | None = None

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.completions[0].text
