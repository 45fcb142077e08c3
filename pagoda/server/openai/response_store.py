"""ResponseStore: the conversations behind `previous_response_id`. In memory, bounded, each tenant's apart."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
MAX_RESPONSES = 1000
MAX_CHARS = 16 << 20


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages up to and with a response's answer, and the ids of the responses on the way, its own last."""

    messages: tuple[Message, ...] = ()
    ids: tuple[str, ...] = ()


class Shelf:
    """A tenant's conversations by response id: the last 1,000 used, and 16 Mi characters of text. Thread-safe."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[Conversation, int]] = OrderedDict()  # with the characters that each added
        self._dropped: OrderedDict[str, None] = OrderedDict()  # the last ones, which may be in the making
        self._num_chars = 0
        self._lock = threading.Lock()  # looked up while tokenizing, on other threads than the event loop's

    def get(self, response_id: str) -> Conversation | None:
        """The conversation up to a response; None if it is not kept any more."""
        with self._lock:
            if response_id not in self._kept:
                return None
            self._kept.move_to_end(response_id)
            return self._kept[response_id][0]

    def put(self, conversation: Conversation, num_new: int) -> None:
        """Keep a conversation, unless it was dropped. Its last `num_new` messages are in no other that is kept."""
        messages = conversation.messages
        num_chars = sum(len(str(message)) for message in messages[len(messages) - num_new :])
        with self._lock:
            if not self._dropped.keys().isdisjoint(conversation.ids):
                return
            self._kept[conversation.ids[-1]] = conversation, num_chars
            self._num_chars += num_chars
            while len(self._kept) > MAX_RESPONSES or self._num_chars > MAX_CHARS:
                self._drop(next(iter(self._kept)))

    def drop(self, response_id: str) -> bool:
        """Forget the conversations with a response in them, those too that are being made; whether any was kept."""
        with self._lock:
            self._dropped[response_id] = None
            if len(self._dropped) > MAX_RESPONSES:
                self._dropped.popitem(last=False)
            gone = [name for name, (kept, _) in self._kept.items() if response_id in kept.ids]
            for name in gone:
                self._drop(name)
        return bool(gone)

    def _drop(self, response_id: str) -> None:
        self._num_chars -= self._kept.pop(response_id)[1]


class ResponseStore:
    """A shelf for each tenant. The event loop's."""

    def __init__(self) -> None:
        self._shelves: dict[str, Shelf] = {}

    def shelf(self, namespace: str) -> Shelf:
        """A tenant's. A request takes it when it begins: what is put on one that was dropped since is gone with it."""
        return self._shelves.setdefault(namespace, Shelf())

    def drop(self, namespace: str) -> None:
        """Forget a tenant's conversations, also those that are in the making."""
        self._shelves.pop(namespace, None)

    def drop_response(self, response_id: str) -> bool:
        """Forget a response and what goes on from it, whosever it is; returns whether anything was kept."""
        return sum(shelf.drop(response_id) for shelf in self._shelves.values()) > 0
