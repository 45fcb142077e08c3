"""PublicPrefixes: which texts are public, over restarts. The cache has the list; this is its copy in a file.

Their KV is not in it: what tiers have of them is found again by its tokens, as anything else is.
"""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

from pagoda.errors import LeaseRefused
from pagoda.server.backend import Backend, CacheAdmin, Scope
from pagoda.server.state_file import StateFile, not_saved

logger = logging.getLogger(__name__)


class PublicPrefixes:
    """Publishes at start what was public before, and notes every change.

    Args:
        path: the file, of token ids; None forgets them when the process ends.

    Raises:
        ConfigError: there is a file that holds something else.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file = None if path is None else StateFile(path)
        self._saving = asyncio.Lock()  # one change at a time, so that each is saved, or undone, by itself
        self._model = ""
        self._prefixes: list[list[int]] = []
        if self._file is not None and (loaded := self._file.load()) is not None:
            try:
                self._model, self._prefixes = _read(loaded)
            except (ValueError, KeyError, TypeError) as error:
                raise self._file.fault(error) from None

    async def restore(self, engine: Backend) -> None:
        """Make public again what was, unless it is of another model, whose token ids mean other texts."""
        if self._prefixes and self._model != engine.model_name:
            logger.warning("what was public is for the model %r, and forgotten by the next change", self._model)
            return
        for tokens in self._prefixes:
            try:
                await engine.manage(partial(_publish, tokens))
            except LeaseRefused as error:
                logger.warning("a text is public no more: %s", error)

    async def publish(self, engine: Backend, tokens: list[int], scope: Scope) -> int:
        """Make a prefix public and write that down; returns how many of its tokens are cached for all now.

        Raises:
            LeaseRefused: it cannot be public; nothing changed.
            HttpError: 503, the file cannot be written; what was not public before is not now.
        """
        async with self._saving:
            before = await engine.manage(_public)
            num_cached = await engine.manage(partial(_publish, tokens, scope=scope))
            try:
                await self._save(engine)
            except OSError as error:
                if await engine.manage(_public) != before:
                    await engine.manage(lambda cache: cache.unpublish(tokens))
                raise not_saved(error, "Not published") from None
        return num_cached

    async def unpublish(self, engine: Backend, tokens: list[int]) -> int:
        """End what begins with these tokens, and write that down; returns how many prefixes that were.

        Raises:
            HttpError: 503, the file cannot be written; nobody hits them any more until the server starts again.
        """
        async with self._saving:
            count = await engine.manage(lambda cache: cache.unpublish(tokens))
            try:
                await self._save(engine)
            except OSError as error:
                raise not_saved(error, "Unpublished, but only until the next start") from None
        return count

    async def _save(self, engine: Backend) -> None:
        if self._file is not None:
            text = json.dumps({"model": engine.model_name, "prefixes": await engine.manage(_public)})
            await asyncio.to_thread(self._file.save, text)


def _public(cache: CacheAdmin) -> list[list[int]]:
    return [prefix.tokens for prefix in cache.published()]


def _publish(tokens: list[int], cache: CacheAdmin, scope: Scope = Scope()) -> int:
    return cache.publish(tokens, scope)


def _read(loaded: Any) -> tuple[str, list[list[int]]]:
    """The model and the prefixes of a file; raises ValueError, KeyError or TypeError if it is none."""
    model, prefixes = loaded["model"], [list(each) for each in loaded["prefixes"]]
    if not isinstance(model, str) or not all(type(token) is int for each in prefixes for token in each):
        raise ValueError("of another type")
    return model, prefixes
