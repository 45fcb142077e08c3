"""Well-known models: what the `config.json` of each says, as far as sizing needs it.

Every entry is read by the same code as a config from disk, and most are checked in tests against the number of
parameters that the published weights have, which no wrong width, depth or head count would give.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagoda.errors import ModelNotFound
from pagoda.plan.shape import ModelShape

Config = Mapping[str, Any]


def _dense(
    kind: str,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    context: int,
    **more: Any,
) -> Config:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        **more,
    }


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> Config:
    return _dense("qwen3", hidden, intermediate, layers, heads, 8, 151936, 40960, head_dim=128, **more)


def _qwen3_moe(hidden: int, width: int, layers: int, heads: int) -> Config:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": width, "head_dim": 128}
    return _dense("qwen3_moe", hidden, 0, layers, heads, 4, 151936, 40960, **experts)


def _gemma3(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> Config:
    more = {"head_dim": head_dim, "sliding_window": 1024}
    return _dense("gemma3_text", hidden, intermediate, layers, heads, kv_heads, 262208, 131072, **more)


def _gpt_oss(layers: int, experts: int) -> Config:
    more: Config = {
        "head_dim": 64,
        "attention_bias": True,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "quantization_config": {"quant_method": "mxfp4"},
    }
    return _dense("gpt_oss", 2880, 2880, layers, 64, 8, 201088, 131072, **more)


def _deepseek(
    hidden: int, intermediate: int, layers: int, heads: int, experts: tuple[int, int, int], width: int, **more: Any
) -> Config:
    """`experts`: routed, shared, and how many of the routed a token uses; `width`: of each."""
    routed, shared, active = experts
    mine: Config = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": routed,
        "n_shared_experts": shared,
        "num_experts_per_tok": active,
        "moe_intermediate_size": width,
        "first_k_dense_replace": 1,
        **more,
    }
    kind, vocab = ("deepseek_v3", 129280) if routed == 256 else ("deepseek_v2", 102400)
    return _dense(kind, hidden, intermediate, layers, heads, heads, vocab, 163840, **mine)


_TIED: Config = {"tie_word_embeddings": True}
_V3: Config = {"q_lora_rank": 1536, "first_k_dense_replace": 3, "quantization_config": {"quant_method": "fp8"}}
_DEEPSEEK_V3 = _deepseek(7168, 18432, 61, 128, (256, 1, 8), 2048, **_V3)

CATALOG: Mapping[str, Config] = {
    "llama-2-7b": _dense("llama", 4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-3-8b": _dense("llama", 4096, 14336, 32, 32, 8, 128256, 8192),
    "llama-3-70b": _dense("llama", 8192, 28672, 80, 64, 8, 128256, 8192),
    "llama-3.1-8b": _dense("llama", 4096, 14336, 32, 32, 8, 128256, 131072),
    "llama-3.1-70b": _dense("llama", 8192, 28672, 80, 64, 8, 128256, 131072),
    "llama-3.1-405b": _dense("llama", 16384, 53248, 126, 128, 8, 128256, 131072),
    "llama-3.2-1b": _dense("llama", 2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, **_TIED),
    "llama-3.2-3b": _dense("llama", 3072, 8192, 28, 24, 8, 128256, 131072, head_dim=128, **_TIED),
    "llama-3.3-70b": _dense("llama", 8192, 28672, 80, 64, 8, 128256, 131072),
    "smollm2-135m": _dense("llama", 576, 1536, 30, 9, 3, 49152, 8192, **_TIED),
    "smollm2-360m": _dense("llama", 960, 2560, 32, 15, 5, 49152, 8192, **_TIED),
    "smollm2-1.7b": _dense("llama", 2048, 8192, 24, 32, 32, 49152, 8192, **_TIED),
    "mistral-7b-v0.1": _dense("mistral", 4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=4096),
    "mistral-7b-v0.3": _dense("mistral", 4096, 14336, 32, 32, 8, 32768, 32768),
    "mistral-nemo-12b": _dense("mistral", 5120, 14336, 40, 32, 8, 131072, 131072, head_dim=128),
    "mistral-small-24b": _dense("mistral", 5120, 32768, 40, 32, 8, 131072, 32768, head_dim=128),
    "mixtral-8x7b": _dense("mixtral", 4096, 14336, 32, 32, 8, 32000, 32768, num_local_experts=8, num_experts_per_tok=2),
    "mixtral-8x22b": _dense(
        "mixtral", 6144, 16384, 56, 48, 8, 32000, 65536, num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen2.5-0.5b": _dense("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, **_TIED),
    "qwen2.5-1.5b": _dense("qwen2", 1536, 8960, 28, 12, 2, 151936, 32768, **_TIED),
    "qwen2.5-3b": _dense("qwen2", 2048, 11008, 36, 16, 2, 151936, 32768, **_TIED),
    "qwen2.5-7b": _dense("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768),
    "qwen2.5-14b": _dense("qwen2", 5120, 13824, 48, 40, 8, 152064, 32768),
    "qwen2.5-32b": _dense("qwen2", 5120, 27648, 64, 40, 8, 152064, 32768),
    "qwen2.5-72b": _dense("qwen2", 8192, 29568, 80, 64, 8, 152064, 32768),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, **_TIED),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, **_TIED),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, **_TIED),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "qwen3-30b-a3b": _qwen3_moe(2048, 768, 48, 32),
    "qwen3-235b-a22b": _qwen3_moe(4096, 1536, 94, 64),
    "gemma-2-2b": _dense("gemma2", 2304, 9216, 26, 8, 4, 256000, 8192, head_dim=256, sliding_window=4096),
    "gemma-2-9b": _dense("gemma2", 3584, 14336, 42, 16, 8, 256000, 8192, head_dim=256, sliding_window=4096),
    "gemma-2-27b": _dense("gemma2", 4608, 36864, 46, 32, 16, 256000, 8192, head_dim=128, sliding_window=4096),
    "gemma-3-1b": _dense("gemma3_text", 1152, 6912, 26, 4, 1, 262144, 32768, head_dim=256, sliding_window=512),
    "gemma-3-4b": _gemma3(2560, 10240, 34, 8, 4, 256),
    "gemma-3-12b": _gemma3(3840, 15360, 48, 16, 8, 256),
    "gemma-3-27b": _gemma3(5376, 21504, 62, 32, 16, 128),
    "phi-3-mini-4k": _dense("phi3", 3072, 8192, 32, 32, 32, 32064, 4096, sliding_window=2047),
    "phi-3-medium-4k": _dense("phi3", 5120, 17920, 40, 40, 10, 32064, 4096, sliding_window=2047),
    "phi-4": _dense("phi3", 5120, 17920, 40, 40, 10, 100352, 16384),
    "phi-4-mini": _dense("phi3", 3072, 8192, 32, 24, 8, 200064, 131072, **_TIED),
    "deepseek-v2-lite": _deepseek(2048, 10944, 27, 16, (64, 2, 6), 1408),
    "deepseek-v2": _deepseek(5120, 12288, 60, 128, (160, 2, 6), 1536, q_lora_rank=1536),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}

ALIASES: Mapping[str, str] = {"smollm2": "smollm2-135m"}


def find_shape(name: str) -> ModelShape | None:
    """The shape of a well-known model; None if no entry has that name, however it is capitalized."""
    key = name.lower()
    key = ALIASES.get(key, key)
    config = CATALOG.get(key)
    return None if config is None else ModelShape.from_config(key, config)


def shape_of(name: str) -> ModelShape:
    """The shape of a well-known model.

    Raises:
        ModelNotFound: no entry has that name.
    """
    shape = find_shape(name)
    if shape is None:
        raise ModelNotFound(f"{name!r} is none of the built-in models: {', '.join(CATALOG)}", param="model")
    return shape
