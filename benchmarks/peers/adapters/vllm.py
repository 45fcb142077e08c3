"""vLLM, stepped in this process (no second process, so no messages between two count against it)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.peers.adapters.serve import Event, main


class VllmPeer:
    """vLLM's synchronous engine, with prefix caching and chunked prefill as it ships."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import vllm  # type: ignore[import-not-found]

        self._vllm = vllm
        self._llm = vllm.LLM(
            settings["model"],
            dtype="bfloat16",
            max_model_len=settings["context"],
            max_num_seqs=settings["max_seqs"],
            enable_prefix_caching=True,
            **settings["options"],
        )
        self._engine = self._llm.llm_engine
        self._num_tokens: dict[str, int] = {}

    def add(self, key: int, tokens: list[int], max_tokens: int) -> None:
        """Queue a request."""
        params = self._vllm.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._engine.add_request(str(key), {"prompt_token_ids": tokens}, params)
        self._num_tokens[str(key)] = 0

    def step(self) -> Iterable[Event]:
        """One step of the engine; its outputs hold all tokens so far."""
        events = []
        for output in self._engine.step():
            name = output.request_id
            tokens = output.outputs[0].token_ids
            events.append(Event(int(name), list(tokens[self._num_tokens[name] :])))
            self._num_tokens[name] = len(tokens)
        return events

    def reset(self) -> None:
        """Forget cached prefixes."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM refused to reset its prefix cache")

    def info(self) -> dict[str, Any]:
        """Version."""
        return {"version": self._vllm.__version__}


if __name__ == "__main__":
    main(VllmPeer)
