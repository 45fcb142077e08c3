"""Hugging Face continuous batching: the manager behind `generate_batch`, which takes requests while others run."""

from __future__ import annotations

import queue
from collections.abc import Iterable
from typing import Any

import torch
import transformers

from benchmarks.peers.adapters.serve import Event, main

PAGE_SIZE = 256  # the default
MAX_BATCH_TOKENS = 2048  # it would take the size from a GPU's memory


class GenerateBatchPeer:
    """Requests go into the manager's queue, tokens come out of its other one, from its own thread."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self._model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16)
        self._generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1)
        self._batching = transformers.ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=settings["kv_tokens"] // PAGE_SIZE,
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_requests_per_batch=settings["max_seqs"],
            use_cuda_graph=False,
        )
        self._manager: Any = None
        self._num_tokens: dict[int, int] = {}

    def add(self, key: int, tokens: list[int], max_tokens: int) -> None:
        """Queue a request."""
        self._num_tokens[key] = 0
        self._manager.add_request(
            tokens, request_id=str(key), max_new_tokens=max_tokens, streaming=True, eos_token_id=-1
        )

    def step(self) -> Iterable[Event]:
        """Wait for news, not longer than until the next request may be due."""
        events = []
        output = self._manager.get_result(timeout=0.01)
        while output is not None:
            if output.error:
                raise RuntimeError(output.error)
            key = int(output.request_id)
            events.append(Event(key, output.generated_tokens[self._num_tokens[key] :]))
            self._num_tokens[key] = len(output.generated_tokens)
            try:
                output = self._manager.output_router.output_queue.get_nowait()
            except queue.Empty:
                output = None
        if not events and not self._manager.is_running():
            raise RuntimeError("continuous batching stopped; see the log")
        return events

    def reset(self) -> None:
        """A new manager with an empty cache: an old one cannot be told to forget."""
        if self._manager is not None:
            self._manager.stop(block=True)
        self._manager = self._model.init_continuous_batching(
            generation_config=self._generation, continuous_batching_config=self._batching
        )
        self._manager.start()

    def info(self) -> dict[str, Any]:
        """Versions."""
        return {"version": transformers.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    main(GenerateBatchPeer)
