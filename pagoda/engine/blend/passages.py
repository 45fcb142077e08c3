"""Passages: computes passages alone, ahead of the requests that reuse them.

    request [ system | B | A | question ]      waits until B and A are there
    internal requests [ B ], [ A ]             ordinary prompts of the same scope that generate nothing

A passage alone is a prompt like any other: it is found by its tokens, shares the tree, tiers, shares and eviction with
all that is cached, and is computed or restored in the same steps as what else runs. Whether it was there before or
not, the request then reads the same KV.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pagoda.blend.segments import BlendSpec
from pagoda.engine.params import SamplingParams
from pagoda.engine.request import Request, Sample, TokenBuffer
from pagoda.errors import InvalidRequest
from pagoda.kv.cache import KVCache
from pagoda.kv.keys import Scope
from pagoda.kv.layout import KVLayout
from pagoda.sparse.spec import Full

_TURNED = {(name, dtype) for name in ("keys", "values") for dtype in ("float32", "bfloat16", "float16")}


@dataclass(frozen=True, slots=True)
class PendingPassages:
    """The passages that a request waits for."""

    requests: tuple[Request, ...]

    @property
    def is_pending(self) -> bool:
        """Whether one of them is still on its way."""
        return any(not request.is_finished for request in self.requests)


def reusable(
    blend: BlendSpec, num_tokens: int, params: SamplingParams, scope: Scope, layout: KVLayout
) -> BlendSpec | None:
    """The passages of a prompt of `num_tokens` tokens; None if they cannot be reused and the request did not ask.

    Raises:
        InvalidRequest: they reach beyond it; or it asked, and has a kv_policy, an adapter changes the model in the
            middle of it, or keys are stored in a form that cannot be turned.
    """
    if any(span.stop > num_tokens for span in blend.spans):
        raise InvalidRequest(f"a passage ends after the prompt of {num_tokens} tokens", param="blend")
    obstacle = _obstacle(params, scope, layout)
    if obstacle is None:
        return blend
    if blend.is_default:
        return None
    raise obstacle


def _obstacle(params: SamplingParams, scope: Scope, layout: KVLayout) -> InvalidRequest | None:
    if params.kv_policy is not None and not isinstance(params.kv_policy, Full):
        return InvalidRequest("a request with a kv_policy reuses no passages", param="kv_policy")
    if scope.adapter_from:
        message = "passages cannot be reused with an adapter that starts within the prompt"
        return InvalidRequest(message, param="blend")
    if any((part.name, part.dtype) not in _TURNED for layer in layout.layers for part in layer.parts):
        message = "passages cannot be reused where the KV cache is quantized: serve with --kv-format auto for that"
        return InvalidRequest(message, param="blend")
    return None


class Passages:
    """The passages that are being computed.

    Args:
        cache: the engine's.
        new_sample: makes a sample of a request, to be run.
    """

    def __init__(self, cache: KVCache, new_sample: Callable[[Request, int, TokenBuffer], Sample]) -> None:
        self._cache = cache
        self._new_sample = new_sample
        self._computing: dict[tuple[Scope, bytes], Request] = {}
        self._readers: dict[Request, list[Request]] = {}

    def prepare(self, request: Request) -> list[Request]:
        """Let a new request wait for its passages; returns the requests to start that compute what is missing."""
        assert request.blend is not None, "only a request with passages waits for them"
        self._forget_finished()
        known = self._cache.lookup(request.prompt, request.scope).num_tokens
        missing: list[Request] = []
        new: list[Request] = []
        for span in request.blend.spec.spans:
            tokens = span.alone(request.prompt)
            if span.stop <= known or self._cache.find(tokens, request.scope).num_tokens == tokens.size:
                continue
            key = request.scope, tokens.tobytes()
            passage = self._computing.get(key)
            if passage is None:
                passage = self._computing[key] = self._passage(request, f"passage-{span.start}", tokens)
                self._readers[passage] = []
                new.append(passage)
            self._readers[passage].append(request)
            missing.append(passage)
        request.samples[0].pending = PendingPassages(tuple(missing)) if missing else None
        return new

    def _passage(self, request: Request, name: str, tokens: np.ndarray) -> Request:
        params = SamplingParams(max_tokens=0, tier_use=request.params.tier_use)
        passage = Request(
            f"{request.request_id}/{name}",
            tokens,
            params,
            request.scope,
            request.priority,
            0,
            adapter=request.adapter,
            is_announced=True,
            is_internal=True,
        )
        passage.samples.append(self._new_sample(passage, 0, TokenBuffer(tokens.copy())))
        return passage

    def leave(self, request: Request) -> list[Request]:
        """A request ended that may have waited for passages; returns those that nobody waits for any more.

        What it caused and others still wait for is from now on the first of theirs to account for.
        """
        self._forget_finished()
        orphans = []
        for passage, readers in self._readers.items():
            heir = next((reader for reader in readers if not reader.is_finished), None)
            if heir is None:
                orphans.append(passage)
            elif passage in request.passages:
                request.passages = [each for each in request.passages if each is not passage]
                heir.passages = [*heir.passages, passage]
        return orphans

    def _forget_finished(self) -> None:
        self._computing = {key: passage for key, passage in self._computing.items() if not passage.is_finished}
        self._readers = {passage: self._readers[passage] for passage in self._computing.values()}
