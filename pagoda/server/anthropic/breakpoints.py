"""cache_control: which prefixes of a request are to be kept, and what was kept of them.

A breakpoint stands at the end of a block. Its place in the prompt is the longest common token prefix of the whole
request's rendering and that of the request cut there: whatever the chat template does, that is what another request
with the same blocks up to there will share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pagoda.engine.outputs import LeaseOutcome, Usage
from pagoda.engine.params import LeaseSpec
from pagoda.errors import InvalidRequest
from pagoda.server.alignment import common_length
from pagoda.server.anthropic.conversation import Conversation
from pagoda.server.ledger import written

MAX_BREAKPOINTS = 4
TTL_S = {"5m": 300.0, "1h": 3600.0}


@dataclass(frozen=True)
class Breakpoint:
    """`cache_control` at the end of `cut`; `where` is the field it stood in."""

    where: str
    cut: Conversation
    ttl: str


def find_breakpoints(conversation: Conversation, automatic: Any) -> list[Breakpoint]:
    """The breakpoints of a request in order; `automatic` is its top-level cache_control: one after the last block.

    Raises:
        InvalidRequest: one is malformed, there are more than four, or a longer ttl follows a shorter one.
    """
    found = list(_marked(conversation))
    if automatic is not None:
        last = conversation.after_block(len(conversation.turns) - 1, len(conversation.turns[-1].blocks) - 1)
        found.append(Breakpoint("cache_control", last, _ttl(automatic, "cache_control")))
    if len(found) > MAX_BREAKPOINTS:
        raise InvalidRequest(f"at most {MAX_BREAKPOINTS} blocks may have cache_control; {len(found)} do")
    seen_short = False
    for point in found:
        if point.ttl == "5m":
            seen_short = True
        elif seen_short:
            raise InvalidRequest(f"{point.where}.cache_control.ttl: a 1h block must not come after a 5m block")
    return found


def _marked(conversation: Conversation) -> Iterator[Breakpoint]:
    for index, tool in enumerate(conversation.tools):
        if tool.get("cache_control") is not None:
            where = f"tools.{index}"
            yield Breakpoint(where, conversation.after_tool(index), _ttl(tool["cache_control"], where))
    for index, block in enumerate(conversation.system):
        if block.get("cache_control") is not None:
            where = f"system.{index}"
            yield Breakpoint(where, conversation.after_system(index), _ttl(block["cache_control"], where))
    for number, turn in enumerate(conversation.turns):
        for index, block in enumerate(turn.blocks):
            if block.get("cache_control") is not None:
                where = f"messages.{number}.content.{index}"
                yield Breakpoint(where, conversation.after_block(number, index), _ttl(block["cache_control"], where))


def _ttl(control: Any, where: str) -> str:
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise InvalidRequest(f"{where}.cache_control.type: must be 'ephemeral'", param=where)
    ttl = control.get("ttl")
    if ttl is None:
        return "5m"
    if not isinstance(ttl, str) or ttl not in TTL_S:
        raise InvalidRequest(f"{where}.cache_control.ttl: must be one of {', '.join(TTL_S)}", param=where)
    return ttl


def place_leases(
    points: Sequence[Breakpoint], prompt: Sequence[int], encode: Callable[[Conversation], Sequence[int]]
) -> tuple[LeaseSpec, ...]:
    """What to ask of the engine; a breakpoint before which nothing is common asks for nothing.

    Args:
        encode: the tokens of a conversation, without a generation prompt.
    """
    lengths = [(common_length(prompt, encode(point.cut)), TTL_S[point.ttl]) for point in points]
    return tuple(LeaseSpec(length, ttl_s) for length, ttl_s in lengths if length)


def input_usage(usage: Usage, outcomes: Sequence[LeaseOutcome]) -> dict[str, Any]:
    """Anthropic's usage of a prompt: read (hit), created (newly under a lease) and other tokens, which add up to it."""
    by_ttl = written(usage, outcomes)
    total = sum(by_ttl.values())
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_hit_tokens - total,
        "cache_creation_input_tokens": total,
        "cache_read_input_tokens": usage.num_hit_tokens,
        "cache_creation": {f"ephemeral_{name}_input_tokens": by_ttl.get(seconds, 0) for name, seconds in TTL_S.items()},
    }
