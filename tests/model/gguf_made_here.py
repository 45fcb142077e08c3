"""A small GGUF file from a Transformers model, the way llama.cpp's converter lays it out."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import transformers
from gguf import GGMLQuantizationType as Kind

_ARCHITECTURE = {"gemma3_text": "gemma3"}
_GEMMA_LAYER = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's converter: the two halves of each head, interleaved row by row."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write(
    path: Path,
    model: transformers.PreTrainedModel,
    tokenizer: tokenizers.Tokenizer,
    *,
    kind: Kind = Kind.F32,
    metadata: dict[str, object] | None = None,
    rope_factors: list[float] | None = None,
    pre: str = "gpt-2",
) -> Path:
    config = model.config
    architecture = _ARCHITECTURE.get(config.model_type, config.model_type)
    is_gemma = architecture.startswith("gemma")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_tokenizer(writer, tokenizer, config.vocab_size, pre)
    for key, value in (metadata or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    for name, parameter in model.state_dict().items():
        values = parameter.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = _name(name, _LAYER | _GEMMA_LAYER if is_gemma else _LAYER)
        if is_gemma and "norm" in target:
            values = values + 1
        if architecture == "llama" and ("attn_q." in target or "attn_k." in target):
            values = permute(values, config.num_attention_heads if "attn_q." in target else config.num_key_value_heads)
        if values.ndim == 2 and kind != Kind.F32:
            writer.add_tensor(target, gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: tokenizers.Tokenizer, vocab_size: int, pre: str) -> None:
    model = json.loads(tokenizer.to_str())["model"]
    added = tokenizer.get_added_tokens_decoder()
    tokens = [tokenizer.id_to_token(i) or f"[PAD{i}]" for i in range(vocab_size)]
    kinds = [
        (gguf.TokenType.CONTROL if added[i].special else gguf.TokenType.USER_DEFINED)
        if i in added
        else (gguf.TokenType.NORMAL if tokenizer.id_to_token(i) else gguf.TokenType.UNUSED)
        for i in range(vocab_size)
    ]
    sentencepiece = model.get("byte_fallback", False)
    writer.add_tokenizer_model("llama" if sentencepiece else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if sentencepiece:
        ranks = {"".join(pair): -float(rank) for rank, pair in reversed(list(enumerate(model["merges"])))}
        writer.add_token_scores([ranks.get(token, -1e6) for token in tokens])
        writer.add_unk_token_id(tokenizer.token_to_id("<unk>"))
        writer.add_bos_token_id(tokenizer.token_to_id("<s>"))
    else:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(tokenizer.token_to_id("<|end|>"))
    writer.add_chat_template("{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}")


def _name(name: str, layer_names: dict[str, str]) -> str:
    if not name.startswith("model.layers."):
        fixed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        stem, _, suffix = name.rpartition(".")
        return f"{fixed[stem]}.{suffix}"
    _, _, layer, rest = name.split(".", 3)
    stem, _, suffix = rest.rpartition(".")
    return f"blk.{layer}.{layer_names[stem]}.{suffix}"
