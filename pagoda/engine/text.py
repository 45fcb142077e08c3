"""OutputText: a sample's text as it grows, and where a stop string ends it."""

from __future__ import annotations

from pagoda.model.tokenizer import TextStream


class OutputText:
    """Turns tokens into text that is safe to send: whole characters, and nothing that may begin a stop string.

    Args:
        stream: decodes tokens.
        stop: strings that end the sample; they are not part of its text.
    """

    def __init__(self, stream: TextStream, stop: tuple[str, ...]) -> None:
        self._stream = stream
        self._stop = stop
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """The text that can be sent after this token; `stopped_by` is set when a stop string is complete."""
        return self._release(self._stream.push(token_id))

    def flush(self) -> str:
        """What was held back, when no more tokens will come."""
        text = self._held + self._stream.flush()
        self._held = ""
        return "" if self.stopped_by else text

    def _release(self, new: str) -> str:
        if not self._stop:
            return new
        text = self._held + new
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
