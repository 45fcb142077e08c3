"""ResponseStore: the conversations behind `previous_response_id`. In memory, bounded, each tenant's apart."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
MAX_RESPONSES = 1000
MAX_CHARS = 16 << 20


@dataclass
class _Shelf:
    """A tenant's conversations, the longest unused first, and how many characters each added to its predecessor."""

    kept: OrderedDict[str, tuple[tuple[Message, ...], int]] = field(default_factory=OrderedDict)
    num_chars: int = 0


class ResponseStore:
    """Conversations by response id. Of each tenant the last 1,000 used are kept, and 16 Mi characters of text."""

    def __init__(self) -> None:
        self._shelves: dict[str, _Shelf] = {}
        self._lock = threading.Lock()  # looked up while tokenizing, on other threads than the event loop's

    def get(self, namespace: str, response_id: str) -> tuple[Message, ...] | None:
        """The messages up to and with a response's answer; None if it is not this tenant's or not kept any more."""
        with self._lock:
            shelf = self._shelves.get(namespace)
            if shelf is None or response_id not in shelf.kept:
                return None
            shelf.kept.move_to_end(response_id)
            return shelf.kept[response_id][0]

    def drop(self, namespace: str) -> None:
        """Forget a tenant's conversations."""
        with self._lock:
            self._shelves.pop(namespace, None)

    def put(self, namespace: str, response_id: str, messages: tuple[Message, ...], num_new: int) -> None:
        """Keep a conversation whose last `num_new` messages are not in another one that is kept."""
        num_chars = sum(len(str(message)) for message in messages[len(messages) - num_new :])
        with self._lock:
            shelf = self._shelves.setdefault(namespace, _Shelf())
            shelf.kept[response_id] = messages, num_chars
            shelf.num_chars += num_chars
            while len(shelf.kept) > MAX_RESPONSES or shelf.num_chars > MAX_CHARS:
                _, (_, freed) = shelf.kept.popitem(last=False)
                shelf.num_chars -= freed
