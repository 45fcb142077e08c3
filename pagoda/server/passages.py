"""Passages of a conversation: parts marked `"cache": {"reuse": "anywhere"}`, or cut out of long ones.

    messages ── each passage hidden behind a name ──> chat template ──> text ── cut at the names ──> tokens, spans

A template writes a passage's name where it would have written its text. What stands between names, and each passage,
is tokenized by itself, so that a passage has the same tokens wherever it stands. At its two ends the tokens may
therefore differ from those of the text as a whole.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from pagoda.engine.params import BlendSpec, Span, cut_passages
from pagoda.errors import InvalidRequest
from pagoda.server.backend import Tokenizer

FIELD = "cache"


class BlendOptions(BaseModel):
    """`blend`: how passages are reused, and whether long parts that nobody marked are cut into passages."""

    model_config = ConfigDict(strict=True, extra="forbid")
    ratio: float | None = None
    max_deviation: float | None = None
    auto: bool | None = None


@dataclass(frozen=True)
class BlendDefaults:
    """What the operator chose for requests that do not say; fields as BlendOptions'."""

    ratio: float
    auto: bool = False

    def spec(self, options: BlendOptions | None, spans: tuple[Span, ...]) -> BlendSpec | None:
        """The engine's form of what a request asks for; None without passages. Raises InvalidRequest."""
        options = options or BlendOptions()
        given: dict[str, Any] = {"ratio": self.ratio if options.ratio is None else options.ratio}
        if options.max_deviation is not None:
            given["max_deviation"] = options.max_deviation
        spec = BlendSpec(spans, **given)  # checked, passages or not
        return spec if spec.spans else None

    def passages(self, options: BlendOptions | None) -> Passages:
        """The stand-ins for one rendering of a request."""
        auto = None if options is None else options.auto
        return Passages(self.auto if auto is None else auto)


class Passages:
    """Hides passages while a template is rendered, and finds them in what it wrote. For one rendering.

    Args:
        auto: cut long texts of users and tools into passages, where none are marked.
    """

    def __init__(self, auto: bool = False) -> None:
        self._auto = auto
        self._texts: list[str] = []
        self._nonce = secrets.token_hex(8)  # nobody can write a name into a text

    def hide(self, text: str, *, marked: bool, role: str) -> str:
        """What to render in the place of a text: its name if it is a passage, itself if it is none."""
        if marked:
            return self._name(text)
        if self._auto and role in ("user", "tool") and len(pieces := cut_passages(text)) > 1:
            return "".join(map(self._name, pieces))
        return text

    def _name(self, text: str) -> str:
        self._texts.append(text)
        return f"\ue000{self._nonce}.{len(self._texts) - 1}\ue001"

    def encode(self, rendered: str, tokenizer: Tokenizer) -> tuple[list[int], tuple[Span, ...]]:
        """The tokens of a rendering, and where its passages are. The template writes the special tokens itself.

        Raises:
            InvalidRequest: the template changed a name.
        """
        if not self._texts:
            return tokenizer.encode(rendered, add_special_tokens=False), ()
        tokens: list[int] = []
        spans: list[Span] = []
        for index, piece in enumerate(re.split(f"\ue000{self._nonce}\\.([0-9]+)\ue001", rendered)):
            if self._nonce in piece.casefold():
                raise InvalidRequest("the model's chat template does not take passages as they are", param="messages")
            text = self._texts[int(piece)] if index % 2 else piece
            start = len(tokens)
            tokens += tokenizer.encode(text, add_special_tokens=False) if text else []
            if index % 2:
                spans.append(Span(start, len(tokens)))
        return tokens, tuple(spans)


def is_marked(part: Mapping[str, Any], where: str) -> bool:
    """Whether a part of a message, or a message, is marked as a passage.

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
