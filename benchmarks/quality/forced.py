"""Forced: an engine that reads given tokens, and shows the logits that it had before each.

    chunk    tokens are one prompt, computed in chunks of the token budget; every row gives logits   fast
    decode   the continuation is "generated" one token at a time, whatever the model would say       as served

Both run the engine's own steps: what a token reads is what it would read in serving, blocks, formats and policies
included. Which keys are read quantized depends on positions alone, so of a KV format both show the same. Only the
decoder's call is tapped: it is asked for more rows of logits, and what it hands to the sampler is replaced by the token
that is to come.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pagoda import Engine, SamplingParams
from pagoda.blend.progress import BlendProgress
from pagoda.blend.segments import BlendSpec
from pagoda.engine.kv_policy import parse_kv_policy
from pagoda.engine.outputs import SparseReport
from pagoda.kv.keys import Scope
from pagoda.model.batch import ForwardBatch


class Forced:
    """Wraps an engine with no other requests. Mutates its decoder: the engine serves nobody else afterwards."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._decoder: Any = engine.core._runner.decoder  # private: only measurements need it
        self._forward = self._decoder.forward
        self._decoder.forward = self._tapped
        self._every_row = False
        self._first_row = 0  # the position of the first row whose logits are wanted
        self._to_come: Iterator[int] = iter(())
        self._seen: list[torch.Tensor] = []
        self._names = itertools.count()
        self.sparse: SparseReport | None = None
        self.blend: BlendProgress | None = None

    def read(
        self,
        tokens: Sequence[int],
        start: int,
        *,
        decode: bool,
        share: bool = False,
        blend: BlendSpec | None = None,
        kv_policy: Mapping[str, Any] | None = None,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Read `tokens`; yield the logits before each token from `start` on, in order.

        Args:
            tokens: the whole sequence.
            start: at least 1; the first token whose logits are wanted.
            decode: one token at a time from `start` on, after a prompt of what is before.
            share: whether the prompt may hit what earlier calls left in the cache. In chunks, they may not have left
                all that is before `start`.
            blend: passages of the prompt, which must be cached already: one request runs at a time. They must end
                before `start`: their rows may have no logits. What became of them is in `self.blend` afterwards.
            kv_policy: the request's; what it did is in `sparse` afterwards.

        Yields:
            Position of the first predicted token, and float32 `[n, vocab_size]` that predict it and those after it.
        """
        name = f"forced-{next(self._names)}"
        prompt = tokens[:start] if decode else tokens[:-1]
        self._every_row, self._first_row, self._seen = not decode, start - 1, []
        self._to_come = iter(tokens[start:] if decode else tokens[-1:])
        wish = None if kv_policy is None else parse_kv_policy(kv_policy)
        params = SamplingParams(max_tokens=len(tokens) - len(prompt), temperature=0.0, ignore_eos=True, kv_policy=wish)
        self.sparse = None
        scope = Scope() if share or blend is not None else Scope(salt=name)
        self.engine.core.add(name, list(prompt), params, scope=scope, blend=blend)
        self.blend = self.engine.core._requests[name].blend
        position = start
        try:
            while self.engine.core.has_work:
                for output in self.engine.core.step():
                    self.sparse = output.sparse
                for logits in self._seen:
                    yield position, logits
                    position += len(logits)
                self._seen.clear()
            assert position == len(tokens), "a hit covers rows whose logits are wanted"
        finally:
            self.engine.core.abort(name)

    def _tapped(self, batch: ForwardBatch, kv: Any, *args: Any, **options: Any) -> torch.Tensor:
        if kv is not self.engine.core._runner.kv:  # first tokens, which are computed apart
            return self._forward(batch, kv, *args, **options)
        wanted = batch.logits_rows
        if self._every_row:
            rows = (batch.positions >= self._first_row).nonzero()[:, 0]
            batch = dataclasses.replace(batch, logits_rows=rows)
        logits: torch.Tensor = self._forward(batch, kv, *args, **options)
        if len(logits):
            self._seen.append(logits)
        if not len(wanted):
            return logits[:0]
        # One request runs, so one row is sampled from, and the sampler is greedy.
        chosen = torch.full((1, logits.shape[1]), -torch.inf)
        chosen[0, next(self._to_come)] = 0.0
        return chosen

    def continuations(self, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
        """What the engine itself says after prompts, greedily; the end of text does not end it."""
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        with self.free() as engine:
            found = engine.generate([list(prompt) for prompt in prompts], params)
        return [list(each.completions[0].token_ids) for each in found]

    @contextmanager
    def free(self) -> Iterator[Engine]:
        """The engine as it is without us."""
        self._decoder.forward = self._forward
        try:
            yield self.engine
        finally:
            self._decoder.forward = self._tapped
