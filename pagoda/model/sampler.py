"""Sampler: logits -> the next token of each row.

    raw logits ─> logit_bias ─> penalties ─┬─ temperature 0 ─> argmax
        │                                  └─> / temperature ─> min_p ─> top_k ─> top_p ─> draw
        └─> log-softmax: the log-probabilities that are reported, as OpenAI does

The order of steps and each step's meaning are vLLM's. A draw depends on nothing but the row's logits, its seed and how
many tokens the request has: the same seed gives the same tokens in any batch, after a preemption, and when a step is
computed again.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from pagoda.errors import InvalidRequest, ModelError
from pagoda.kernels import argmax

# Tokens outside almost every nucleus weigh less than so-manieth parts of what it leaves out: see `_likeliest`.
_NUCLEUS_GUESS = 256
_RUN = 256
_LEAST_TEMPERATURE = 1e-30  # what float32 can divide by
_BELOW_ONE = 1.0 - 2.0**-53
NOT_FINITE = "the model produced logits that are not finite"


class Sampling(Protocol):
    """What the sampler reads of a request's sampling parameters; names and meanings are `SamplingParams`'."""

    @property
    def temperature(self) -> float: ...  # noqa: D102
    @property
    def top_k(self) -> int: ...  # noqa: D102
    @property
    def top_p(self) -> float: ...  # noqa: D102
    @property
    def min_p(self) -> float: ...  # noqa: D102
    @property
    def seed(self) -> int | None: ...  # noqa: D102
    @property
    def repetition_penalty(self) -> float: ...  # noqa: D102
    @property
    def presence_penalty(self) -> float: ...  # noqa: D102
    @property
    def frequency_penalty(self) -> float: ...  # noqa: D102
    @property
    def logit_bias(self) -> Mapping[int, float]: ...  # noqa: D102
    @property
    def logprobs(self) -> int | None: ...  # noqa: D102


class SamplerState:
    """What sampling remembers of one request. `append` every token that joins its output; `sample` changes nothing.

    `is_greedy` says that the likeliest token is the one: no draw, no bias, no penalty.

    Args:
        params: the request's sampling parameters.
        vocab_size: width of the logits.
        prompt_ids: counted by the repetition penalty.
        index: which of a request's `n` outputs this is; they share a seed and differ in this.

    Raises:
        InvalidRequest: a biased token is not in the vocabulary.
    """

    def __init__(
        self,
        params: Sampling,
        vocab_size: int,
        prompt_ids: Sequence[int] | np.ndarray = (),
        *,
        index: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.params = params
        self.num_output_tokens = 0
        self._seed = (secrets.randbits(64) if params.seed is None else params.seed, index)
        outside = [token for token in params.logit_bias if not 0 <= token < vocab_size]
        if outside:
            raise InvalidRequest(f"logit_bias names token {outside[0]} of {vocab_size}", param="logit_bias")
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        if params.logit_bias:
            self._bias = (
                torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device),
                torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device),
            )
        self._output_counts: torch.Tensor | None = None
        self._in_prompt: torch.Tensor | None = None
        penalizes = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
        self.is_greedy = params.temperature == 0 and not penalizes and self._bias is None
        if penalizes:
            self._output_counts = torch.zeros(vocab_size, device=device)
            self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._in_prompt[torch.from_numpy(np.array(prompt_ids, dtype=np.int64)).to(device)] = True

    def append(self, token_id: int) -> None:
        """Count a token of the output."""
        self.num_output_tokens += 1
        if self._output_counts is not None:
            self._output_counts[token_id] += 1

    def shaped(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[vocab]` with bias and penalties applied. Mutates nothing."""
        if self._bias is not None:
            logits = logits.index_add(0, *self._bias)
        if self._output_counts is None or self._in_prompt is None:
            return logits
        params, in_output = self.params, self._output_counts > 0
        if params.repetition_penalty != 1.0:
            # CTRL (arXiv:1909.05858): towards less likely whatever the sign.
            penalized = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            logits = torch.where(in_output | self._in_prompt, penalized, logits)
        return logits - params.frequency_penalty * self._output_counts - params.presence_penalty * in_output

    def uniform(self) -> float:
        """This step's random number in [0, 1): a hash of the seed and of the number of tokens so far."""
        seed, index = self._seed
        digest = hashlib.blake2b(f"{seed} {index} {self.num_output_tokens}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest) >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logs under the unmodified logits: the chosen token's, and (token, value) of the likeliest."""

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)  # not frozen, which takes several times as long to make: there is one for each token
class SampledToken:
    """One row's outcome."""

    token_id: int
    logprobs: TokenLogprobs | None = None


