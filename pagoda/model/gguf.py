"""GGUF file -> Hugging Face folder in the cache, once; from then on it loads like any other folder.

    name.gguf ──sha256──> $PAGODA_CACHE/models/<sha256>-<dtype>-v2/
                              config.json  tokenizer.json  tokenizer_config.json  model.safetensors

Reading a GGUF's vocabulary and dequantizing takes seconds, mapping the finished folder does not. Quantized weights are
expanded to `dtype`: they decide quality here, not memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from pagoda.errors import UnsupportedModel, WeightsError
from pagoda.files import Progress, cache_dir, content_hash, folder_written_atomically, no_progress
from pagoda.model.gguf_tokenizer import tokenizer_files

_FORMAT = "v2"  # Part of the folder's name: raise it when the conversion changes.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_ROPE_FACTORS = "rope_freqs.weight"
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# The largest of each Gemma scales queries by hidden_size / num_heads, the others by head_dim; GGUF does not say.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def convert_gguf(path: Path, dtype: torch.dtype, progress: Progress = no_progress) -> Path:
    """The Hugging Face folder made from a GGUF file; converts it if no earlier start did.

    Raises:
        WeightsError: the file is missing, truncated or corrupt, or the cache cannot be written.
        UnsupportedModel: an architecture, tokenizer or quantization that nothing here reads.
    """
    digest = content_hash(path, progress)
    folder = cache_dir() / "models" / f"{digest}-{str(dtype).removeprefix('torch.')}-{_FORMAT}"
    if folder.is_dir():
        return folder
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise WeightsError(f"{path} is truncated or not a GGUF file: {error}") from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = hf_config(metadata, tensors) | {"dtype": str(dtype).removeprefix("torch.")}
    files = tokenizer_files(metadata)
    converted = _convert_tensors(config, tensors, dtype, progress)
    try:
        with folder_written_atomically(folder) as temporary:
            for name, text in {"config.json": json.dumps(config, indent=2), **files}.items():
                (temporary / name).write_text(text, encoding="utf-8")
            save_file(converted, temporary / "model.safetensors", metadata={"format": "pt"})
    except OSError as error:
        raise WeightsError(f"cannot write {folder} (set PAGODA_CACHE to choose another place): {error}") from error
    return folder


def gguf_identity(path: Path) -> str:
    """One hash over a GGUF file's content and the version of the conversion: what decides the converted weights."""
    return hashlib.sha256(f"gguf {_FORMAT} {content_hash(path)}".encode()).hexdigest()


