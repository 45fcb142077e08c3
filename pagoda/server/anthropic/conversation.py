"""Conversation: an Anthropic request as tools, system blocks and turns, and its text in the model's chat template.

tools ── system ── user ── assistant ── user        the order in which breakpoints see a request
   └ after_tool      └ after_system       └ after_block: the request cut there, to be rendered as well
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pagoda.errors import InvalidRequest
from pagoda.server.backend import Tokenizer
from pagoda.server.passages import FIELD, Passages, is_marked

Block = Mapping[str, Any]
_UNREAD = ("thinking", "redacted_thinking")  # of earlier answers; Anthropic drops them too


@dataclass(frozen=True)
class Turn:
    """Consecutive messages of one role."""

    role: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Conversation:
    """Everything of a request that becomes its prompt. Blocks are checked.

    `start` and `start_tools` stand before all else, as chat templates take them: the content of a named cache.
    """

    tools: tuple[Block, ...]
    system: tuple[Block, ...]
    turns: tuple[Turn, ...]
    start: tuple[Mapping[str, Any], ...] = ()
    start_tools: tuple[Mapping[str, Any], ...] = ()

    def hiding(self, passages: Passages) -> Conversation:
        """The same with the names of passages in their places."""

        def hide(block: Block, role: str) -> Block:
            if "text" not in block:
                return block
            shown = passages.hide(block["text"], marked=block.get(FIELD) is not None, role=role)
            return {**block, "text": shown}

        def hide_tool(tool: Block) -> Block:
            if tool.get(FIELD) is None:
                return tool
            shown = passages.hide_tool(_function(tool))["function"]
            return {"name": shown["name"], "description": shown["description"], "input_schema": shown["parameters"]}

        return replace(
            self,
            tools=tuple(map(hide_tool, self.tools)),
            system=tuple(hide(block, "system") for block in self.system),
            turns=tuple(Turn(turn.role, tuple(hide(block, turn.role) for block in turn.blocks)) for turn in self.turns),
        )

    def after_tool(self, index: int) -> Conversation:
        """What precedes the end of a tool."""
        return replace(self, tools=self.tools[: index + 1], system=(), turns=())

    def after_system(self, index: int) -> Conversation:
        """What precedes the end of a system block."""
        return replace(self, system=self.system[: index + 1], turns=())

    def after_block(self, turn: int, index: int) -> Conversation:
        """What precedes the end of a turn's block."""
        last = Turn(self.turns[turn].role, self.turns[turn].blocks[: index + 1])
        return replace(self, turns=(*self.turns[:turn], last))

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """All of it but the tools, as chat templates take it."""
        messages = list(self.start)
        if self.system:
            messages.append({"role": "system", "content": _joined(self.system)})
        for turn in self.turns:
            messages += _assistant(turn.blocks) if turn.role == "assistant" else _user(turn.blocks)
        return messages

    @property
    def functions(self) -> list[Mapping[str, Any]] | None:
        """The tools, as chat templates take them; None if there are none."""
        return [*self.start_tools, *(_function(tool) for tool in self.tools)] or None

    def render(self, tokenizer: Tokenizer, *, add_generation_prompt: bool) -> str:
        """The text of the prompt.

        Raises:
            InvalidRequest: the model's template refuses it.
        """
        messages, tools = self.messages, self.functions
        try:
            return tokenizer.render_chat(messages, tools, add_generation_prompt)
        except InvalidRequest:
            if self.turns:
                raise
            # Some templates refuse a conversation without a user; what the user would say comes after the cut.
            return tokenizer.render_chat([*messages, {"role": "user", "content": ""}], tools, add_generation_prompt)


def _joined(blocks: Sequence[Block]) -> str:
    return "\n".join(block["text"] for block in blocks)


