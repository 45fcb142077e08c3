from __future__ import annotations

import pytest

from pagoda.cluster.index import WORTH, FleetIndex
from pagoda.cluster.placement import AFFINITY_TOKENS, Placement
from pagoda.cluster.prompts import CHUNK_TOKENS, Prompt
from pagoda.cluster.routing import make_routing
from pagoda.errors import NoReplica
from pagoda.kv.events import BlockRemoved, BlocksCleared, BlockStored

BLOCK = 16


def fleet(count: int = 2, policy: str = "prefix-aware") -> Placement:
    placement = Placement(count, make_routing(policy, count), FleetIndex(count))
    for replica in range(count):
        placement.set_up(replica, True)
    return placement


def text(*chunks: int, session: str | None = None) -> Prompt:
    return Prompt(len(chunks) * CHUNK_TOKENS, chunks, session=session)


def blocks(*names: int) -> Prompt:
    return Prompt(len(names) * BLOCK + 1, (1, 2, 3), names, BLOCK)


def stored(*names: int, medium: str = "GPU") -> BlockStored:
    return BlockStored(names, None, (), BLOCK, medium)


def finished(placement: Placement, prompt: Prompt) -> int:
    placed = placement.choose(prompt)
    placement.end(placed)
    return placed.replica


def test_a_conversation_stays_where_its_text_was_and_others_spread() -> None:
    placement = fleet()
    first = finished(placement, text(1, 2, 3, 4))
    assert finished(placement, text(1, 2, 3, 4, 5)) == first
    assert finished(placement, text(7, 8)) != first


def test_load_is_what_is_still_to_compute() -> None:
    placement = fleet()
    one = placement.choose(text(1, 2, 3, 4))
    assert placement.load(one.replica) == 4 * CHUNK_TOKENS
    placement.answers(one)
    assert 0 < placement.load(one.replica) < CHUNK_TOKENS
    placement.end(one)
    assert placement.load(one.replica) == 0
    placement.end(one)  # nothing is taken twice
    assert placement.load(one.replica) == 0


def test_a_hot_prefix_spreads_when_its_queue_costs_more_than_computing_it() -> None:
    placement = fleet(3)
    hot = list(range(8))
    finished(placement, text(*hot))
    used = {placement.choose(text(*hot, 100 + 10 * i, 101 + 10 * i)).replica for i in range(12)}
    assert used == {0, 1, 2}
    assert all(known >= 8 * CHUNK_TOKENS for known in placement.index.known(text(*hot)))


def test_a_session_stays_unless_that_costs_too_much() -> None:
    placement = fleet()
    home = placement.choose(text(1, session="s"))
    placement.end(home)
    rewritten = text(*range(50, 53), session="s")  # nothing of it is known anywhere
    assert finished(placement, rewritten) == home.replica
    busy = placement.put(home.replica, text(*range(100, 100 + AFFINITY_TOKENS // CHUNK_TOKENS + 2)))
    assert placement.choose(text(70, session="s")).replica != home.replica
    placement.end(busy)


def test_a_conversations_name_takes_the_same_room_however_long_it_is() -> None:
    placement = fleet()
    name = "s" * 100_000
    home = finished(placement, text(1, session=name))
    assert placement.session(name) == home
    assert sum(map(len, placement._sessions)) < 100


def test_blocks_that_were_told_beat_what_was_sent() -> None:
    placement = fleet()
    placement.index.apply(0, BlocksCleared())
    placement.index.apply(1, BlocksCleared())
    placement.index.apply(1, stored(10, 11, 12))
    assert placement.index.known(blocks(10, 11, 12, 13)).tolist() == [0, 3 * BLOCK]
    assert finished(placement, blocks(10, 11, 12, 13)) == 1
    placement.index.apply(1, BlockRemoved((12, 11)))
    assert placement.index.known(blocks(10, 11, 12, 13)).tolist() == [0, BLOCK]
    placement.index.apply(1, BlocksCleared())
    assert placement.index.known(blocks(10, 11, 12, 13)).tolist() == [0, 0]


def test_what_a_tier_has_counts_in_part() -> None:
    placement = fleet(4)
    index, prompt = placement.index, blocks(*range(10, 20))
    for replica in range(4):
        index.apply(replica, BlocksCleared())
    index.apply(0, stored(10, 11))
    index.apply(1, stored(*range(10, 14), medium="CPU"))
    index.apply(2, stored(10, 11))
    index.apply(2, stored(12, 13, medium="CPU"))
    index.apply(2, stored(14, 15, medium="DISK"))
    index.apply(3, stored(*range(10, 20), medium="FAR AWAY"))
    worth = [2 * 1.0, 4 * WORTH["CPU"], 2 + 2 * WORTH["CPU"] + 2 * WORTH["DISK"], 0]
    assert index.known(prompt).tolist() == [round(each * BLOCK) for each in worth]
    assert placement.pick(prompt) == 2
    index.apply(2, BlockRemoved((12, 13), "CPU"))  # a hit does not go on behind a gap
    assert index.known(prompt)[2] == 2 * BLOCK
    index.apply(1, BlockRemoved((13,)))  # it is not in the pool: that says nothing of the tier
    assert index.known(prompt)[1] == round(4 * WORTH["CPU"] * BLOCK)
    index.apply(1, BlocksCleared())
    assert not index.known(prompt)[1]


def test_a_prompt_on_its_way_counts_until_it_is_over() -> None:
    placement = fleet()
    for replica in (0, 1):
        placement.index.apply(replica, BlocksCleared())
    placed = placement.choose(blocks(10, 11))
    known = placement.index.known(blocks(10, 11))
    assert known[placed.replica] == 2 * BLOCK
    placement.end(placed)  # it failed: nothing was told
    assert not placement.index.known(blocks(10, 11)).any()


def test_a_replica_that_tells_nothing_is_known_by_its_history_beside_one_that_does() -> None:
    placement = fleet()
    placement.index.apply(1, stored(10))
    placement.end(placement.put(0, blocks(10, 11)))
    assert placement.index.known(blocks(10, 11)).tolist() == [3 * CHUNK_TOKENS, BLOCK]


def test_a_dead_replica_gets_nothing_and_all_of_it_is_forgotten() -> None:
    placement = fleet()
    first = finished(placement, text(1, 2, 3))
    placement.index.apply(first, stored(10, 11))
    placement.set_up(first, False)
    placement.index.forget(first)
    assert len(placement.index) == 0
    assert finished(placement, text(1, 2, 3)) != first
    placement.set_up(1 - first, False)
    with pytest.raises(NoReplica):
        placement.choose(text(1))


def test_those_that_were_tried_are_not_tried_again() -> None:
    placement = fleet()
    one = placement.choose(text(1))
    assert placement.choose(text(1), {one.replica}).replica == 1 - one.replica
    with pytest.raises(NoReplica):
        placement.choose(text(1), {0, 1})


def test_the_index_is_bounded() -> None:
    index = FleetIndex(2, max_blocks=100)
    for start in range(0, 10_000, 50):
        index.apply(0, stored(*range(start, start + 50)))
    assert index.num_blocks == 100


@pytest.mark.parametrize("policy", ["round-robin", "least-load"])
def test_other_policies_ignore_prefixes(policy: str) -> None:
    placement = fleet(policy=policy)
    assert [finished(placement, text(1, 2, 3)) for _ in range(4)] == [0, 1, 0, 1]
