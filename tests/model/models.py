"""Small random models of each family, made with Transformers, the reference that the decoder must equal."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from pagoda.kernels import CompactMatrix, Int8Matrix, Matrix
from pagoda.model.decoder import Decoder
from pagoda.model.spec import ModelSpec
from pagoda.model.weights import SafetensorsFolder, load_weights

SIZES = {
    "vocab_size": 131,
    "hidden_size": 42,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "llama-biased-tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-rope-llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-linear": ("Llama", {"rope_parameters": LINEAR_ROPE}),
    "llama-rope-yarn": ("Llama", {"rope_parameters": YARN_ROPE}),
    "llama-rope-dynamic": ("Llama", {"rope_parameters": DYNAMIC_ROPE}),
    "mistral-window": ("Mistral", {"sliding_window": 9}),
    "mistral-full": ("Mistral", {"sliding_window": None, "num_key_value_heads": 6}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 1}),
    "qwen2-mixed-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 3}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 11,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": ("Gemma3", {"sliding_window": 8, "query_pre_attn_scalar": 20, "num_hidden_layers": 6}),
    "gemma3-own-pattern": (
        "Gemma3",
        {
            "sliding_window": 13,
            "num_key_value_heads": 1,
            "rope_parameters": GEMMA3_ROPE,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "final_logit_softcapping": 4.0,
        },
    ),
    "qwen3-mixed-windows": ("Qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
}


def build(variant: str, seed: int = 0, **changes: object) -> transformers.PreTrainedModel:
    """A random model whose every tensor matters: norms and biases too are random, not ones and zeros."""
    family, options = VARIANTS[variant]
    kind = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options, **changes}, attn_implementation="eager")
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5).sub_(1.0 if "Gemma" in family else 0.0)
            else:
                parameter.normal_(0.0, 0.3)
    return model


def save(model: transformers.PreTrainedModel, folder: Path, **options: object) -> Path:
    model.save_pretrained(folder, safe_serialization=True, **options)
    return folder


def as_saved(matrix: Matrix) -> torch.Tensor:
    """A matrix that is kept without loss, as the tensor it was."""
    assert not isinstance(matrix, Int8Matrix)
    return matrix.expand() if isinstance(matrix, CompactMatrix) else matrix


def load(folder: Path, dtype: torch.dtype = torch.float32, weights_format: str = "full") -> Decoder:
    spec = ModelSpec.from_hf_config(json.loads((folder / "config.json").read_text()))
    source = SafetensorsFolder(folder)
    weights = load_weights(spec, source, dtype=dtype, device=torch.device("cpu"), weights_format=weights_format)
    return Decoder(spec, weights)


def reference_logits(model: transformers.PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()
