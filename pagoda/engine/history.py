"""History: the last requests, what each asked and why it did not hit further. For explanations and purges by id."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from pagoda.kv.cache import KVCache
from pagoda.kv.keys import Scope
from pagoda.kv.lease import Lease
from pagoda.kv.observe import Explanation
from pagoda.kv.radix_node import TokenArray

MAX_REQUESTS = 1024
MAX_TOKENS = 4 << 20  # of their prompts, 16 MiB


class Blended(Protocol):
    """How a request reuses passages; see `pagoda.blend.progress`, which needs torch."""

    @property
    def num_blended(self) -> int:
        """Tokens that are reused."""
        ...


@dataclass(frozen=True, slots=True)
class Past:
    """A request that ran. Its explanation has only what was cheap.

    Its lease knows later what tiers did for it, and its blend how much was reused.
    """

    prompt: TokenArray
    scope: Scope
    lease: Lease
    explanation: Explanation
    blend: Blended | None = None


class History:
    """The last 1,024 requests, and fewer where their prompts are long. Not thread-safe: the engine's thread owns it."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._past: OrderedDict[str, Past] = OrderedDict()
        self._num_tokens = 0

    def remember(self, request_id: str, past: Past) -> None:
        """Note a request that starts to run."""
        self.forget(request_id)
        self._past[request_id] = past
        self._num_tokens += past.prompt.size
        while len(self._past) > MAX_REQUESTS or self._num_tokens > MAX_TOKENS:
            self.forget(next(iter(self._past)))

    def forget(self, request_id: str) -> None:
        """Drop a request, if it is here."""
        past = self._past.pop(request_id, None)
        if past is not None:
            self._num_tokens -= past.prompt.size

    def forget_tenant(self, namespace: str) -> None:
        """Drop all requests of a namespace."""
        for name in [name for name, past in self._past.items() if past.scope.namespace == namespace]:
            self.forget(name)

    def forget_prefix(self, prefix: TokenArray, scope: Scope) -> None:
        """Drop the requests of a scope whose prompts begin so."""
        for name, past in list(self._past.items()):
            if past.scope == scope and np.array_equal(past.prompt[: prefix.size], prefix):
                self.forget(name)

    def find(self, request_id: str) -> Past | None:
        """A request that is remembered."""
        return self._past.get(request_id)

    def ids(self, start: str) -> list[str]:
        """The ids that start so."""
        return [name for name in self._past if name.startswith(start)]

    def explain(self, request_id: str, namespace: str) -> Explanation | None:
        """Why a request's prompt did not hit further; None if it is another namespace's, or not remembered.

        What the request itself did not need to know is looked up now: whether another scope has more, and what came of
        asking tiers; and, after a purge, whether the other text where it diverged is still there to be told.
        """
        past = self._past.get(request_id)
        if past is None or past.scope.namespace != namespace:
            return None
        self._cache.poll()  # a restore that is complete tells of itself when it is taken in
        explanation = past.explanation.with_restore(past.lease.restore_report)
        if past.blend is not None:
            num_missed = explanation.num_tokens - explanation.num_hit_tokens
            explanation = replace(explanation, num_blended_tokens=min(past.blend.num_blended, num_missed))
        misses = self._cache.misses
        return misses.elsewhere(misses.still_cached(explanation, past.prompt, past.scope), past.prompt, past.scope)
