"""A decoder that attends and does next to nothing else: what decode attention takes where the engine calls it.

A step of it reads every layer's keys and values, one layer after the other in one native call; its matrices are as thin
as they can be.
"""

from __future__ import annotations

import torch

from pagoda.model.batch import ForwardBatch
from pagoda.model.decoder import Decoder, DecoderWeights, LayerWeights
from pagoda.model.spec import ModelSpec

_THIN = 32  # values of the residual stream


def attention_decoder(num_kv_heads: int, group: int, head_dim: int, layers: int, context: int) -> Decoder:
    """Of `layers` layers and up to `context` tokens, in BF16."""
    num_heads = num_kv_heads * group
    spec = ModelSpec.from_hf_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": _THIN,
            "hidden_size": _THIN,
            "intermediate_size": _THIN,
            "num_hidden_layers": layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        }
    )

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) / _THIN).bfloat16()

    norm = random(_THIN)
    layer = LayerWeights(
        input_norm=norm,
        qkv=random((num_heads + 2 * num_kv_heads) * head_dim, _THIN),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        output=random(_THIN, num_heads * head_dim),
        output_bias=None,
        attention_out_norm=None,
        mlp_norm=norm,
        gate_up=random(2 * _THIN, _THIN),
        gate_up_bias=None,
        down=random(_THIN, _THIN),
        down_bias=None,
        mlp_out_norm=None,
    )
    embedding = random(_THIN, _THIN)
    return Decoder(spec, DecoderWeights(embedding, (layer,) * layers, norm, embedding))


def step_batch(
    tables: torch.Tensor, block_size: int, start: int, new: int, vocab_size: int = _THIN, num_groups: int = 1
) -> ForwardBatch:
    """The next `new` tokens after `start` of requests whose blocks are rows of `tables`, int32; logits of the last."""
    requests, positions = len(tables), torch.arange(start, start + new)
    slots = tables[:, positions // block_size].long() * block_size + positions % block_size
    starts = torch.arange(requests + 1) * new
    return ForwardBatch(
        token_ids=torch.randint(0, vocab_size, (requests * new,)),
        positions=positions.repeat(requests),
        query_start=starts.to(torch.int32),
        context_lens=torch.full((requests,), start + new, dtype=torch.int32),
        block_tables=(tables,) * num_groups,
        slot_mapping=(slots.flatten(),) * num_groups,
        logits_rows=starts[1:] - 1,
    )
