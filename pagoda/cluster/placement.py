"""Placement: where a request goes, and how loaded each replica is because of what went there. Pure bookkeeping.

    choose   a policy over: what each replica has of the prompt, what it has still to compute
    answers  the prompt is computed: only its answer is
    end      it is over

Load is counted in tokens to compute, of prompts that were sent and not answered yet. A conversation stays where it was
unless that costs more than `AFFINITY_TOKENS`. A hot prefix spreads by itself: when the queue of those who have it costs
more than computing it, another replica gets the request, and has the prefix from then on.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagoda.cluster.index import FleetIndex
from pagoda.cluster.prompts import Prompt
from pagoda.cluster.routing import RoutingPolicy
from pagoda.errors import NoReplica

AFFINITY_TOKENS = 256
ANSWERING_TOKENS = 32  # what a stream of answers costs others that wait, compared with computing prompts
MAX_SESSIONS = 1 << 16


@dataclass(eq=False, slots=True)
class Placed:
    """A request at a replica: how many of its tokens were known there, and what it weighs now."""

    replica: int
    prompt: Prompt
    num_known: int
    weight: float


class Placement:
    """Chooses among replicas, all of which are out until `set_up`. Not thread-safe.

    Args:
        policy: fresh; chooses among as many replicas.
        index: what they have.
    """

    def __init__(self, num_replicas: int, policy: RoutingPolicy, index: FleetIndex) -> None:
        self.index = index
        self._policy = policy
        self._load: npt.NDArray[np.float64] = np.zeros(num_replicas)
        self._out: npt.NDArray[np.bool_] = np.ones(num_replicas, dtype=np.bool_)
        self._sessions: OrderedDict[bytes, int] = OrderedDict()  # by digests: names are as long as clients like

    def set_up(self, replica: int, takes_requests: bool) -> None:
        """Let a replica get requests, or no more."""
        self._out[replica] = not takes_requests

    def is_up(self, replica: int) -> bool:
        """Whether a replica gets requests."""
        return not self._out[replica]

    def load(self, replica: int) -> float:
        """The tokens that a replica has still to compute."""
        return float(self._load[replica])

    def choose(self, prompt: Prompt, besides: Collection[int] = ()) -> Placed:
        """Send a prompt to a replica that is up and not among `besides`.

        Raises:
            NoReplica: there is none.
        """
        return self.put(self.pick(prompt, besides), prompt)

    def pick(self, prompt: Prompt, besides: Collection[int] = ()) -> int:
        """The replica that `choose` sends a prompt to. Notes nothing but whose turn is next.

        Raises:
            NoReplica: there is none.
        """
        load = self._load.copy()
        load[self._out] = np.inf
        load[list(besides)] = np.inf
        if np.isinf(load).all():
            raise NoReplica("no replica takes requests now")
        if prompt.session and (last := self.session(prompt.session)) is not None:
            load[last] -= AFFINITY_TOKENS
        return self._policy.place(self.index.known(prompt), prompt.num_tokens, load)

    def put(self, replica: int, prompt: Prompt) -> Placed:
        """Send a prompt to a replica, whoever chose it."""
        num_known = min(int(self.index.known(prompt)[replica]), prompt.num_tokens)
        placed = Placed(replica, prompt, num_known, 0.0)
        self._weigh(placed, max(1, prompt.num_tokens - num_known))
        self.index.expect(replica, prompt)
        if prompt.session:
            self.remember(prompt.session, replica)
        return placed

    def remember(self, session: str, replica: int) -> None:
        """A conversation is at a replica from now on."""
        name = _digest(session)
        self._sessions[name] = replica
        self._sessions.move_to_end(name)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def session(self, name: str) -> int | None:
        """The replica that a conversation is at."""
        return self._sessions.get(_digest(name))

    def answers(self, placed: Placed) -> None:
        """The first of an answer arrived."""
        self._weigh(placed, ANSWERING_TOKENS)

    def end(self, placed: Placed) -> None:
        """A request is over, answered or not."""
        self._weigh(placed, 0.0)
        self.index.settle(placed.replica, placed.prompt)

    def _weigh(self, placed: Placed, weight: float) -> None:
        self._load[placed.replica] += weight - placed.weight
        placed.weight = weight


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
