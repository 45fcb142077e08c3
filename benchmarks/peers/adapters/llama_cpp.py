"""llama.cpp through its C interface, batched as its server does it.

`llama-cpp-python` ships the library but not the server, and its own class runs one request at a time. So the server's
loop is here: slots with their cached tokens, each step one `llama_decode` of a token for every running slot and as much
of the waiting prompts as a batch holds. A prompt takes the longest prefix that any slot has; copies of it share the
cells of one unified cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp as llama  # type: ignore[import-not-found]
import numpy as np

from benchmarks.peers.adapters.serve import Event, main

BATCH = 2048  # the server's default


@dataclass(slots=True)
class Slot:
    """A sequence of the cache: its tokens, of which the first `num_computed` are in it, and the request that runs."""

    seq_id: int
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    key: int | None = None
    end: int = 0
    last_use: int = 0


class LlamaPeer:
    """A context with `max_seqs` sequences over one cache."""

    def __init__(self, settings: dict[str, Any]) -> None:
        llama.llama_backend_init()
        model_params = llama.llama_model_default_params()
        for name, value in settings["options"].items():
            setattr(model_params, name, value)
        self._model = llama.llama_model_load_from_file(settings["model"].encode(), model_params)
        params = llama.llama_context_default_params()
        params.n_ctx = settings["kv_tokens"]
        params.n_batch = BATCH
        params.n_seq_max = settings["max_seqs"]
        params.n_threads = params.n_threads_batch = settings["threads"]
        params.kv_unified = True
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp could not make a context")
        self._memory = llama.llama_get_memory(self._context)
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(BATCH, 0, 1)
        self._slots = [Slot(i) for i in range(settings["max_seqs"])]
        self._waiting: list[tuple[int, list[int], int]] = []
        self._ticks = itertools.count()

    def add(self, key: int, tokens: list[int], max_tokens: int) -> None:
        """Queue a request."""
        self._waiting.append((key, tokens, max_tokens))

    def step(self) -> Iterable[Event]:
        """One batch."""
        self._admit()
        running = [slot for slot in self._slots if slot.key is not None]
        # Decodes first, then prompts in the order of their arrival.
        running.sort(key=lambda slot: (len(slot.tokens) - slot.num_computed > 1, slot.last_use))
        rows: list[tuple[Slot, int]] = []
        self._batch.n_tokens = 0
        for slot in running:
            stop = min(len(slot.tokens), slot.num_computed + BATCH - self._batch.n_tokens)
            for position in range(slot.num_computed, stop):
                self._put(slot, position)
            if slot.num_computed < stop == len(slot.tokens):
                rows.append((slot, self._batch.n_tokens - 1))
            slot.num_computed = stop
        self._decode()
        return [self._sample(slot, row) for slot, row in rows]

    def _admit(self) -> None:
        free = [slot for slot in self._slots if slot.key is None]
        while self._waiting and free:
            key, tokens, max_tokens = self._waiting.pop(0)
            prompt = np.array(tokens)
            hits = {slot.seq_id: _common_prefix(prompt, slot.tokens[: slot.num_computed]) for slot in self._slots}
            source = max(self._slots, key=lambda slot: hits[slot.seq_id])
            hit = min(hits[source.seq_id], len(tokens) - 1)
            # Whoever has the prefix keeps it, if another slot is free: it may be wanted again.
            target = min(free, key=lambda slot: (slot is source and len(free) > 1, slot.last_use))
            free.remove(target)
            if target is not source:
                llama.llama_memory_seq_rm(self._memory, target.seq_id, -1, -1)
                llama.llama_memory_seq_cp(self._memory, source.seq_id, target.seq_id, 0, hit)
            else:
                llama.llama_memory_seq_rm(self._memory, target.seq_id, hit, -1)
            target.tokens, target.num_computed = list(tokens), hit
            target.key, target.end, target.last_use = key, len(tokens) + max_tokens, next(self._ticks)

    def _put(self, slot: Slot, position: int) -> None:
        batch, at = self._batch, self._batch.n_tokens
        batch.token[at] = slot.tokens[position]
        batch.pos[at] = position
        batch.n_seq_id[at] = 1
        batch.seq_id[at][0] = slot.seq_id
        batch.logits[at] = position == len(slot.tokens) - 1
        batch.n_tokens += 1

    def _decode(self) -> None:
        """Run the batch; while the cache is full, idle slots lose theirs, the longest unused first."""
        while status := llama.llama_decode(self._context, self._batch):
            idle = [slot for slot in self._slots if slot.key is None and slot.tokens]
            if status != 1 or not idle:
                raise RuntimeError(f"llama_decode returned {status}")
            oldest = min(idle, key=lambda slot: slot.last_use)
            llama.llama_memory_seq_rm(self._memory, oldest.seq_id, -1, -1)
            oldest.tokens, oldest.num_computed = [], 0

    def _sample(self, slot: Slot, row: int) -> Event:
        logits = llama.llama_get_logits_ith(self._context, row)
        token = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
        assert slot.key is not None
        event = Event(slot.key, [token])
        slot.tokens.append(token)
        if len(slot.tokens) == slot.end:
            slot.key = None
        return event

    def reset(self) -> None:
        """Empty the cache."""
        llama.llama_memory_clear(self._memory, False)
        for slot in self._slots:
            slot.tokens, slot.num_computed = [], 0

    def info(self) -> dict[str, Any]:
        """Version, and what the CPU code was built for."""
        return {"version": llama.__version__, "system": llama.llama_print_system_info().decode()}


def _common_prefix(prompt: np.ndarray, tokens: Sequence[int]) -> int:
    length = min(len(prompt), len(tokens))
    differing = np.flatnonzero(prompt[:length] != np.array(tokens[:length], dtype=prompt.dtype))
    return int(differing[0]) if len(differing) else length


if __name__ == "__main__":
    main(LlamaPeer)
