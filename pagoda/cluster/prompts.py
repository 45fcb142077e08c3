"""What a request's prompt shares with others', read from its body without knowing model or template.

    who asks, model, tools, system, message 1, message 2, ...   as one text, in the order in which templates write them
    [ 256 characters | 256 characters | ... ]                   each named by a hash of itself and all before it

A conversation's next request begins with the same text, whatever its API. Two tenants share nothing, and neither do two
values of `cache_salt`. Where replicas tell block events, the names of real blocks are asked for instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

CHUNK_CHARS = 256
CHUNK_TOKENS = 64  # about; prompts are compared with each other, all by the same measure
MAX_CHUNKS = 1 << 14
_BEFORE = ("model", "cache_salt", "cached_content", "previous_response_id", "tools", "instructions", "system")
_MARKS = ("cache_control", "prompt_cache_breakpoint")
_TURNS = ("messages", "input", "prompt")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of a prompt before it is routed.

    Attributes:
        num_tokens: of all of it; an estimate unless its blocks are known.
        chunks: names of its pieces of `CHUNK_CHARS`.
        blocks: names of its whole blocks, as block events have them; empty if not known.
        block_tokens: tokens of a block.
        session: whatever the client calls the conversation.
    """

    num_tokens: int
    chunks: Sequence[int] = ()
    blocks: Sequence[int] = ()
    block_tokens: int = 1
    session: str | None = None

    def with_blocks(self, num_tokens: int, blocks: Sequence[int], block_tokens: int) -> Prompt:
        """This prompt, of which a replica told the blocks."""
        return replace(self, num_tokens=num_tokens, blocks=blocks, block_tokens=block_tokens)


def read_prompt(fields: Mapping[str, Any], who: bytes, session: str | None = None) -> Prompt:
    """The prompt of a request's JSON object.

    Args:
        who: what tells tenants apart, such as the key they sent.
        session: what a header calls the conversation; else `prompt_cache_key` does.
    """
    text = "\0".join(_texts(fields))
    state = hashlib.blake2b(who, digest_size=8, person=b"pagoda route").digest()
    chunks = []
    for start in range(0, min(len(text), MAX_CHUNKS * CHUNK_CHARS) - CHUNK_CHARS + 1, CHUNK_CHARS):
        piece = text[start : start + CHUNK_CHARS].encode("utf-8", "surrogatepass")
        state = hashlib.blake2b(state + piece, digest_size=8).digest()
        chunks.append(int.from_bytes(state, "big"))
    key = fields.get("prompt_cache_key")
    named = session or (key if isinstance(key, str) else None)
    return Prompt(max(1, len(text) * CHUNK_TOKENS // CHUNK_CHARS), chunks, session=named)


def _texts(fields: Mapping[str, Any]) -> Iterator[str]:
    for name in _BEFORE:
        yield _text(fields.get(name))
    for name in _TURNS:
        # A list by its parts, so that one more turn leaves the text before it as it was.
        if isinstance(value := fields.get(name), list):
            yield from map(_text, value)
        elif value is not None:
            yield _text(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(_unmarked(value), sort_keys=True, ensure_ascii=False)


def _unmarked(value: Any) -> Any:
    """A value without cache breakpoints, which move from turn to turn while the text stays."""
    if isinstance(value, list):
        return [_unmarked(each) for each in value]
    if isinstance(value, dict):
        return {name: _unmarked(each) for name, each in value.items() if name not in _MARKS}
    return value
