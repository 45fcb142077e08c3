"""Hugging Face `generate`: what is due and of one shape runs as one static batch.

It has no prefix cache of its own. As its documentation shows, the cache of an earlier call is passed to the next one,
cut to what the prompts share: kept here for the last prompt.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers

from benchmarks.peers.adapters.serve import Event, main


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Clock(transformers.StoppingCriteria):  # type: ignore[misc]
    """Notes when each token came; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Called after every token."""
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class GeneratePeer:
    """`model.generate`, batch by batch."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self._model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16)
        self._model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None)
        self._max_seqs = settings["max_seqs"]
        self._waiting: list[tuple[int, list[int], int]] = []
        self._tokens: list[int] = []
        self._cache: Any = None

    def add(self, key: int, tokens: list[int], max_tokens: int) -> None:
        """Queue a request."""
        self._waiting.append((key, tokens, max_tokens))

    def step(self) -> Iterable[Event]:
        """Run the first request and all of its shape."""
        _, first, max_tokens = self._waiting[0]
        alike = [one for one in self._waiting if len(one[1]) == len(first) and one[2] == max_tokens][: self._max_seqs]
        self._waiting = [one for one in self._waiting if one not in alike]
        prompts = [tokens for _, tokens, _ in alike]
        clock = Clock()
        output = self._model.generate(
            torch.tensor(prompts),
            attention_mask=torch.ones(len(prompts), len(first), dtype=torch.long),
            cache=self._prefix(prompts),
            max_new_tokens=max_tokens,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
            return_dict_in_generate=True,
        )
        if len(prompts) == 1:
            self._tokens = output.sequences[0, :-1].tolist()
            self._cache = output.past_key_values
        rows = output.sequences[:, len(first) :].tolist()
        return [
            Event(key, [token], at)
            for (key, _, _), row in zip(alike, rows, strict=True)
            for token, at in zip(row, clock.times, strict=True)
        ]

    def _prefix(self, prompts: list[list[int]]) -> transformers.DynamicCache:
        """The part of the kept cache that all prompts start with, for each; one token at least is left to compute."""
        hit = min(*(common_prefix(self._tokens, tokens) for tokens in prompts), len(prompts[0]) - 1)
        if not hit:
            return transformers.DynamicCache(config=self._model.config)
        # One prompt takes the cache over; a batch needs its own copies.
        cache = self._cache if len(prompts) == 1 else copy.deepcopy(self._cache)
        if surplus := cache.get_seq_length() - hit:
            cache.crop(-surplus)
        if len(prompts) > 1:
            cache.batch_repeat_interleave(len(prompts))
        return cache

    def reset(self) -> None:
        """Drop the kept cache."""
        self._tokens, self._cache = [], None

    def info(self) -> dict[str, Any]:
        """Versions."""
        return {"version": transformers.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    main(GeneratePeer)
