from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.cluster.wire import decode, encode, read_sequence, sequence_bytes
from pagoda.errors import WireError
from pagoda.kv.events import BlockEvent, BlockRemoved, BlocksCleared, BlockStored

NAMES = st.lists(st.integers(0, (1 << 64) - 1), max_size=5).map(tuple)
MEDIA = st.sampled_from(["GPU", "CPU", "DISK"])
EVENTS = st.one_of(
    st.builds(
        BlockStored,
        names=NAMES,
        parent=st.none() | st.integers(0, (1 << 64) - 1),
        token_ids=st.lists(st.integers(0, 1 << 31), max_size=5).map(tuple),
        block_size=st.integers(1, 512),
        medium=MEDIA,
    ),
    st.builds(BlockRemoved, names=NAMES, medium=MEDIA),
    st.just(BlocksCleared()),
)


@given(st.lists(EVENTS, max_size=5))
def test_events_come_out_as_they_went_in(events: list[BlockEvent]) -> None:
    assert list(decode(encode(events))) == events


def test_the_form_is_vllms() -> None:
    """A batch is an array, an event a map: what vLLM's readers expect."""
    told = [BlockStored((1, 2), 7, (5, 6), 1), BlockRemoved((3,)), BlocksCleared()]
    ts, events, rank = msgspec.msgpack.decode(encode(told))
    assert isinstance(ts, float)
    assert rank == 0
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [1, 2],
            "parent_block_hash": 7,
            "token_ids": [5, 6],
            "block_size": 1,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        },
        {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"},
        {"type": "AllBlocksCleared"},
    ]


def test_others_may_say_more_or_less_or_hash_longer() -> None:
    stored = {
        "type": "BlockStored",
        "block_hashes": [b"\1" * 32],
        "parent_block_hash": None,
        "token_ids": [1],
        "block_size": 1,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["salt"]],
        "group_idx": 0,
    }
    elsewhere = {"type": "BlockRemoved", "block_hashes": [4], "medium": "CPU"}
    unsaid = {"type": "BlockRemoved", "block_hashes": [5]}
    payload = msgspec.msgpack.encode([1.0, [stored, elsewhere, unsaid]])
    assert list(decode(payload)) == [
        BlockStored((0x0101010101010101,), None, (1,), 1),
        BlockRemoved((4,), "CPU"),
        BlockRemoved((5,), "GPU"),
    ]


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [1.0],
        ["now", []],
        [1.0, [{"type": "BlockStored"}]],
        [1.0, [{"type": "Nonsense"}]],
        [1.0, [{"type": "BlockRemoved", "block_hashes": [-1]}]],
        [1.0, [{"type": "BlockRemoved", "block_hashes": ["x"]}]],
        [1.0, [["BlockRemoved", [1]]]],
    ],
)
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(WireError):
        list(decode(msgspec.msgpack.encode(value)))


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(WireError):
        list(decode(data))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(WireError):
        list(decode(b"\x91" * 100_000 + b"\x90"))


def test_a_sequence_number_has_eight_bytes() -> None:
    assert read_sequence(sequence_bytes(1 << 40)) == 1 << 40
    with pytest.raises(WireError):
        read_sequence(b"1")
