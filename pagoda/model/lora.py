"""LoRA adapters: small changes to a model's matrices, chosen by each request and applied to its rows alone.

    rows of a step    base  A  A  base  B          out = x W^T, for all rows at once
    AdapterRows       -     0  0  -     1          out[rows of A] += (x[rows of A] A^T) (scale B)^T, for each adapter

An adapter is a folder as PEFT saves it: `adapter_config.json` and `adapter_model.safetensors` (Hu et al., 2021). If its
config has `alora_invocation_tokens`, it is an activated LoRA (Greenewald et al., 2025): it changes nothing before the
last place where these tokens stand in the prompt, so what comes before has the base model's KV.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from pagoda.errors import InvalidRequest, UnsupportedModel, WeightsError
from pagoda.files import content_hash
from pagoda.model.spec import ModelSpec
from pagoda.model.tokenizer import read_json

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_NAME = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_(A|B)\.weight")
# Fields of adapter_config.json that change the numbers in a way not computed here, and the values that do not.
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora"), (False, None)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
    **dict.fromkeys(("modules_to_save", "layer_replication", "target_parameters"), ([], None)),
    "trainable_token_indices": ([], {}, None),
}


@dataclass(frozen=True, slots=True)
class Delta:
    """A change to rows `start` and on of one of the decoder's matrices: `b @ a`, of which `b` has the scale in it."""

    start: int
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Adapter:
    """A LoRA adapter in memory.

    Attributes:
        identity: the SHA-256 of all that decides its numbers: KV computed with it is kept under this, not under a name.
        layers: for each layer, the changes to each of LayerWeights' matrices.
        invocation_tokens: what activates it; None if it is active from the first token on.
    """

    identity: str
    layers: tuple[Mapping[str, tuple[Delta, ...]], ...]
    invocation_tokens: npt.NDArray[np.int64] | None

    def first_token(self, prompt: npt.NDArray[np.integer]) -> int:
        """The position from which on it changes a prompt's KV.

        Raises:
            InvalidRequest: the prompt does not have the tokens that activate it.
        """
        invocation = self.invocation_tokens
        if invocation is None:
            return 0
        starts = np.flatnonzero(prompt[: max(0, prompt.size - invocation.size + 1)] == invocation[0])
        for start in starts[::-1].tolist():
            if np.array_equal(prompt[start : start + invocation.size], invocation):
                return int(start)
        raise InvalidRequest(
            f"this adapter is activated by the tokens {invocation.tolist()[:16]}, and the prompt does not have them",
            param="model",
        )


class AdapterRows:
    """Which rows of a step belong to which adapter.

    Args:
        adapters: each adapter of the step, once.
        which: int64 `[num_rows]`, an index into them, or -1 for the base model's rows.
    """

    def __init__(self, adapters: Sequence[Adapter], which: torch.Tensor) -> None:
        self._adapters = adapters
        self._which = which
        self._rows = [torch.nonzero(which == index).flatten() for index in range(len(adapters))]

    @classmethod
    def of(cls, of_rows: Sequence[Adapter | None], device: torch.device) -> AdapterRows | None:
        """The rows of a step by the adapter of each; None if none has one."""
        places = {adapter: place for place, adapter in enumerate(dict.fromkeys(filter(None, of_rows)))}
        which = [-1 if adapter is None else places[adapter] for adapter in of_rows]
        return cls(list(places), torch.tensor(which, dtype=torch.int64, device=device)) if places else None

    def select(self, rows: torch.Tensor) -> AdapterRows:
        """What remains when only `rows` go on."""
        return AdapterRows(self._adapters, self._which[rows])

    def add(self, out: torch.Tensor, x: torch.Tensor, layer: int, matrix: str) -> None:
        """Add each adapter's part to a product. Mutates `out`.

        Args:
            out: `[num_rows, out_features]`, the base model's product.
            x: `[num_rows, in_features]`, what it was computed from.
            matrix: the field of LayerWeights.
        """
        for adapter, rows in zip(self._adapters, self._rows, strict=True):
            deltas = adapter.layers[layer].get(matrix, ())
            if not deltas or not len(rows):
                continue
            own = x[rows]
            for delta in deltas:
                part = out[:, delta.start : delta.start + len(delta.b)]
                part.index_add_(0, rows, own @ delta.a.T @ delta.b.T)


