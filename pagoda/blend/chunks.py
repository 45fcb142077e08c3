"""Passages in long text that nobody marked: cut where the text itself says, so that a passage is cut alike anywhere.

    text     ... paragraph ¶ paragraph ¶ paragraph ¶ ...
    cuts          at a paragraph's end whose last characters hash to a value that one in `_ONE_IN` has

A cut depends on the characters before it and not on where in the text they are (content-defined chunking, as LBFS and
rsync do): what was put before or after a passage moves no cut within it. A text without paragraphs is cut at lines.
"""

from __future__ import annotations

import re
import zlib

MIN_CHARS = 1024
MAX_CHARS = 16384
_LOOK_BACK = 64
_ONE_IN = 4

_ENDS = (re.compile(r"\n\s*\n"), re.compile(r"\n"))


def cut_passages(text: str) -> list[str]:
    """The text in pieces of 1,024 to 16,384 characters, which joined give it back; a short text is one piece.

    Only the last piece may be shorter.
    """
    pieces, start = [], 0
    while len(text) - start > MIN_CHARS:
        stop = _next_cut(text, start)
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]] if start < len(text) else pieces


def _next_cut(text: str, start: int) -> int:
    last = min(len(text), start + MAX_CHARS)
    for pattern in _ENDS:
        for end in pattern.finditer(text, start + MIN_CHARS, last):
            before = text[max(0, end.start() - _LOOK_BACK) : end.start()]
            if zlib.crc32(before.encode()) % _ONE_IN == 0:
                return end.end()
    return last
