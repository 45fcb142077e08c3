"""Passages of a prompt: parts and tools marked `"cache": {"reuse": "anywhere"}`, or cut out of long parts.

    messages ── each passage hidden behind a name ──> chat template ──> text ── cut at the names ──> tokens, spans
    tools    ── each marked one as a stand-in ──────>     ""          └ a stand-in's JSON is first made a name

A template writes a passage's name where it would have written its text. What stands between names, and each passage,
is tokenized by itself, so that a passage has the same tokens wherever it stands. At its two ends the tokens may
therefore differ from those of the text as a whole.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from pagoda.engine.params import BlendSpec, Span, cut_passages
from pagoda.errors import InvalidRequest
from pagoda.server.backend import Tokenizer

FIELD = "cache"
_INDENTS = (None, 4, 2)  # of the JSON that chat templates write

Tool = Mapping[str, Any]


class BlendOptions(BaseModel):
    """`blend`: how passages are reused, and whether long parts that nobody marked are cut into passages."""

    model_config = ConfigDict(strict=True, extra="forbid")
    ratio: float | None = None
    max_deviation: float | None = None
    min_confidence: float | None = None
    auto: bool | None = None


@dataclass(frozen=True)
class BlendDefaults:
    """What the operator chose for requests that do not say; fields as BlendOptions'."""

    ratio: float
    auto: bool = False

    def spec(self, options: BlendOptions | None, passages: Passages, spans: tuple[Span, ...]) -> BlendSpec | None:
        """The engine's form of what a request asks for; None without passages.

        Args:
            passages: those of the rendering that `spans` are in.

        Raises:
            InvalidRequest: an option is out of range.
        """
        is_default = options is None and not passages.has_marks
        options = options or BlendOptions()
        given = {"ratio": self.ratio, **options.model_dump(exclude_none=True, exclude={"auto"})}
        spec = BlendSpec(spans, **given, is_default=is_default)  # checked, passages or not
        return spec if spec.spans else None

    def passages(self, options: BlendOptions | None) -> Passages:
        """The stand-ins for one rendering of a request."""
        auto = None if options is None else options.auto
        return Passages(self.auto if auto is None else auto)


class Passages:
    """Hides passages while a template is rendered, and finds them in what it wrote. For one rendering.

    Args:
        auto: cut long texts of users and tools into passages, where none are marked.

    Attributes:
        has_marks: whether anything was marked.
    """

    def __init__(self, auto: bool = False) -> None:
        self.has_marks = False
        self._auto = auto
        self._texts: list[str] = []
        self._tools: list[tuple[Tool, Tool]] = []  # stand-ins, and what they stand for
        self._nonce = secrets.token_hex(8)  # nobody can write a name into a text

    def hide(self, text: str, *, marked: bool, role: str) -> str:
        """What to render in the place of a text: its name if it is a passage, itself if it is none."""
        if marked:
            self.has_marks = True
            return self._name(text)
        if self._auto and role in ("user", "tool") and len(pieces := cut_passages(text)) > 1:
            return "".join(map(self._name, pieces))
        return text

    def hide_tool(self, tool: Tool) -> dict[str, Any]:
        """What to hand to a template in the place of a tool that is a passage, in OpenAI's form as that is."""
        name = f"\ue000{self._nonce}.tool{len(self._tools)}\ue001"
        parameters = {"type": "object", "properties": {}}
        stand_in = {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}
        self._tools.append((stand_in, tool))
        self.has_marks = True
        return stand_in

    @property
    def has_tools(self) -> bool:
        """Whether a tool is a passage."""
        return bool(self._tools)

    def hide_tools(self, tools: Iterable[Tool], where: str) -> list[Tool]:
        """Tools for a template: those that are marked as stand-ins, the others as they are.

        Raises:
            InvalidRequest: a mark is malformed, or on what is no function.
        """
        shown: list[Tool] = []
        for index, tool in enumerate(tools):
            place = f"{where}[{index}]"
            bare = unmarked(tool)
            if not is_marked(tool, place):
                shown.append(bare)
            elif bare.keys() == {"type", "function"}:
                shown.append(self.hide_tool(bare))
            else:
                message = f"{place} is more or less than a function: it cannot be a passage"
                raise InvalidRequest(message, param=place)
        return shown

    def _name(self, text: str) -> str:
        self._texts.append(text)
        return f"\ue000{self._nonce}.{len(self._texts) - 1}\ue001"

    def encode(
        self, rendered: str, tokenizer: Tokenizer, start: Sequence[int] = ()
    ) -> tuple[list[int], tuple[Span, ...]]:
        """The tokens of a rendering after those of `start`, and where its passages are.

        A template writes the special tokens itself.

        Raises:
            InvalidRequest: the template changed a name, or wrote a tool in pieces.
        """
        rendered = self._name_tools(rendered)
        tokens = [*start]
        spans: list[Span] = []
        for index, piece in enumerate(re.split(f"\ue000{self._nonce}\\.([0-9]+)\ue001", rendered)):
            if self._nonce in piece.casefold():
                raise InvalidRequest("the model's chat template does not take passages as they are", param="messages")
            text = self._texts[int(piece)] if index % 2 else piece
            first = len(tokens)
            tokens += tokenizer.encode(text, add_special_tokens=False) if text else []
            if index % 2:
                spans.append(Span(first, len(tokens)))
        return tokens, tuple(spans)

    def _name_tools(self, rendered: str) -> str:
        """A rendering with a name where the JSON of a stand-in was."""
        for stand_in, tool in self._tools:
            for shown, meant in ((stand_in, tool), (stand_in["function"], tool.get("function"))):
                for indent in _INDENTS:
                    written = _json(shown, indent)
                    if written in rendered:
                        rendered = rendered.replace(written, self._name(_json(meant, indent)))
            if stand_in["function"]["name"] in rendered:
                message = "the model's chat template does not write a tool as one piece of JSON: none can be a passage"
                raise InvalidRequest(message, param="tools")
        return rendered


def _json(value: Any, indent: int | None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # as templates' `tojson`


def unmarked(tool: Tool) -> Tool:
    """A tool as templates take it: its mark, if it has one, is not part of its definition."""
    return {name: value for name, value in tool.items() if name != FIELD}


def is_marked(part: Mapping[str, Any], where: str) -> bool:
    """Whether a part of a message or prompt, a message or a tool is marked as a passage.

    Raises:
        InvalidRequest: the mark is malformed.
    """
    mark = part.get(FIELD)
    if mark is None:
        return False
    if not isinstance(mark, dict) or mark != {"reuse": "anywhere"}:
        place = f"{where}.{FIELD}"
        raise InvalidRequest(f'{place} must be {{"reuse": "anywhere"}}', param=place)
    return True