def hf_config(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` that says what a GGUF's metadata and tensor list say.

    Raises:
        UnsupportedModel: another architecture, a mixture of experts, a split file or a partial rotary embedding.
        WeightsError: a required key is missing.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UnsupportedModel(f"GGUF architecture {architecture!r} is not supported; supported are {known}")
    if metadata.get(f"{architecture}.expert_count", 0) > 0:
        raise UnsupportedModel("GGUF mixtures of experts are not supported")
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedModel("GGUF models split over several files are not supported; merge them with gguf-split")

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise WeightsError(f"the GGUF metadata lacks {architecture}.{key}")
        return found

    heads, hidden = value("attention.head_count"), value("embedding_length")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        raise UnsupportedModel("GGUF models whose layers differ in size are not supported")
    head_dim = value("attention.key_length", hidden // max(heads, 1))
    if value("attention.value_length", head_dim) != head_dim or value("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel("GGUF heads with unequal keys and values, or rotated in part, are not supported")
    if "token_embd.weight" not in tensors:
        raise WeightsError("the GGUF file has no token_embd.weight")
    window = metadata.get(f"{architecture}.attention.sliding_window")
    windowed_llama = architecture == "llama" and window is not None
    eos = [metadata[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in metadata]
    config = {
        "architectures": ["MistralForCausalLM" if windowed_llama else _ARCHITECTURES[architecture]],
        "model_type": "mistral" if windowed_llama else architecture,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": value("context_length"),
        "rope_parameters": _rope_parameters(value, tensors.get(_ROPE_FACTORS)),
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "sliding_window": window,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(eos)),
    }
    return config | _gemma_config(config, metadata) if architecture in _GEMMA_27B_LAYERS else config


def _gemma_config(config: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a Gemma's `config.json` says otherwise, or besides."""
    kind = config["model_type"]
    is_27b = config["num_hidden_layers"] == _GEMMA_27B_LAYERS[kind]
    query_size = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    found: dict[str, Any] = {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": query_size,
        "attn_logit_softcapping": metadata.get(f"{kind}.attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get(f"{kind}.final_logit_softcapping"),
    }
    if kind == "gemma2":
        found["sliding_window"] = metadata.get("gemma2.attention.sliding_window", 4096)  # early files leave it out
    else:
        local = {"rope_type": "default", "rope_theta": metadata.get("gemma3.rope.freq_base_swa", 10000.0)}
        found["model_type"] = "gemma3_text"
        found["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return found


def _rope_parameters(value: Callable[..., Any], factors: gguf.ReaderTensor | None) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_theta": value("rope.freq_base", 10000.0), "rope_type": "default"}
    kind = value("rope.scaling.type", "none")
    if factors is not None:
        # llama.cpp stores Llama 3.1's stretch as one divisor per frequency: a LongRoPE whose two lists are the same.
        divisors = [float(factor) for factor in _dequantize(factors).ravel()]
        lists = {"short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0, "factor": 1.0}
        original = value("rope.scaling.original_context_length", value("context_length"))
        parameters |= {"rope_type": "longrope", **lists, "original_max_position_embeddings": original}
    elif kind in ("linear", "yarn"):
        parameters |= {"rope_type": kind, "factor": value("rope.scaling.factor")}
        if kind == "yarn":
            parameters["original_max_position_embeddings"] = value("rope.scaling.original_context_length")
    elif kind != "none":
        raise UnsupportedModel(f"GGUF rope scaling {kind!r} is not supported")
    return parameters


def _convert_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, gguf.ReaderTensor], dtype: torch.dtype, progress: Progress
) -> dict[str, torch.Tensor]:
    heads_of = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    permuted = config["model_type"] in ("llama", "mistral")
    is_gemma = config["model_type"].startswith("gemma")
    names = _GEMMA_LAYER_NAMES if is_gemma else _LAYER_NAMES
    converted = {}
    for done, (name, tensor) in enumerate(tensors.items(), start=1):
        if name == _ROPE_FACTORS:
            continue
        values = _dequantize(tensor)
        part = name.split(".")[2] if name.startswith("blk.") and name.count(".") == 3 else ""
        if permuted and part in heads_of:
            values = _unpermute(values, heads_of[part], name)
        if is_gemma and name.endswith("norm.weight"):
            values = values - 1.0  # llama.cpp stores what Gemma's norms multiply by, Hugging Face the distance from 1
        converted[_hf_name(name, part, names)] = torch.from_numpy(np.array(values, order="C")).to(dtype)
        progress("converting GGUF", done, len(tensors))
    return converted


def _hf_name(name: str, part: str, names: Mapping[str, str]) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    if part not in names:
        raise UnsupportedModel(f"the GGUF tensor {name!r} has no place in the decoder")
    _, layer, _, suffix = name.split(".")
    return f"model.layers.{layer}.{names[part]}.{suffix}"


def _unpermute(values: np.ndarray, heads: int, name: str) -> np.ndarray:
    """Undo llama.cpp's row order, which puts the two rows of a rotary pair side by side, not half a head apart."""
    if heads < 1 or len(values) % (2 * heads):
        raise WeightsError(f"{name} has {len(values)} rows, which {heads} heads cannot share")
    pairs = values.reshape(heads, len(values) // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _dequantize(tensor: gguf.ReaderTensor) -> np.ndarray:
    try:
        values: np.ndarray = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"{tensor.name} is quantized as {tensor.tensor_type.name}, which is not supported"
        ) from error
    return values
