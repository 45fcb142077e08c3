"""OpenAI's explicit prompt caching: `prompt_cache_options`, and `prompt_cache_breakpoint` on parts of messages.

    mode implicit   a lease on the whole prompt, and one up to each of the latest 3 marked parts
    mode explicit   one up to each of the latest 4 marked parts, and none without
    neither field   no lease

A mark's place in the prompt is the longest common token prefix of the whole rendering and that of the messages cut
after the marked part, as with Anthropic's breakpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from pagoda.engine.params import LeaseSpec
from pagoda.errors import InvalidRequest
from pagoda.server.alignment import common_length

FIELD = "prompt_cache_breakpoint"
MAX_BREAKPOINTS = 4
TTL_S = {"30m": 1800.0, "12h": 12 * 3600.0}


class PromptCacheOptions(BaseModel):
    """`prompt_cache_options`. `prewarm` computes the prompt and generates nothing."""

    model_config = ConfigDict(strict=True)

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    prewarm: bool | None = None

    @property
    def ttl_s(self) -> float:
        """How long a prefix stays whose mark says nothing."""
        return TTL_S[self.ttl or "30m"]

    def implicit(self, num_prompt_tokens: int) -> list[LeaseSpec]:
        """The lease on the whole prompt, unless only marks count."""
        return [] if self.mode == "explicit" else [LeaseSpec(num_prompt_tokens, self.ttl_s)]


@dataclass(frozen=True)
class Mark:
    """A marked part: the messages up to and with it, and how long what precedes is to stay."""

    cut: Sequence[Any]
    ttl_s: float | None


def find_marks(messages: Sequence[Any]) -> list[Mark]:
    """The marked parts of messages, as they came in a body.

    Raises:
        InvalidRequest: a mark is malformed; where it is in the messages is not checked.
    """
    return list(_marks(messages))


def _marks(messages: Sequence[Any]) -> Iterator[Mark]:
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        parts: list[Any] = content if isinstance(content, list) else []
        for number, part in enumerate(parts):
            if isinstance(part, dict) and (mark := part.get(FIELD)) is not None:
                where = f"messages[{index}].content[{number}].{FIELD}"
                cut = [*messages[:index], {**message, "content": parts[: number + 1]}]
                yield Mark(cut, _ttl_s(mark, where))


def _ttl_s(mark: Any, where: str) -> float | None:
    if not isinstance(mark, Mapping) or mark.get("mode") != "explicit":
        raise InvalidRequest(f"{where}.mode must be 'explicit'", param=where)
    ttl = mark.get("ttl")
    if ttl is None:
        return None
    if not isinstance(ttl, str) or ttl not in TTL_S:
        raise InvalidRequest(f"{where}.ttl must be one of {', '.join(TTL_S)}", param=where)
    return TTL_S[ttl]


def place_marks(
    marks: Sequence[Mark],
    options: PromptCacheOptions | None,
    prompt: Sequence[int],
    tokenize: Callable[[Sequence[Any]], Sequence[int]],
) -> list[LeaseSpec]:
    """The leases that marks and options ask for.

    Args:
        tokenize: the tokens of messages as they came in a body, without a generation prompt.
    """
    if options is None and not marks:
        return []
    options = options or PromptCacheOptions()
    implicit = options.implicit(len(prompt))
    latest = marks[-(MAX_BREAKPOINTS - len(implicit)) :]
    wishes = [(common_length(prompt, _cut_tokens(mark, tokenize)), mark.ttl_s or options.ttl_s) for mark in latest]
    return [*(LeaseSpec(length, ttl_s) for length, ttl_s in wishes if length), *implicit]


def _cut_tokens(mark: Mark, tokenize: Callable[[Sequence[Any]], Sequence[int]]) -> Sequence[int]:
    try:
        return tokenize(mark.cut)
    except InvalidRequest:
        # Some templates refuse a conversation without a user; what the user would say comes after the cut.
        return tokenize([*mark.cut, {"role": "user", "content": ""}])
