"""Pagoda, stepped in this process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.peers.adapters.serve import Event, main
from pagoda import Engine, SamplingParams, __version__


class PagodaPeer:
    """The engine's synchronous core."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._engine = Engine(
            settings["model"],
            dtype="bfloat16",
            kv_memory=settings["kv_bytes"],
            max_model_len=settings["context"],
            max_num_seqs=settings["max_seqs"],
            progress=False,
            **settings["options"],
        )

    def add(self, key: int, tokens: list[int], max_tokens: int) -> None:
        """Queue a request."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._engine.core.add(str(key), tokens, params)

    def step(self) -> Iterable[Event]:
        """One step of the engine."""
        return [
            Event(int(output.request_id), delta.token_ids)
            for output in self._engine.core.step()
            for delta in output.deltas
        ]

    def reset(self) -> None:
        """Empty the KV cache."""
        self._engine.core.cache.clear()

    def info(self) -> dict[str, Any]:
        """Version and pool size."""
        return {"version": __version__, "kv_tokens": self._engine.cache_info().tokens_total}


if __name__ == "__main__":
    main(PagodaPeer)
