"""Block events: what was told and not taken back is what the tree has. The stateful test checks it at every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pagoda.errors import InvariantError
from pagoda.kv.cache import KVCache
from pagoda.kv.events import NAME_BYTES, BlockEvent, BlockRemoved, BlocksCleared, BlockStored
from pagoda.kv.keys import KeyChain, Scope
from pagoda.kv.lineage import PUBLIC
from pagoda.kv.radix_node import ABSENT, Node, as_tokens
from tests.kv.test_cache import SCOPE, SIZE, Bench, seq

KEYS = KeyChain(bytes(32), b"secret")


class Listener:
    """Believes what it is told."""

    def __init__(self) -> None:
        self.names: set[int] = set()
        self.events: list[BlockEvent] = []

    def hear(self, events: Sequence[BlockEvent]) -> None:
        assert events
        self.events += events
        for event in events:
            match event:
                case BlockStored(names, _, tokens, size):
                    assert not self.names & set(names), "told twice"
                    assert len(tokens) in (0, len(names) * size)
                    self.names |= set(names)
                case BlockRemoved(names):
                    assert self.names >= set(names), "taken back and never told"
                    self.names -= set(names)
                case BlocksCleared():
                    self.names.clear()


def names_in_tree(cache: KVCache) -> set[int]:
    """The names of the whole blocks that the tree has, found by walking it."""
    found: set[int] = set()
    events, group, size = cache.events, cache._anchor, cache.block_size
    assert events is not None

    def walk(node: Node, before: np.ndarray, scope: Scope) -> None:
        for child in node.children.values():
            tokens = np.concatenate([before, child.tokens])
            whole = tokens[: tokens.size // size * size]
            keys = events._keys.chain(events._keys.root(scope), whole, size)[before.size // size :]
            for key, block in zip(keys, child.blocks[group], strict=False):
                if block != ABSENT:
                    found.add(int.from_bytes(key[:NAME_BYTES], "big"))
            walk(child, tokens, scope)

    for scope in cache._tree.scopes():
        walk(cache._tree.root(scope), as_tokens([]), scope)
    return found


def bench(num_blocks: int = 16, *, with_tokens: bool = False) -> tuple[Bench, Listener]:
    made, listener = Bench(num_blocks), Listener()
    made.cache.tell(KEYS, listener.hear, with_tokens=with_tokens)
    return made, listener


def test_a_block_is_told_when_it_is_full_and_the_tail_never() -> None:
    made, listener = bench()
    made.run(seq(range(10)))
    [event] = listener.events
    assert isinstance(event, BlockStored)
    assert (len(event.names), event.parent, event.token_ids, event.block_size) == (2, None, (), SIZE)
    made.run(seq(range(13)))
    assert listener.events[1:] == [BlockStored(listener.events[1].names, event.names[-1], (), SIZE)]  # type: ignore[union-attr]
    assert listener.names == names_in_tree(made.cache)


def test_token_ids_are_told_to_those_who_ask() -> None:
    made, listener = bench(with_tokens=True)
    made.run(seq(range(10)))
    assert [event.token_ids for event in listener.events if isinstance(event, BlockStored)] == [tuple(range(8))]


def test_what_is_evicted_or_purged_is_taken_back() -> None:
    made, listener = bench(num_blocks=4)
    made.run(seq(range(12)))
    made.run(seq(range(100, 112)))
    assert listener.names == names_in_tree(made.cache)
    assert any(isinstance(event, BlockRemoved) for event in listener.events)
    made.cache.purge(SCOPE.namespace)
    assert listener.names == set()


def test_equal_prefixes_have_equal_names_under_one_secret_model_and_scope_only() -> None:
    made, _ = bench()
    events = made.cache.events
    assert events is not None
    names = events.names(seq(range(9)), SCOPE)
    assert len(names) == 2
    assert events.names(seq(range(8), [99]), SCOPE) == names
    assert not set(names) & set(events.names(seq(range(9)), Scope("other")))
    assert not set(names) & set(events.names(seq([7], range(1, 9)), SCOPE))
    other, _ = bench()
    other.cache.tell(KeyChain(bytes(32), b"other secret"), lambda events: None)
    assert other.cache.events is not None
    assert not set(names) & set(other.cache.events.names(seq(range(9)), SCOPE))


def test_a_published_prefix_is_named_as_everybodys() -> None:
    made, listener = bench(num_blocks=32)
    made.run(seq(range(12), [50, 51]))
    made.cache.publish(seq(range(8)), SCOPE)
    made.run(seq(range(8), range(60, 66)), Scope("b"))
    events = made.cache.events
    assert events is not None
    one, two = (events.names(seq(range(8), range(60, 66)), Scope(tenant)) for tenant in ("b", "c"))
    assert one[:2] == two[:2] == events.names(seq(range(8)), PUBLIC)
    assert one[2:] != two[2:]
    assert listener.names == names_in_tree(made.cache) >= set(one)


def test_another_model_begins_with_nothing_and_other_names() -> None:
    made, listener = bench()
    made.run(seq(range(8)))
    old = set(listener.names)
    made.cache.renew(b"\1" * 32)
    assert listener.names == set()
    assert listener.events[-1] == BlocksCleared()
    made.run(seq(range(8)))
    assert listener.names == names_in_tree(made.cache)
    assert not listener.names & old


def test_everything_can_be_told_anew() -> None:
    made, listener = bench(num_blocks=64, with_tokens=True)
    for start in (0, 100, 200):
        made.run(seq(range(12), range(start, start + 12)))
    before = set(listener.names)
    late = Listener()
    assert made.cache.events is not None
    made.cache.events._emit = late.hear
    made.cache.events.tell_all()
    assert late.events[0] == BlocksCleared()
    assert late.names == before
    tokens = {event.token_ids for event in late.events if isinstance(event, BlockStored)}
    assert (*range(12), *range(12)) in tokens  # a run, whatever calls it was computed in


def test_telling_begins_before_anything_is_cached() -> None:
    made = Bench()
    made.run(seq(range(8)))
    with pytest.raises(InvariantError):
        made.cache.tell(KEYS, lambda events: None)
