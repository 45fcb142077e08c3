"""ModelShape: what sizing needs of a model, read from a Hugging Face `config.json` of any attention decoder.

    layers      attention kind of each layer: full, or a sliding window
    attention   num_kv_heads x head_dim for keys and for values, or one latent row (multi-head latent attention)
    parameters  counted matrix by matrix, split into what every token reads and what only some experts' tokens do

It knows more families than pagoda.model can run: a plan for another engine is a plan too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagoda.errors import UnsupportedModel

_QKV_BIAS = ("qwen2", "qwen2_moe")
_QK_NORM = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
_FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text")
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3", "gemma3_text")
_SLIDING_PATTERN = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}  # every so many layers one is full
_ALWAYS_SLIDING = ("mistral", "mixtral", "phi3")
_EXPERT_BIASES = ("gpt_oss",)
_ROUTER_BIAS = ("gpt_oss", "deepseek_v3")


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): a token keeps one row of `rank + rope_dim` values for all heads."""

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Parameters:
    """How many parameters a model has, by who reads them.

    Attributes:
        embedding: the input table, of which a token reads one row; 0 if it is the output matrix too.
        output: the output matrix, read once for each sampled token.
        shared: every layer's attention, norms, routers, dense and shared MLPs: read by every token.
        expert: one routed expert of every layer that has some.
        num_experts, num_active_experts: routed experts in a layer, and how many a token uses.
    """

    embedding: int
    output: int
    shared: int
    expert: int = 0
    num_experts: int = 0
    num_active_experts: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.output + self.shared + self.num_experts * self.expert

    @property
    def active(self) -> int:
        """Those that a token's way through the layers reads; without embedding and output."""
        return self.shared + self.num_active_experts * self.expert

    def read_by(self, num_tokens: float) -> float:
        """Parameters that a step of so many tokens reads, outputs included, if each token chooses experts evenly."""
        missed = (1 - self.num_active_experts / self.num_experts) ** num_tokens if self.num_experts else 0.0
        return self.shared + self.output + self.num_experts * self.expert * (1 - missed)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's KV and its work. `windows[layer]` is in tokens; None attends to everything."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    parameters: Parameters
    max_context: int
    weight_format: str
    latent: Latent | None = None

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.windows)

    @property
    def attention_dim(self) -> int:
        """Multiplications of one query with one key and one value, over all heads of a layer, in prefill."""
        if self.latent:
            return self.num_heads * (self.latent.nope_dim + self.latent.rope_dim + self.latent.value_dim)
        return self.num_heads * 2 * self.head_dim

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any]) -> ModelShape:
        """Read a `config.json`; of a multimodal one, its language model.

        Raises:
            UnsupportedModel: it is incomplete, or has layers that keep something other than attention's KV.
        """
        if "text_config" in config:
            config = {**config, **config["text_config"]}
        try:
            return cls._from_config(name, config)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise UnsupportedModel(f"{name}: the config is incomplete: {type(error).__name__}: {error}") from error

    @classmethod
    def _from_config(cls, name: str, config: Mapping[str, Any]) -> ModelShape:
        num_heads = int(config["num_attention_heads"])
        latent = None
        if config.get("kv_lora_rank"):
            latent = Latent(*(int(config[key]) for key in _LATENT_KEYS))
        shape = cls(
            name=name,
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // num_heads),
            windows=_windows(config),
            parameters=_parameters(config, latent),
            max_context=int(config["max_position_embeddings"]),
            weight_format=_weight_format(config),
            latent=latent,
        )
        if min(shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.parameters.total) < 1:
            raise ValueError("sizes must be positive")
        return shape


_LATENT_KEYS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    num_layers, kind = int(config["num_hidden_layers"]), config.get("model_type")
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds is not None:
        known = {"full_attention": None, "sliding_attention": window}
        strange = set(kinds) - set(known)
        if strange or len(kinds) != num_layers:
            raise ValueError(f"{len(kinds)} layers of kinds {', '.join(sorted(set(kinds)))}")
        return tuple(known[kind] for kind in kinds)
    if window is None or not config.get("use_sliding_window", True):
        return (None,) * num_layers
    if pattern := config.get("sliding_window_pattern") or _SLIDING_PATTERN.get(str(kind)):
        return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
    if kind in _ALWAYS_SLIDING:
        return (window,) * num_layers
    if config.get("use_sliding_window"):
        first = int(config["max_window_layers"])
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return (None,) * num_layers


def _parameters(config: Mapping[str, Any], latent: Latent | None) -> Parameters:
    kind = str(config.get("model_type", ""))
    hidden, num_layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    table = int(config["vocab_size"]) * hidden
    tied = bool(config.get("tie_word_embeddings", kind in _TIED_BY_DEFAULT))
    norms = hidden * (4 if kind in _FOUR_NORMS else 2)
    shared = hidden + num_layers * (norms + _attention_parameters(config, kind, latent))

    num_experts = next((int(config[key]) for key in _NUM_EXPERTS_KEYS if config.get(key)), 0)
    if not num_experts:
        return Parameters(
            0 if tied else table, table, shared + num_layers * 3 * hidden * int(config["intermediate_size"])
        )
    num_dense = int(config.get("first_k_dense_replace", 0))
    num_sparse = num_layers - num_dense
    width = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    expert = 3 * hidden * width + (2 * width + hidden if kind in _EXPERT_BIASES else 0)
    router = num_experts * (hidden + (kind in _ROUTER_BIAS))
    shared += num_dense * 3 * hidden * int(config["intermediate_size"])
    shared += num_sparse * (router + int(config.get("n_shared_experts") or 0) * expert)
    active = int(config["num_experts_per_tok"])
    return Parameters(0 if tied else table, table, shared, num_sparse * expert, num_experts, active)


_NUM_EXPERTS_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")


def _attention_parameters(config: Mapping[str, Any], kind: str, latent: Latent | None) -> int:
    """Of one layer."""
    hidden, num_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    if latent:
        query_dim = num_heads * (latent.nope_dim + latent.rope_dim)
        rank = config.get("q_lora_rank")
        query = hidden * rank + rank + rank * query_dim if rank else hidden * query_dim
        down = hidden * (latent.rank + latent.rope_dim) + latent.rank
        up = latent.rank * num_heads * (latent.nope_dim + latent.value_dim)
        return int(query + down + up + num_heads * latent.value_dim * hidden)
    head_dim = int(config.get("head_dim") or hidden // num_heads)
    query, keys = num_heads * head_dim, int(config.get("num_key_value_heads") or num_heads) * head_dim
    count = hidden * (2 * query + 2 * keys)
    if kind in _QKV_BIAS or config.get("attention_bias"):
        count += query + 2 * keys
    if config.get("attention_bias"):
        count += hidden
    if kind in _QK_NORM:
        count += 2 * head_dim
    if kind == "gpt_oss":  # one learned sink a head
        count += num_heads
    return count


def _weight_format(config: Mapping[str, Any]) -> str:
    method = str((config.get("quantization_config") or {}).get("quant_method", ""))
    if method == "fp8":
        return "fp8"
    if method == "mxfp4":
        return "mxfp4"
    if method in ("awq", "gptq"):
        return "int4" if int(config["quantization_config"].get("bits", 4)) == 4 else "int8"
    if method:
        raise ValueError(f"weights quantized with {method!r}; give a weight format")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "bf16", "float32": "fp32"}[dtype]