def adapter_config(path: Path) -> dict[str, Any]:
    """The config of an adapter's folder. Reads no weights.

    Raises:
        ModelError: a file is missing, or the config is corrupt.
    """
    config = read_json(path / _CONFIG)
    if not config or not (path / _WEIGHTS).is_file():
        raise WeightsError(f"{path} is not an adapter: it needs {_CONFIG} and {_WEIGHTS}, as PEFT saves them")
    return config


def load_adapter(path: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Adapter:
    """Read an adapter's folder and check it against the model.

    Raises:
        WeightsError: a file is missing, corrupt, or does not fit the model.
        UnsupportedModel: it is more than a LoRA on the layers' matrices.
    """
    config = adapter_config(path)
    for name, harmless in _HARMLESS.items():
        if config.get(name, harmless[0]) not in harmless:
            raise UnsupportedModel(f"{path}: adapters with {name}={config[name]!r} are not supported")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise WeightsError(f"{path / _CONFIG} needs a positive r and a lora_alpha")
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    tensors = _read(path / _WEIGHTS)
    layers = tuple(_layer(spec, tensors, index, rank, scale, dtype, device) for index in range(spec.num_layers))
    if tensors:
        raise WeightsError(f"{path / _WEIGHTS} holds tensors that the model has no place for: {sorted(tensors)[:3]}")
    digest = hashlib.sha256()
    for file in (_CONFIG, _WEIGHTS):
        digest.update(f"{file}\0{content_hash(path / file)}\n".encode())
    return Adapter(digest.hexdigest(), layers, _invocation(config, path))


def _invocation(config: Mapping[str, Any], path: Path) -> npt.NDArray[np.int64] | None:
    tokens = config.get("alora_invocation_tokens")
    if tokens is None:
        return None
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
        raise WeightsError(f"{path / _CONFIG}: alora_invocation_tokens must be a list of token ids")
    return np.array(tokens, dtype=np.int64)


def _read(file: Path) -> dict[tuple[int, str, str], torch.Tensor]:
    """The tensors by layer, module and A or B."""
    tensors: dict[tuple[int, str, str], torch.Tensor] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - a safe_open handle is no mapping
                match = _NAME.fullmatch(name)
                if match is None:
                    raise UnsupportedModel(f"{file} holds {name!r}, which is no LoRA of a layer's matrix")
                tensors[int(match[1]), match[2], match[3]] = opened.get_tensor(name)
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{file} is truncated or corrupt: {error}") from error
    return tensors


def _layer(
    spec: ModelSpec,
    tensors: dict[tuple[int, str, str], torch.Tensor],
    index: int,
    rank: int,
    scale: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Mapping[str, tuple[Delta, ...]]:
    """The changes to one layer's matrices; takes its tensors out of `tensors`."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matrices: dict[str, tuple[int, dict[str, int]]] = {  # the decoder's, their inputs, and whose outputs they stack
        "qkv": (hidden, {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}),
        "output": (q_rows, {"o_proj": hidden}),
        "gate_up": (hidden, {"gate_proj": inner, "up_proj": inner}),
        "down": (inner, {"down_proj": hidden}),
    }
    changes: dict[str, tuple[Delta, ...]] = {}
    for matrix, (num_inputs, modules) in matrices.items():
        start, deltas = 0, []
        for module, num_outputs in modules.items():
            a, b = tensors.pop((index, module, "A"), None), tensors.pop((index, module, "B"), None)
            if a is not None or b is not None:
                if a is None or b is None or a.shape != (rank, num_inputs) or b.shape != (num_outputs, rank):
                    found = [None if each is None else list(each.shape) for each in (a, b)]
                    raise WeightsError(
                        f"layer {index}'s {module}: lora_A and lora_B are {found[0]} and {found[1]}, "
                        f"the model calls for {[rank, num_inputs]} and {[num_outputs, rank]}"
                    )
                deltas.append(Delta(start, a.to(device, dtype), (b.float() * scale).to(device, dtype)))
            start += num_outputs
        if deltas:
            changes[matrix] = tuple(deltas)
    return changes
