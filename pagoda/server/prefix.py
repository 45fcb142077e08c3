"""What callers name a prefix by: a raw prompt, or messages as the model's chat template renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from pagoda.errors import InvalidRequest
from pagoda.server.alignment import stable_tokens
from pagoda.server.backend import Tokenizer
from pagoda.server.openai.chat import normalize_messages
from pagoda.server.openai.schema import MAX_SALT_CHARS
from pagoda.server.passages import unmarked


class Fields(BaseModel):
    """A body whose fields are all known: what is not among them is refused, for these routes are Pagoda's own."""

    model_config = ConfigDict(strict=True, extra="forbid")


class PrefixFields(Fields):
    """The fields that say which prefix."""

    prompt: str | None = None
    system: str | None = None
    messages: list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] = ""

    @property
    def names_all(self) -> bool:
        """Whether no prefix is given, and so every one is meant."""
        return self.prompt is None and not self.has_chat

    @property
    def has_chat(self) -> bool:
        """Whether the prefix is given as messages."""
        return (self.messages, self.system, self.tools) != (None, None, None)


@dataclass(frozen=True)
class Prefix:
    """What a prefix is made of: a prompt, or messages and tools; and its tokens, whatever follows."""

    prompt: str | None
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    tokens: list[int]


def read_prefix(fields: PrefixFields, tokenizer: Tokenizer) -> Prefix:
    """The prefix that fields name. Takes time in proportion to them: call it from a thread.

    Raises:
        InvalidRequest: neither a prompt nor messages are given, or both, or what the chat template refuses.
    """
    if (fields.prompt is None) != fields.has_chat:
        raise InvalidRequest("give a prompt, or messages, system and tools", param="prompt")
    system = [{"role": "system", "content": fields.system}] if fields.system else []
    given = [*system, *(fields.messages or ())]
    messages = tuple(normalize_messages(given)) if given else ()
    tools = tuple(map(unmarked, fields.tools or ()))  # a prefix is exact: marks say nothing of it
    return Prefix(fields.prompt, messages, tools, tokens_of(fields.prompt, messages, tools, tokenizer))


def tokens_of(
    prompt: str | None,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
) -> list[int]:
    """The tokens of a raw prompt, or those that all conversations share that begin with these messages.

    Raises:
        InvalidRequest: the model's template refuses them.
    """
    return tokenizer.encode(prompt) if prompt is not None else stable_tokens(messages, tools or None, tokenizer)
