"""ModelSpec: everything about a model but its weights, read from a Hugging Face `config.json`.

GGUF files arrive here too: gguf.py writes their metadata as the same config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagoda.errors import UnsupportedModel
from pagoda.model.rope import RopeSpec


@dataclass(frozen=True, slots=True)
class _Family:
    """What a family's `config.json` leaves unsaid."""

    name: str
    qk_norm: bool = False
    fixed_qkv_bias: bool = False
    default_sliding_window: int | None = None


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama"),
    "MistralForCausalLM": _Family("mistral", default_sliding_window=4096),
    "Qwen2ForCausalLM": _Family("qwen2", fixed_qkv_bias=True, default_sliding_window=4096),
    "Qwen3ForCausalLM": _Family("qwen3", qk_norm=True, default_sliding_window=4096),
}
_ARCHITECTURE_OF_TYPE = {family.name: architecture for architecture, family in _FAMILIES.items()}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and constants of one decoder-only model. Immutable; holds no tensors.

    `windows[layer]` is the number of latest tokens a layer attends to, the current one included; `None` means all.
    `max_context` is in tokens, prompt and output together.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    rope: RopeSpec
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    max_context: int
    eos_ids: tuple[int, ...]
    dtype: str

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a `config.json`.

        Raises:
            UnsupportedModel: the architecture or one of its variants has no decoder here, or the config does not add
                up.
        """
        try:
            return cls._from_hf_config(config)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise UnsupportedModel(
                f"config.json is incomplete or malformed: {type(error).__name__}: {error}"
            ) from error

    @classmethod
    def _from_hf_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        family = _family(config)
        _refuse_variants(config)
        num_layers, num_heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        hidden_size = int(config["hidden_size"])
        attention_bias = bool(config.get("attention_bias", False))
        rope = RopeSpec.from_hf_config(config)
        # A YaRN config may state the trained length only; the stretched one is what it is for.
        stretched = int(rope.factor * rope.original_context) if rope.kind == "yarn" else 0
        spec = cls(
            family=family.name,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or hidden_size // num_heads),
            windows=_windows(config, family, num_layers),
            rope=rope,
            norm_eps=float(config["rms_norm_eps"]),
            qkv_bias=family.fixed_qkv_bias or attention_bias,
            output_bias=attention_bias and not family.fixed_qkv_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_context=max(int(config["max_position_embeddings"]), stretched),
            eos_ids=token_ids(config.get("eos_token_id")),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        )
        spec._check()
        return spec

    def _check(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise UnsupportedModel(f"{name} is {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim < 2 or self.head_dim % 2:
            raise UnsupportedModel(f"rotary embeddings need an even head_dim, got {self.head_dim}")


def token_ids(value: object) -> tuple[int, ...]:
    """`eos_token_id` as configs write it (absent, one id, or a list) as a tuple."""
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return tuple(value)
    raise ValueError(f"token ids must be integers, got {value!r}")


def _family(config: Mapping[str, Any]) -> _Family:
    architectures = config.get("architectures") or [_ARCHITECTURE_OF_TYPE.get(config.get("model_type", ""))]
    family = _FAMILIES.get(architectures[0])
    if family is None:
        named = architectures[0] or config.get("model_type")
        raise UnsupportedModel(f"architecture {named!r} is not supported; supported are {', '.join(_FAMILIES)}")
    return family


def _refuse_variants(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"activation {config['hidden_act']!r} is not supported, only silu")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(f"weights quantized with {method!r} are not supported; use full precision or GGUF")


def _windows(config: Mapping[str, Any], family: _Family, num_layers: int) -> tuple[int | None, ...]:
    if family.default_sliding_window is None:
        return (None,) * num_layers
    window = config.get("sliding_window", family.default_sliding_window)
    if family.name == "mistral":
        return (window,) * num_layers
    if window is None or not config.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = config["max_window_layers"]
        return tuple(window if layer >= first else None for layer in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types names {len(kinds)} of {num_layers} layers")
    return tuple(known[kind] for kind in kinds)
