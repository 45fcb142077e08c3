"""ModelSpec: everything about a model but its weights, read from a Hugging Face `config.json`.

GGUF files arrive here too: gguf.py writes their metadata as the same config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    activation: str = "silu"
    tie_embeddings: bool = False
    # Of the Gemmas: every n-th layer is full, each branch is normalised before it joins the residual stream, norms
    # multiply by 1 + w, embeddings by the root of their size, and queries are scaled by a constant of their own.
    full_layer_every: int | None = None
    sandwich_norms: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama"),
    "MistralForCausalLM": _Family("mistral", default_sliding_window=4096),
    "Qwen2ForCausalLM": _Family("qwen2", fixed_qkv_bias=True, default_sliding_window=4096),
    "Qwen3ForCausalLM": _Family("qwen3", qk_norm=True, default_sliding_window=4096),
    "Gemma2ForCausalLM": _Family(
        "gemma2",
        default_sliding_window=4096,
        activation="gelu_tanh",
        tie_embeddings=True,
        full_layer_every=2,
        sandwich_norms=True,
    ),
    "Gemma3ForCausalLM": _Family(
        "gemma3_text",
        qk_norm=True,
        default_sliding_window=4096,
        activation="gelu_tanh",
        tie_embeddings=True,
        full_layer_every=6,
        sandwich_norms=True,
    ),
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ARCHITECTURE_OF_TYPE = {family.name: architecture for architecture, family in _FAMILIES.items()}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and constants of one decoder-only model. Immutable; holds no tensors.

    `windows[layer]` is the number of latest tokens a layer attends to, the current one included; `None` means all.
    `ropes[layer]` are its rotary frequencies. `max_context` is in tokens, prompt and output together.

    `attention_scale` multiplies scores, `embedding_scale` the embeddings, and `norm_offset` is added to the weights of
    norms when they are read. A softcap bounds values smoothly: `cap * tanh(value / cap)`. With `sandwich_norms` a
    branch's output is normalised too before it joins the residual stream.
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
    ropes: tuple[RopeSpec, ...]
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    embedding_scale: float
    activation: str
    sandwich_norms: bool
    norm_offset: float
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
        _refuse_variants(config, family)
        num_layers, num_heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        hidden_size = int(config["hidden_size"])
        attention_bias = bool(config.get("attention_bias", False))
        head_dim = int(config.get("head_dim") or hidden_size // num_heads)
        windows = _windows(config, family, num_layers)
        ropes = _ropes(config, family, windows)
        # A YaRN config may state the trained length only; the stretched one is what it is for.
        stretched = max((int(rope.factor * rope.original_context) for rope in ropes if rope.kind == "yarn"), default=0)
        is_gemma = family.sandwich_norms
        spec = cls(
            family=family.name,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=head_dim,
            windows=windows,
            ropes=ropes,
            attention_scale=float(config["query_pre_attn_scalar"] if is_gemma else head_dim) ** -0.5,
            attention_softcap=_softcap(config, "attn_logit_softcapping"),
            logit_softcap=_softcap(config, "final_logit_softcapping"),
            embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
            activation=family.activation,
            sandwich_norms=family.sandwich_norms,
            norm_offset=1.0 if is_gemma else 0.0,
            norm_eps=float(config["rms_norm_eps"]),
            qkv_bias=family.fixed_qkv_bias or attention_bias,
            output_bias=attention_bias and not family.fixed_qkv_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            tie_embeddings=bool(config.get("tie_word_embeddings", family.tie_embeddings)),
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


def _refuse_variants(config: Mapping[str, Any], family: _Family) -> None:
    named = config.get("hidden_activation") or config.get("hidden_act")
    if named is not None and _ACTIVATIONS.get(named) != family.activation:
        raise UnsupportedModel(f"activation {named!r} is not supported in {family.name}, only {family.activation}")
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("bidirectional attention is not supported: this model is an encoder")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(f"weights quantized with {method!r} are not supported; use full precision or GGUF")


def _windows(config: Mapping[str, Any], family: _Family, num_layers: int) -> tuple[int | None, ...]:
    if family.default_sliding_window is None:
        return (None,) * num_layers
    window = config.get("sliding_window", family.default_sliding_window)
    if family.name == "mistral":
        return (window,) * num_layers
    if window is None or not (family.full_layer_every or config.get("use_sliding_window", False)):
        return (None,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None and family.full_layer_every:
        every = int(config.get("sliding_window_pattern") or family.full_layer_every)
        return tuple(window if (layer + 1) % every else None for layer in range(num_layers))
    if kinds is None:
        first = config["max_window_layers"]
        return tuple(window if layer >= first else None for layer in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types names {len(kinds)} of {num_layers} layers")
    return tuple(known[kind] for kind in kinds)


def _ropes(config: Mapping[str, Any], family: _Family, windows: Sequence[int | None]) -> tuple[RopeSpec, ...]:
    """Each layer's frequencies. Gemma 3's sliding layers have a base of their own, and no scaling."""
    if family.name != "gemma3_text":
        return (RopeSpec.from_hf_config(config),) * len(windows)
    given = config.get("rope_parameters") or {}
    theta, local_theta = config.get("rope_theta", 1e6), config.get("rope_local_base_freq", 1e4)
    full = {"rope_theta": theta, **(config.get("rope_scaling") or {}), **(given.get("full_attention") or {})}
    local = {"rope_theta": local_theta, **(given.get("sliding_attention") or {})}
    length = {"max_position_embeddings": config["max_position_embeddings"]}
    of_full = RopeSpec.from_hf_config({**length, "rope_parameters": full})
    of_sliding = RopeSpec.from_hf_config({**length, "rope_parameters": local})
    return tuple(of_full if window is None else of_sliding for window in windows)


def _softcap(config: Mapping[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else float(config[key])
