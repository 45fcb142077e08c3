"""ToolCheck: notices tools that a model's chat template leaves out, so that the model never learns of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pagoda.errors import InvalidRequest
from pagoda.server.passages import Passages

logger = logging.getLogger(__name__)


class ToolCheck:
    """Compares renderings with and without tools. Called from several threads at once."""

    def __init__(self) -> None:
        self._warning = threading.Lock()  # taken by whoever warns, and never given back: once is enough

    def check(self, rendered: str, render_without: Callable[[], str], passages: Passages) -> None:
        """Warn, once in a server's life, that a template wrote nothing of a request's tools.

        Clients send tools by habit, so that alone refuses nobody. A marked tool is meant.

        Args:
            rendered: a whole prompt, rendered with tools.
            render_without: renders the same without.
            passages: what was marked in it.

        Raises:
            InvalidRequest: one of the tools is marked as a passage.
        """
        try:
            if rendered != render_without():
                return
        except InvalidRequest:  # without tools it refuses these messages: it does look at them
            return
        if passages.has_tools:
            raise InvalidRequest("the model's chat template writes no tools: none can be a passage", param="tools")
        if self._warning.acquire(blocking=False):
            logger.warning("the model's chat template writes no tools: those in requests change nothing")
