"""FleetIndex: how much of a prompt each replica has, from the best source there is for each.

    events       blocks that a replica told it has          exact; gone when it says so, or dies
                 in its pool, in its memory, on its disk    a token that is restored counts in part
    expected     blocks of prompts that are on their way    until their answers are there, by when events have told
    history      pieces of the text of what it was sent     for replicas that tell nothing; the coldest are forgotten

Names of blocks stand for model, tenant and all tokens up to them, so one index holds every namespace and mixes none.
All three are bounded, and bits of a replica that died go at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagoda.cluster.prompts import CHUNK_TOKENS, Prompt
from pagoda.cluster.routing import PrefixIndex
from pagoda.kv.events import DEVICE, BlockEvent, BlockRemoved, BlocksCleared, BlockStored

WORTH = {DEVICE: 1.0, "CPU": 0.9, "DISK": 0.7}
"""What a known token saves of computing it, by the medium that it is in: the fastest first."""

MAX_BLOCKS = 1 << 20
MAX_EXPECTED = 1 << 17
MAX_CHUNKS = 1 << 18


class FleetIndex:
    """What replicas have. Not thread-safe."""

    def __init__(self, num_replicas: int, max_blocks: int = MAX_BLOCKS) -> None:
        self._events = {medium: PrefixIndex(num_replicas, max_blocks) for medium in WORTH}
        self._expected = PrefixIndex(num_replicas, MAX_EXPECTED)
        self._history = PrefixIndex(num_replicas, MAX_CHUNKS)
        self._tells: npt.NDArray[np.bool_] = np.zeros(num_replicas, dtype=np.bool_)

    def __len__(self) -> int:
        return self.num_blocks + len(self._expected) + len(self._history)

    @property
    def num_blocks(self) -> int:
        """Blocks that some replica told of, in each medium."""
        return sum(map(len, self._events.values()))

    @property
    def tells(self) -> Sequence[int]:
        """The replicas that tell events."""
        return [int(replica) for replica in np.flatnonzero(self._tells)]

    def apply(self, replica: int, event: BlockEvent) -> None:
        """Take in what a replica told."""
        self._tells[replica] = True
        match event:
            case BlockStored() if event.medium in WORTH:
                self._events[event.medium].add(replica, event.names)
            case BlockRemoved() if event.medium in WORTH:
                self._events[event.medium].remove(replica, event.names)
            case BlocksCleared():
                self._forget_events(replica)

    def expect(self, replica: int, prompt: Prompt) -> None:
        """A prompt is on its way to a replica."""
        self._expected.add(replica, prompt.blocks)
        self._history.add(replica, prompt.chunks)

    def settle(self, replica: int, prompt: Prompt) -> None:
        """A replica is done with a prompt: what it kept of it, its events have told."""
        self._expected.remove(replica, prompt.blocks)

    def forget(self, replica: int) -> None:
        """A replica died, or lost everything. O(blocks)."""
        self._tells[replica] = False
        self._forget_events(replica)
        for index in self._expected, self._history:
            index.forget(replica)

    def _forget_events(self, replica: int) -> None:
        for index in self._events.values():
            index.forget(replica)

    def known(self, prompt: Prompt) -> npt.NDArray[np.int64]:
        """For each replica, how many of a prompt's tokens it has or is about to have; what it restores, in part."""
        guessed = self._history.depths(prompt.chunks) * CHUNK_TOKENS
        if not prompt.blocks:
            return guessed
        told = np.rint(self._told(prompt.blocks) * prompt.block_tokens).astype(np.int64)
        return np.where(self._tells, told, guessed)

    def _told(self, blocks: Sequence[int]) -> npt.NDArray[np.float64]:
        """Leading blocks of each replica, by their worth: a hit goes on where it leaves one medium for the next."""
        worth = np.zeros(self._tells.size)
        reached = self._expected.depths(blocks)
        above: list[PrefixIndex] = []
        for medium, index in self._events.items():
            if medium == DEVICE:
                reached = np.maximum(reached, index.depths(blocks))
                worth += WORTH[medium] * reached
            elif len(index):
                depths = np.maximum(reached, index.depths_with(above, blocks))
                worth += WORTH[medium] * (depths - reached)
                reached = depths
            above.append(index)
        return worth
