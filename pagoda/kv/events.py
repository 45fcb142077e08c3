"""Block events: what enters and leaves the tree, by names that others can compare. For routers and other readers.

    commit ──> BlockStored    the names of new whole blocks, and of the block before them
    evict, purge ──> BlockRemoved
    another model ──> BlocksCleared

A block's name is the first 64 bits of its BlockKey under a secret: it stands for the scope and all tokens up to the
block's end, and tells who lacks the secret nothing. Token ids go out only if asked for. Of several layer groups, the
one that keeps most of a hit stands for all. Partial tails are not told of. What lower tiers keep is told by TierEvents,
through the same door.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagoda.kv.allocator import BlockIds
from pagoda.kv.keys import BlockKey, KeyChain, Scope
from pagoda.kv.lineage import Lineages
from pagoda.kv.radix_node import TokenArray

NAME_BYTES = 8
DEVICE = "GPU"  # what readers call an engine's own pool, wherever it is
_RUN_BLOCKS = 1024  # of one event, when all is told


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that follow one another, the first after `parent`; `token_ids` of all, or none if they are not told.

    `medium` is where they are: the pool, or a tier.
    """

    names: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str = DEVICE


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that are gone from a medium."""

    names: tuple[int, ...]
    medium: str = DEVICE


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """All are gone that were ever told of."""


BlockEvent = BlockStored | BlockRemoved | BlocksCleared


class Below(Protocol):
    """Who tells of lower tiers."""

    def all(self) -> Sequence[BlockEvent]:
        """Everything that tiers are known to have now."""
        ...

    def forget(self) -> None:
        """All names are of no use any more: another model computes."""
        ...


@dataclass(frozen=True, slots=True)
class _Named:
    key: BlockKey
    parent: int | None
    token_ids: tuple[int, ...]


class BlockEvents:
    """Names the blocks of a tree and tells of them. The engine's thread owns it; any may call `names` and `tell`.

    Args:
        keys: names under this model and secret.
        block_size: tokens per block.
        group: the layer group whose blocks are told of.
        lineages: the tree's.
        emit: takes events in order, one call at a time: it must not wait.
        with_tokens: whether events have token ids.

    Attributes:
        below: tells of lower tiers, where there are any to tell of.
    """

    def __init__(
        self,
        keys: KeyChain,
        block_size: int,
        group: int,
        lineages: Lineages,
        emit: Callable[[Sequence[BlockEvent]], None],
        *,
        with_tokens: bool = False,
    ) -> None:
        self._keys = keys
        self._block_size = block_size
        self._group = group
        self._lineages = lineages
        self.below: Below | None = None
        self._emit = emit
        self._lock = threading.Lock()
        self._with_tokens = with_tokens
        self._told: dict[int, _Named] = {}  # blocks of the group; parents before what follows them
        self._others: dict[int, BlockKey] = {}  # blocks of the other groups

    def on_commit(
        self,
        scope: Scope,
        after: int | None,
        tokens: TokenArray,
        blocks: BlockIds,
        entered: npt.NDArray[np.bool_],
    ) -> None:
        """Blocks `[num_groups, n]` came into the tree after group 0's block `after`, those where `entered` is true."""
        size = self._block_size
        whole = tokens.size // size
        if not whole:
            return
        parent = self._keys.root(scope) if after is None else self._key_of(after)
        parent_name = None if after is None else _name(parent)
        runs: list[BlockStored] = []
        names: list[int] = []
        first = 0
        for index, key in enumerate(self._keys.chain(parent, tokens[: whole * size], size)):
            for group, block in enumerate(blocks[:, index].tolist()):
                if not entered[group, index]:
                    continue
                if group != self._group:
                    self._others[block] = key
                    continue
                ids = tuple(tokens[index * size : (index + 1) * size].tolist()) if self._with_tokens else ()
                self._told[block] = _Named(key, parent_name, ids)
                if not names:
                    first, first_parent = index, parent_name
                names.append(_name(key))
            if names and not entered[self._group, index]:
                runs.append(self._stored(names, first_parent, tokens[first * size : index * size]))
                names = []
            parent_name = _name(key)
        if names:
            runs.append(self._stored(names, first_parent, tokens[first * size : whole * size]))
        self.tell(lambda: runs)

    def tell(self, look: Callable[[], Sequence[BlockEvent]]) -> None:
        """Emit the events that a look finds, if any, on whichever thread; meanwhile nothing else is told or renewed."""
        with self._lock:
            if events := look():
                self._emit(events)

    def stored(self, block: int) -> BlockStored | None:
        """What was told of a block of the tree; None if nothing was, as of another group's."""
        named = self._told.get(block)
        return None if named is None else self._run([named])

    def _stored(self, names: Sequence[int], parent: int | None, tokens: TokenArray) -> BlockStored:
        ids = tuple(tokens.tolist()) if self._with_tokens else ()
        return BlockStored(tuple(names), parent, ids, self._block_size)

    def _key_of(self, block: int) -> BlockKey:
        named = self._told.get(block)
        return self._others[block] if named is None else named.key

    def on_gone(self, ids: BlockIds) -> None:
        """Blocks left the tree."""
        names = []
        for block in ids.tolist():
            if (named := self._told.pop(block, None)) is not None:
                names.append(_name(named.key))
            else:
                self._others.pop(block, None)
        if names:
            self.tell(lambda: [BlockRemoved(tuple(names))])

    def renew(self, fingerprint: bytes) -> None:
        """Another model computes from now on, and the tree is empty."""
        self._keys = self._keys.for_model(fingerprint)
        with self._lock:  # what a tier was found to have of the old one is told before this or never
            if self.below is not None:
                self.below.forget()
            self._emit([BlocksCleared()])

    def tell_all(self) -> None:
        """Tell of everything anew, after a `BlocksCleared`. O(blocks)."""
        with self._lock:  # what tiers tell meanwhile comes after it, and not between
            below = () if self.below is None else self.below.all()
            self._emit([BlocksCleared(), *self._runs(), *below])

    def _runs(self) -> Iterator[BlockStored]:
        """All blocks, as runs."""
        run: list[_Named] = []
        for named in self._told.values():
            if run and (named.parent != _name(run[-1].key) or len(run) == _RUN_BLOCKS):
                yield self._run(run)
                run = []
            run.append(named)
        if run:
            yield self._run(run)

    def _run(self, run: Sequence[_Named]) -> BlockStored:
        tokens = tuple(token for named in run for token in named.token_ids)
        return BlockStored(tuple(_name(named.key) for named in run), run[0].parent, tokens, self._block_size)

    def names(self, tokens: TokenArray, scope: Scope) -> list[int]:
        """The names of the whole blocks of a prompt, in the tree or not. Mutates nothing."""
        names: list[int] = []
        for segment in self._lineages.of(tokens, scope):
            stop = min(segment.stop, tokens.size) // self._block_size * self._block_size
            if segment.start >= stop:
                continue
            chain = self._keys.chain(self._keys.root(segment.scope), tokens[segment.start : stop], self._block_size)
            names += [_name(key) for key in chain]
        return names


def _name(key: BlockKey) -> int:
    return int.from_bytes(key[:NAME_BYTES], "big")
