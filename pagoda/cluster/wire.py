"""Block events as bytes: vLLM's messages, field names and framing, so that its readers read ours and ours read its.

    ZeroMQ parts    [topic, sequence number in 8 bytes, big-endian, payload]
    payload         msgpack [seconds since 1970, [event, ...], 0]
    event           {"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ..., "token_ids": [...], ...}

What arrives is bytes from the network: a message that is not of this form raises, and nothing else happens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from pagoda.errors import WireError
from pagoda.kv.events import DEVICE, BlockEvent, BlockRemoved, BlocksCleared, BlockStored

MAX_MESSAGE_BYTES = 32 << 20
END = (-1).to_bytes(8, "big", signed=True)  # in place of a sequence number: a replay is over

_Hash = Annotated[int, msgspec.Meta(ge=0)] | bytes
_MASK = (1 << 64) - 1


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[_Hash]
    medium: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Batch)


def encode(events: Sequence[BlockEvent]) -> bytes:
    """The payload that tells of events now."""
    return _encoder.encode(_Batch(time.time(), [_outgoing(event) for event in events], 0))


def decode(payload: bytes) -> Iterator[BlockEvent]:
    """The events in a payload, of whatever media.

    Raises:
        WireError: it is not of the form.
    """
    try:
        batch = _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"block events cannot be read: {error}") from None
    for event in batch.events:
        match event:
            case _Cleared():
                yield BlocksCleared()
            case _Removed():
                yield BlockRemoved(tuple(map(_name, event.block_hashes)), event.medium or DEVICE)
            case _Stored():
                parent = None if event.parent_block_hash is None else _name(event.parent_block_hash)
                names = tuple(map(_name, event.block_hashes))
                yield BlockStored(names, parent, tuple(event.token_ids), event.block_size, event.medium or DEVICE)


def sequence_bytes(number: int) -> bytes:
    """A sequence number's part."""
    return number.to_bytes(8, "big")


def read_sequence(part: bytes) -> int:
    """The number in a part.

    Raises:
        WireError: it has not 8 bytes.
    """
    if len(part) != 8:
        raise WireError(f"a sequence number has 8 bytes, got {len(part)}")
    return int.from_bytes(part, "big")


def _outgoing(event: BlockEvent) -> _Stored | _Removed | _Cleared:
    match event:
        case BlockStored():
            ids, medium = list(event.token_ids), event.medium
            return _Stored(list(event.names), event.parent, ids, event.block_size, medium=medium)
        case BlockRemoved():
            return _Removed(list(event.names), event.medium)
        case BlocksCleared():
            return _Cleared()


def _name(given: int | bytes) -> int:
    """A block's name; of a longer hash, its first 64 bits."""
    return int.from_bytes(given[:8], "big") if isinstance(given, bytes) else given & _MASK
