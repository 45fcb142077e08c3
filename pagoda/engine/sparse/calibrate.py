"""What InfiniGen learns once from a model: what its queries are like (see sparse/skew.py)."""

from __future__ import annotations

import inspect
import statistics

import torch

from pagoda.kernels import AttentionOutput, KVView
from pagoda.model.batch import ForwardBatch
from pagoda.model.decoder import Decoder
from pagoda.model.tokenizer import Tokenizer
from pagoda.sparse.skew import Asked

_PIECES = 6
_PIECE_TOKENS = 384
_BLOCK_SIZE = 16


def sample_queries(decoder: Decoder, tokenizer: Tokenizer) -> Asked:
    """The queries of a text that ships with Python: prose in comments, and source.

    Takes a second or two for a small model. Pieces of the text stand at positions from all over the context, since
    slow waves of rotary embeddings turn keys elsewhere further on; what a model computes does not depend on where its
    text begins.
    """
    text = tokenizer.encode(inspect.getsource(statistics))
    spec = decoder.spec
    asked = Asked(spec.num_layers, spec.num_kv_heads, spec.head_dim)
    length = min(_PIECE_TOKENS, spec.max_context, len(text))
    for piece in range(_PIECES):
        first = piece * (len(text) - length) // (_PIECES - 1)
        position = piece * (spec.max_context - length) // (_PIECES - 1)
        _read(decoder, torch.tensor(text[first : first + length]), position, asked)
    return asked


def _read(decoder: Decoder, tokens: torch.Tensor, position: int, asked: Asked) -> None:
    """Compute tokens as one prompt that begins at a position, in KV memory of its own."""
    spec, device, rows = decoder.spec, decoder.device, torch.arange(len(tokens))
    num_blocks = -(-len(tokens) // _BLOCK_SIZE)
    shape = (num_blocks, spec.num_kv_heads, _BLOCK_SIZE, spec.head_dim)
    keys, values = (torch.zeros(spec.num_layers, *shape, dtype=decoder.dtype, device=device) for _ in range(2))
    views = [KVView(*of_layer) for of_layer in zip(keys, values, strict=True)]
    batch = ForwardBatch(
        token_ids=tokens.to(device),
        positions=(position + rows).to(device),
        query_start=torch.tensor([0, len(tokens)], dtype=torch.int32, device=device),
        context_lens=torch.tensor([len(tokens)], dtype=torch.int32, device=device),
        block_tables=(torch.arange(num_blocks, dtype=torch.int32, device=device)[None],),
        slot_mapping=(rows.to(device),),
        logits_rows=rows[:0].to(device),
    )
    decoder.forward(batch, views, [0] * spec.num_layers, _Observed(decoder, asked))


class _Observed:
    """A LayerInputHook that counts every layer's rotated queries, and changes nothing."""

    needs_mass = False

    def __init__(self, decoder: Decoder, asked: Asked) -> None:
        self._decoder, self._asked = decoder, asked

    def before_layer(self, layer: int, residual: torch.Tensor, batch: ForwardBatch) -> None:
        """See LayerInputHook."""
        self._asked.add(layer, self._decoder.queries(layer, residual, batch.positions).cpu())

    def before_attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> ForwardBatch:
        """See LayerHook."""
        return batch

    def after_attention(self, layer: int, batch: ForwardBatch, output: AttentionOutput) -> None:
        """See LayerHook."""