def sample(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[SampledToken | ModelError]:
    """Choose a token for each row of `logits` (float32 `[num_rows, vocab_size]`). Mutates nothing.

    A row whose logits are not finite gets a `ModelError` in its place, for the caller to fail that request with; the
    other rows are not affected.
    """
    num_rows = logits.shape[0]  # not len(), which is Python of torch's and slow where its code is in no cache
    if len(states) != num_rows:
        raise TypeError(f"{len(states)} sampler states for {num_rows} rows of logits")
    if not states:
        return []
    chosen = argmax(logits.contiguous()).tolist()  # negative: not finite
    others = [row for row, state in enumerate(states) if chosen[row] >= 0 and not state.is_greedy]
    if others:
        drawn = torch.stack([_choose(logits[row], states[row]) for row in others])
        for row, token in zip(others, drawn.tolist(), strict=True):
            chosen[row] = token
    told = {
        row: _logprobs(logits[row], chosen[row], state.params.logprobs)
        for row, state in enumerate(states)
        if chosen[row] >= 0 and state.params.logprobs is not None
    }
    return [
        SampledToken(token, told.get(row)) if token >= 0 else ModelError(NOT_FINITE) for row, token in enumerate(chosen)
    ]


def likeliest(logits: torch.Tensor, count: int) -> list[Sequence[tuple[int, float]] | ModelError]:
    """(token, natural log of its probability) of each row's `count` likeliest tokens, best first. Mutates nothing.

    As in `sample`, a row whose logits are not finite gets a `ModelError`.
    """
    healthy = logits.amax(dim=-1).isfinite().tolist()
    values, ids = logits.log_softmax(-1).topk(min(count, logits.shape[-1]))
    return [
        list(zip(tokens, logprobs, strict=True)) if ok else ModelError(NOT_FINITE)
        for ok, tokens, logprobs in zip(healthy, ids.tolist(), values.tolist(), strict=True)
    ]


def candidates(logits: torch.Tensor, params: Sampling) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a row is drawn from, after temperature, min_p, top_k and top_p.

    Returns the candidates' weights, to which their probabilities are proportional, and their token ids (None where
    every token is a candidate, in order).
    """
    # Shifted first, so that a tiny temperature does not overflow: the likeliest weighs 1.
    weights = (logits - logits.amax()).div_(max(params.temperature, _LEAST_TEMPERATURE)).exp_()
    if params.min_p > 0:
        weights *= weights >= params.min_p
    ids = None
    if 0 < params.top_k < len(weights):
        weights, ids = weights.topk(params.top_k)
    if params.top_p < 1.0:
        total = weights.sum(dtype=torch.float64)
        if ids is None:
            weights, ids = _likeliest(weights, total, params.top_p)
        # A token stays while those before it have not reached top_p; the first always does.
        weights = weights * (weights.cumsum(0, dtype=torch.float64) - weights < params.top_p * total)
    return weights, ids


def _likeliest(weights: torch.Tensor, total: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens in falling order that hold at least a share of the total weight, not necessarily the fewest.

    Those that weigh less than an n-th of the rest are left out: n of them hold less than that rest. With a small n few
    are left to sort; where they hold too little, n is the number of all, which is right whatever the weights are.
    """
    runs = _runs(weights)
    highest = runs.amax(dim=1)
    for count in (min(_NUCLEUS_GUESS, len(weights)), len(weights)):
        floor = (1.0 - share) * total / count
        with_some = (highest >= floor).nonzero()  # almost no run has any: they are all that is looked at
        at = (runs[with_some[:, 0]] >= floor).nonzero()
        ids = with_some[at[:, 0], 0] * _RUN + at[:, 1]
        values = weights[ids]
        if values.sum(dtype=torch.float64) >= share * total:
            break
    values, order = values.sort(descending=True, stable=True)
    return values, ids[order]


def _choose(logits: torch.Tensor, state: SamplerState) -> torch.Tensor:
    """One row's token id, a scalar tensor: but for a nucleus, nothing here waits for the device."""
    logits = state.shaped(logits)
    if state.params.temperature == 0:
        return logits.argmax()
    weights, ids = candidates(logits, state.params)
    index = _draw(weights, state.uniform())
    return index if ids is None else ids[index]


def _draw(weights: torch.Tensor, uniform: float) -> torch.Tensor:
    """Where a number in [0, 1) falls among weights laid end to end: a scalar index, never of one that is 0.

    First in which run of them, then where in that: a running sum over all would take as long as all the rest.
    """
    runs = _runs(weights)
    sums = runs.sum(dim=1).double()
    ends = sums.cumsum(0)
    # Scaling by the totals, and below them, keeps rounding from pointing past the last candidate.
    target = ends[-1:] * uniform
    run = torch.searchsorted(ends, target, right=True)
    share = ((target - ends[run] + sums[run]) / sums[run]).clamp_(0.0, _BELOW_ONE)
    within = runs[run].cumsum(1, dtype=torch.float64)
    return (run * _RUN + torch.searchsorted(within, within[:, -1:] * share[:, None], right=True)[:, 0])[0]


def _runs(weights: torch.Tensor) -> torch.Tensor:
    """Weights in rows of neighbours, zeros after the last."""
    missing = -len(weights) % _RUN
    return (torch.nn.functional.pad(weights, (0, missing)) if missing else weights).view(-1, _RUN)


def _logprobs(logits: torch.Tensor, token: int, wanted: int) -> TokenLogprobs:
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(wanted, len(logprobs)))
    return TokenLogprobs(float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
