"""LeaseDesk: answers to the leases that requests ask for.

The pool decides at once. Where it has no room under its bound, a tier may hold the lease instead: while that is being
decided, for a second at most, the request computes on and its outputs wait, since the first of them tells the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pagoda.engine.outputs import LeaseOutcome, RequestOutput
from pagoda.engine.params import LeaseSpec
from pagoda.engine.request import Request
from pagoda.errors import LeaseRefused, PoolIsLeased
from pagoda.kv.cache import KVCache
from pagoda.kv.tier_leases import Promise, Wish
from pagoda.kv.tiered import TieredCache


@dataclass(slots=True, eq=False)
class _Case:
    """A request with leases that tiers are asked to hold, by their places among its outcomes."""

    request: Request
    promises: dict[int, Promise] = field(default_factory=dict)
    outputs: list[RequestOutput] = field(default_factory=list)


class LeaseDesk:
    """Grants leases, and keeps back the outputs of requests that wait for a tier's answer."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._cases: dict[str, _Case] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether a tier is being asked."""
        return bool(self._cases)

    def grant(self, request: Request, num_computed_tokens: int) -> None:
        """Lease the prefixes that are computed now: later, what slid out of a window may be gone."""
        for spec in request.leases[len(request.outcomes) :]:
            if spec.num_tokens > num_computed_tokens:
                return
            request.outcomes.append(self._grant(request, spec))

    def _grant(self, request: Request, spec: LeaseSpec) -> LeaseOutcome:
        scope, prefix = request.scope, request.prompt[: spec.num_tokens]
        try:
            kept = self._cache.retention.retain(prefix, scope, ttl_s=spec.ttl_s, owner=scope.namespace, name=spec.name)
        except PoolIsLeased as refusal:
            return self._grant_below(request, spec, refusal)
        except LeaseRefused as refusal:
            return self._refuse(spec, refusal)
        return LeaseOutcome(spec, kept.num_tokens, held_in="pool")

    def _refuse(self, spec: LeaseSpec, refusal: LeaseRefused) -> LeaseOutcome:
        self._cache.retention.num_refused += 1
        return LeaseOutcome(spec, 0, str(refusal))

    def _grant_below(self, request: Request, spec: LeaseSpec, refusal: LeaseRefused) -> LeaseOutcome:
        """What a tier holds already; else the refusal, which stands unless a tier takes the lease."""
        if not isinstance(self._cache, TieredCache) or not request.params.tier_use.store:
            return self._refuse(spec, refusal)
        scope = request.scope
        wish = Wish(request.prompt[: spec.num_tokens], scope, spec.ttl_s, scope.namespace, spec.name)
        kept = self._cache.kept_below(wish)
        if kept is not None:
            return LeaseOutcome(spec, kept.num_tokens, held_in=kept.held_in)
        promise = self._cache.promise(wish)
        if promise is None:
            return self._refuse(spec, refusal)
        case = self._cases.setdefault(request.request_id, _Case(request))
        case.promises[len(request.outcomes)] = promise
        return LeaseOutcome(spec, 0, str(refusal))

    def pass_on(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The outputs that may go out now: these and earlier ones, but those of requests that wait for an answer."""
        if not self._cases:
            return outputs
        ready: list[RequestOutput] = []
        decided: dict[str, tuple[LeaseOutcome, ...]] = {}
        for name, case in list(self._cases.items()):
            if all(promise.is_held is not None for promise in case.promises.values()):
                del self._cases[name]
                for place, promise in case.promises.items():
                    if promise.is_held:
                        spec = case.request.outcomes[place].spec
                        outcome = LeaseOutcome(spec, promise.num_tokens, held_in=promise.lane.name)
                        case.request.outcomes[place] = outcome
                    else:
                        self._cache.retention.num_refused += 1
                decided[name] = tuple(case.request.outcomes)
                ready += [replace(output, leases=decided[name]) for output in case.outputs]
        for output in outputs:
            waiting = self._cases.get(output.request_id)
            if waiting is not None:
                waiting.outputs.append(output)
            else:
                ready.append(replace(output, leases=decided.get(output.request_id, output.leases)))
        return ready

    def drop(self, request_id: str) -> None:
        """A request ends: nobody waits for its answers, and what it asked for is not kept."""
        case = self._cases.pop(request_id, None)
        for promise in case.promises.values() if case is not None else ():
            promise.is_cancelled = True
