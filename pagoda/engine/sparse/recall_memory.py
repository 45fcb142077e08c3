"""The model's side of recalling: where KV goes on the host, and what a model is asked before it is recalled."""

from __future__ import annotations

import torch

from pagoda.engine.runner import ModelRunner
from pagoda.engine.sparse.calibrate import sample_queries
from pagoda.kv.layout import KVLayout
from pagoda.kv.sizes import parse_size
from pagoda.model.decoder import Decoder
from pagoda.model.loader import LoadedModel
from pagoda.model.tokenizer import Tokenizer
from pagoda.sparse.host import HostPool, RecallMemory
from pagoda.sparse.skew import Asked

_FLOATS = {"float32", "bfloat16", "float16"}


def recall_memory(
    runner: ModelRunner, loaded: LoadedModel, layout: KVLayout, size: int | str | None
) -> RecallMemory | None:
    """What recalling policies need; None without memory for them, a layer that sees everything, or KV in full."""
    full_layers = [layer for layer in layout.layers if layer.window is None]
    dtypes = {part.dtype for layer in full_layers for part in layer.parts}
    if size is None or not full_layers or not dtypes <= _FLOATS:
        return None
    spec = loaded.spec
    # Keys, values and layers may differ: host memory has the one dtype that holds all of them exactly.
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    host = HostPool(len(full_layers), spec.num_kv_heads, spec.head_dim, dtype, parse_size(size))

    def queries(layer: int, residual: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return runner.decoder.queries(layer, residual, positions)

    def rotated(layer: int, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return runner.decoder.rotated(layer, queries, positions)

    return RecallMemory(host, queries, rotated, LearntQueries(runner, loaded.tokenizer), spec.attention_scale)


class LearntQueries:
    """What the queries of the decoder that runs are like, learnt when it is first asked for."""

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer) -> None:
        self._runner, self._tokenizer = runner, tokenizer
        self._learnt: tuple[Decoder, Asked] | None = None

    def __call__(self) -> Asked:
        """That of all layers."""
        decoder = self._runner.decoder
        if self._learnt is None or self._learnt[0] is not decoder:
            self._learnt = decoder, sample_queries(decoder, self._tokenizer)
        return self._learnt[1]
