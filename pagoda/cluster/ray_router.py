"""The same placement inside Ray Serve: a RequestRouter, and when to run more replicas.

    handle.serve.remote(Call) ──> choose_replicas: pick ──> on_request_routed: put ──> on_request_completed: end

Ray knows replicas by ids that come and go; a placement has numbered places, so an id gets a free place while it lives.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pagoda.cluster.index import FleetIndex
from pagoda.cluster.placement import Placed, Placement
from pagoda.cluster.prompts import Prompt
from pagoda.cluster.routing import make_routing
from pagoda.errors import NoReplica

MAX_REPLICAS = 64
MAX_PICKED = 4096
TARGET_PRESSURE = 0.7
PRESSURE = "pressure"  # what replicas report to the autoscaler: 0 idle, 1 full


@dataclass(frozen=True, slots=True)
class Call:
    """A client's request on its way to a replica."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    prompt: Prompt


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a Call to the replica that can answer first; whatever else is routed, to any."""

    def initialize_state(self, policy: str = "prefix-aware", max_replicas: int = MAX_REPLICAS) -> None:
        """Begin with no replica. Ray calls it with `request_router_kwargs`."""
        self._placement = Placement(max_replicas, make_routing(policy, max_replicas), FleetIndex(max_replicas))
        self._places: dict[ReplicaID, int] = {}
        self._free = list(range(max_replicas))[::-1]
        self._picked: OrderedDict[str, int] = OrderedDict()  # of requests that are being routed
        self._placed: dict[str, Placed] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in which replicas there are; what is known of those that are gone is forgotten."""
        living = {replica.replica_id for replica in replicas}
        for gone in self._places.keys() - living:
            self._leave(gone)
        for replica in replicas:
            if replica.replica_id not in self._places and self._free:
                place = self._places[replica.replica_id] = self._free.pop()
                self._placement.set_up(place, True)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica."""
        self._leave(replica_id)
        super().on_replica_actor_died(replica_id)

    def _leave(self, replica_id: ReplicaID) -> None:
        if (place := self._places.pop(replica_id, None)) is not None:
            self._placement.set_up(place, False)
            self._placement.index.forget(place)
            self._free.append(place)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best first, then all others. Those that say they take nothing now are considered only if all say so."""
        takes = [each for each in candidate_replicas if each.routing_stats.get("takes_requests", True)]
        takes = takes or candidate_replicas  # they refuse what they must, and the others find their prefix
        prompt = _prompt(pending_request)
        places = {self._places[each.replica_id]: each for each in takes if each.replica_id in self._places}
        if prompt is None or not places:
            return [candidate_replicas]
        assert pending_request is not None
        try:
            best = places[self._pick(pending_request.metadata.internal_request_id, prompt, places)]
        except NoReplica:
            return [candidate_replicas]
        return [[best], [replica for replica in candidate_replicas if replica is not best]]

    def _pick(self, request_id: str, prompt: Prompt, places: Container[int]) -> int:
        """The place for a request, the same however often Ray asks while it is there."""
        picked = self._picked.get(request_id)
        if picked is None or picked not in places:
            picked = self._placement.pick(prompt, [place for place in self._places.values() if place not in places])
            self._picked[request_id] = picked
            if len(self._picked) > MAX_PICKED:  # requests that were given up are not heard of again
                self._picked.popitem(last=False)
        return picked

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A request went to a replica, the chosen one or another."""
        prompt, place = _prompt(pending_request), self._places.get(replica_id)
        self._picked.pop(pending_request.metadata.internal_request_id, None)
        if prompt is not None and place is not None:
            self._placed[pending_request.metadata.internal_request_id] = self._placement.put(place, prompt)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request is over."""
        if (placed := self._placed.pop(internal_request_id, None)) is not None:
            self._placement.end(placed)


def _prompt(pending: PendingRequest | None) -> Prompt | None:
    call = pending.args[0] if pending is not None and pending.args else None
    # By its field: Ray may load this module twice, for a router and for what calls it, with a Call of each.
    return getattr(call, "prompt", None)


def scale_on_pressure(context: Any) -> tuple[int, dict[str, Any]]:
    """An autoscaling policy of Ray: as many replicas as bring their mean pressure to TARGET_PRESSURE."""
    told = (context.aggregated_metrics or {}).get(PRESSURE, {})
    if not told:
        return context.current_num_replicas, {}
    mean = sum(told.values()) / len(told)
    wanted = math.ceil(context.current_num_replicas * mean / TARGET_PRESSURE)
    return min(max(wanted, context.capacity_adjusted_min_replicas), context.capacity_adjusted_max_replicas), {}