def _user(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """A user's turn: tool results are messages of their own."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] == "tool_result":
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": block["text"]})
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += "\n" + block["text"]
        else:
            messages.append({"role": "user", "content": block["text"]})
    return messages


def _assistant(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = _joined([block for block in blocks if block["type"] == "text"])
    if calls := [_call(block) for block in blocks if block["type"] == "tool_use"]:
        message["tool_calls"] = calls
    return [message]


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
    return {"id": block["id"], "type": "function", "function": function}


def _function(tool: Block) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def parse_conversation(tools: Sequence[Any], system: Any, messages: Sequence[Any]) -> Conversation:
    """The conversation in a request's fields.

    Raises:
        InvalidRequest: something is malformed, or other than text; the message says where.
    """
    if not messages:
        raise InvalidRequest("messages: at least one message is required", param="messages")
    turns: list[Turn] = []
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant"):
            raise InvalidRequest(f"{where}.role: must be 'user' or 'assistant'", param=where)
        blocks = _blocks(message.get("content"), f"{where}.content", role)
        if is_marked(message, where):
            blocks = tuple({**block, FIELD: message[FIELD]} for block in blocks)
        if turns and turns[-1].role == role:
            turns[-1] = Turn(role, (*turns[-1].blocks, *blocks))
        else:
            turns.append(Turn(role, blocks))
    if turns[0].role != "user":
        raise InvalidRequest("messages.0.role: the first message must be the user's", param="messages")
    if turns[-1].role != "user":
        raise InvalidRequest("messages: continuing an assistant's message is not supported", param="messages")
    return Conversation(
        tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(tools)),
        () if system in (None, "") else _blocks(system, "system", "system"),
        tuple(turns),
    )


def _tool(tool: Any, where: str) -> Block:
    well_formed = (
        isinstance(tool, dict)
        and isinstance(tool.get("name"), str)
        and isinstance(tool.get("input_schema"), dict)
        and isinstance(tool.get("description", ""), str)
    )
    if not well_formed:
        raise InvalidRequest(f"{where}: a tool needs a name and an input_schema; others are not supported", param=where)
    is_marked(tool, where)  # or refuse
    return dict(tool)


def _document(block: Block, where: str) -> str:
    """The text of a document: its title and context, where it has them, and what it says."""
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "text":
        raise InvalidRequest(f"{where}.source: only documents of plain text are supported", param=where)
    parts = [block.get("title") or "", block.get("context") or "", source.get("data")]
    if not all(isinstance(part, str) for part in parts) or not parts[-1]:
        raise InvalidRequest(f"{where}: a document needs a source.data that is a non-empty string", param=where)
    return "\n".join(part for part in parts if part)


def _blocks(content: Any, where: str, role: str) -> tuple[Block, ...]:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{where}: must be a string or a non-empty list of blocks", param=where)
    blocks = (_block(block, f"{where}.{index}", role) for index, block in enumerate(content))
    return tuple(block for block in blocks if block["type"] not in _UNREAD)


def _block(block: Any, where: str, role: str) -> Block:
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(block, dict):
        is_marked(block, where)  # or refuse
    if kind == "document" and role in ("user", "tool"):
        return {**block, "type": "text", "text": _document(block, where)}
    if kind == "text":
        if not isinstance(block.get("text"), str) or not block["text"]:
            raise InvalidRequest(f"{where}.text: text blocks must hold a non-empty string", param=where)
        return dict(block)
    if kind == "tool_result" and role == "user":
        if not isinstance(block.get("tool_use_id"), str):
            raise InvalidRequest(f"{where}.tool_use_id: must be a string", param=where)
        content = block.get("content") or ""
        nested = [] if content == "" else _blocks(content, f"{where}.content", "tool")
        return {**block, "text": _joined(nested)}
    if kind == "tool_use" and role == "assistant":
        if not (isinstance(block.get("id"), str) and isinstance(block.get("name"), str) and "input" in block):
            raise InvalidRequest(f"{where}: a tool_use block needs an id, a name and an input", param=where)
        return dict(block)
    if kind in _UNREAD and role == "assistant":
        return dict(block)
    shown = f"{kind[:100]!r} blocks are not supported here" if isinstance(kind, str) else "a block needs a type"
    raise InvalidRequest(f"{where}: {shown}; this model takes text only", param=where)
