from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.cluster.routing import MAX_LEVELS, PrefixAware, PrefixIndex, make_routing
from pagoda.errors import ConfigError

IDLE = np.zeros(3)


def choices(name: str, count: int, load: np.ndarray = IDLE) -> list[int]:
    policy = make_routing(name, load.size)
    return [policy.choose([1], 16, 16, load) for _ in range(count)]


def test_round_robin_takes_each_in_turn_but_those_that_are_out() -> None:
    assert choices("round-robin", 4) == [0, 1, 2, 0]
    assert choices("round-robin", 4, np.array([5.0, np.inf, 0.0])) == [0, 2, 0, 2]


def test_least_load_takes_the_least_loaded_and_of_equals_each_in_turn() -> None:
    assert choices("least-load", 2, np.array([3.0, 1.0, 2.0])) == [1, 1]
    assert choices("least-load", 3, np.array([1.0, 9.0, 1.0])) == [0, 2, 0]


def test_a_prompt_goes_where_its_prefix_is_until_that_costs_more_than_computing_it() -> None:
    policy = make_routing("prefix-aware", 2)
    policy.on_computed(1, [10, 11, 12])
    prompt = [10, 11, 12, 13]
    assert policy.choose(prompt, 16, 64, np.array([0.0, 47.0])) == 1  # 64 against 16 + 47
    assert policy.choose(prompt, 16, 64, np.array([0.0, 49.0])) == 0
    policy.on_evicted(1, [12, 11])
    assert policy.choose(prompt, 16, 64, np.array([0.0, 17.0])) == 0  # 64 against 48 + 17


def test_a_partial_last_block_counts_its_tokens() -> None:
    policy = make_routing("prefix-aware", 2)
    policy.on_computed(1, [10, 11])
    assert policy.choose([10, 11], 16, 20, np.array([0.0, 19.0])) == 1
    assert policy.choose([10, 11], 16, 20, np.array([0.0, 21.0])) == 0


PATHS = st.lists(
    st.tuples(st.integers(0, 6), st.booleans(), st.lists(st.integers(0, 1), min_size=1, max_size=6)), max_size=25
)


@settings(max_examples=60, deadline=None)
@given(PATHS, st.lists(st.integers(0, 1), max_size=8))
def test_depths_are_those_of_a_plain_search(steps: list[tuple[int, bool, list[int]]], query: list[int]) -> None:
    """Against sets of whole prefixes for each replica; a removal takes a prefix and all below it, as eviction does."""
    index = PrefixIndex(7)
    known: list[set[tuple[int, ...]]] = [set() for _ in range(7)]
    ids: dict[tuple[int, ...], int] = {}

    def prefixes(tokens: list[int]) -> list[tuple[int, ...]]:
        found = [tuple(tokens[: n + 1]) for n in range(len(tokens))]
        for prefix in found:
            ids.setdefault(prefix, len(ids))
        return found

    for replica, adds, tokens in steps:
        paths = prefixes(tokens)
        if adds:
            known[replica].update(paths)
            index.add(replica, [ids[path] for path in paths])
        else:
            gone = sorted((p for p in known[replica] if p[: len(tokens)] == paths[-1]), key=len, reverse=True)
            known[replica].difference_update(gone)
            index.remove(replica, [ids[path] for path in gone])
    wanted = prefixes(query)
    expected = [sum(path in have for path in wanted) for have in known]
    assert index.depths([ids[path] for path in wanted]).tolist() == expected


def test_the_deepest_are_told_apart_when_there_are_too_many_depths() -> None:
    index = PrefixIndex(2 * MAX_LEVELS)
    for replica in range(2 * MAX_LEVELS):
        index.add(replica, range(replica + 1))
    depths = index.depths(range(2 * MAX_LEVELS)).tolist()
    assert depths[MAX_LEVELS:] == list(range(MAX_LEVELS + 1, 2 * MAX_LEVELS + 1))
    assert not any(depths[:MAX_LEVELS])


def test_the_index_forgets_the_oldest_ends_first() -> None:
    index = PrefixIndex(2, max_blocks=4)
    index.add(0, [1, 2, 3])
    index.add(1, [1, 7, 8, 9])
    assert len(index) == 4
    assert index.depths([1, 2, 3]).tolist() == [1, 1]  # 3 and 2 went, and 1 is used by both
    assert index.depths([1, 7, 8, 9]).tolist() == [1, 4]
    index.forget(1)
    assert index.depths([1, 7]).tolist() == [1, 0]
    assert len(index) == 1


def test_a_decision_among_a_thousand_replicas_is_quick() -> None:
    """100 us is the aim; the limit leaves room for a busy machine. Prompts have 2,000 blocks and a shared head."""
    policy = PrefixAware(PrefixIndex(1000, max_blocks=400_000))
    head = range(50)
    for replica in range(1000):
        policy.on_computed(replica, [*head, *range(100_000 * replica + 100, 100_000 * replica + 300)])
    prompts = [[*head, *range(100_000 * number + 100, 100_000 * number + 2050)] for number in range(0, 1000, 10)]
    load = np.random.default_rng(0).uniform(0, 1e4, 1000)
    start = time.thread_time()
    for prompt in prompts:
        policy.choose(prompt, 16, 32_000, load)
    assert (time.thread_time() - start) / len(prompts) < 500e-6


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="prefix-aware"):
        make_routing("random", 2)
    with pytest.raises(ConfigError, match="0"):
        PrefixIndex(0)
