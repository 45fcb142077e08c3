"""Safetensors folder -> DecoderWeights: names, shapes and fusion. Pickled formats are never opened.

    model.safetensors, or model.safetensors.index.json naming the shard that holds each tensor
    q_proj, k_proj, v_proj -> qkv ; gate_proj, up_proj -> gate_up
    with weights_format "int8", each matrix -> int8 codes and a scale per output; biases and norms stay as they are
    else, where the kernels take them so, each matrix in BF16 -> the same in 12 bits a value

Every tensor that the spec calls for must be there with exactly its shape, and every tensor there must be called for: a
model with a bias that nobody adds would run, and be wrong.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pagoda.errors import KernelError, WeightsError
from pagoda.files import Progress, content_hash, no_progress
from pagoda.kernels import CompactMatrix, Int8Matrix, Matrix
from pagoda.memory import Shelf
from pagoda.model.decoder import DecoderWeights, LayerWeights
from pagoda.model.spec import ModelSpec

WEIGHTS_FORMATS = ("full", "int8")

_CACHE_LINE = 64
_INDEX = "model.safetensors.index.json"
# Buffers that old checkpoints stored and that are computed here.
_RECOMPUTED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


class SafetensorsFolder:
    """The tensors of a folder by name, read from memory-mapped shards when asked for.

    Raises:
        WeightsError: no safetensors here, a shard missing or cut short, an index that does not agree with its shards.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shards: dict[str, Any] = {}
        self._shard_of = self._locate()

    @property
    def names(self) -> frozenset[str]:
        """Every tensor in the folder."""
        return frozenset(self._shard_of)

    @property
    def files(self) -> list[Path]:
        """The shards, sorted."""
        return sorted({self.folder / shard for shard in self._shard_of.values()})

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor, which must have this shape."""
        if name not in self._shard_of:
            raise WeightsError(f"{self.folder} has no tensor {name!r}")
        shard = self._shards[self._shard_of[name]]
        found = tuple(shard.get_slice(name).get_shape())
        if found != shape:
            raise WeightsError(f"{name} has shape {list(found)}, the config calls for {list(shape)}")
        tensor: torch.Tensor = shard.get_tensor(name)
        if not tensor.is_floating_point():
            raise WeightsError(f"{name} holds {tensor.dtype}, not floating-point weights")
        # Files align tensors to 8 bytes at most. Rows that straddle cache lines halve the speed of the matrix kernels.
        return tensor if tensor.data_ptr() % _CACHE_LINE == 0 else tensor.clone()

    def _locate(self) -> Mapping[str, str]:
        index = self.folder / _INDEX
        if index.is_file():
            shard_of = _read_index(index)
            for shard in sorted(set(shard_of.values())):
                self._open(shard)
            for name, shard in shard_of.items():
                if name not in self._shards[shard].keys():  # noqa: SIM118 - a safe_open handle is no mapping
                    raise WeightsError(f"{index.name} places {name!r} in {shard}, which does not hold it")
            return shard_of
        if not (self.folder / "model.safetensors").is_file():
            raise WeightsError(_nothing_to_load(self.folder))
        self._open("model.safetensors")
        return dict.fromkeys(self._shards["model.safetensors"].keys(), "model.safetensors")

    def _open(self, shard: str) -> None:
        path = self.folder / shard
        if not path.is_file():
            raise WeightsError(f"{path} is missing")
        try:
            self._shards[shard] = safe_open(path, framework="pt")
        except (SafetensorError, OSError, ValueError) as error:
            raise WeightsError(f"{path} is truncated or corrupt: {error}") from error


def _read_index(index: Path) -> dict[str, str]:
    try:
        shard_of = json.loads(index.read_text())["weight_map"]
        valid = isinstance(shard_of, dict) and all(
            # A shard is a file of this folder: an index from a stranger must not reach others.
            isinstance(shard, str) and Path(shard).name == shard and shard.endswith(".safetensors")
            for shard in shard_of.values()
        )
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{index} is not a safetensors index: {error!r}") from error
    if not valid:
        raise WeightsError(f"{index} names shards that are not .safetensors files of its own folder")
    return dict(shard_of)


def _nothing_to_load(folder: Path) -> str:
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickled:
        return (
            f"{folder} holds {pickled[0]}, a pickle that may run code when opened; only safetensors and GGUF are read. "
            "Convert it with save_pretrained(..., safe_serialization=True) where you trust it"
        )
    return f"{folder} holds neither model.safetensors nor {_INDEX}"


def weights_identity(source: SafetensorsFolder, progress: Progress = no_progress) -> str:
    """One hash over the full content of a folder's config and shards, names included."""
    digest = hashlib.sha256()
    for path in [source.folder / "config.json", *source.files]:
        digest.update(f"{path.name}\0{content_hash(path, progress)}\n".encode())
    return digest.hexdigest()


def load_weights(
    spec: ModelSpec,
    source: SafetensorsFolder,
    *,
    dtype: torch.dtype,
    device: torch.device,
    weights_format: str = "full",
    compacts: bool = False,
    progress: Progress = no_progress,
) -> DecoderWeights:
    """Read, check, convert and fuse every tensor of a model; `weights_format` is one of WEIGHTS_FORMATS.

    With `compacts`, matrices that stay in bfloat16 and CPU memory become CompactMatrix where that saves bytes.

    Raises:
        WeightsError: a tensor is missing, superfluous or of the wrong shape, or cannot be quantized.
    """
    compacts = compacts and dtype == torch.bfloat16 and device.type == "cpu"
    loader = _Loader(source, dtype, device, weights_format, compacts, progress)
    hidden = spec.hidden_size
    embedding = loader.matrix([("model.embed_tokens.weight", (spec.vocab_size, hidden))])
    weights = DecoderWeights(
        embedding=embedding,
        layers=tuple(_layer(spec, loader, f"model.layers.{index}.") for index in range(spec.num_layers)),
        final_norm=loader.tensor("model.norm.weight", (hidden,), offset=spec.norm_offset),
        lm_head=embedding if spec.tie_embeddings else loader.matrix([("lm_head.weight", (spec.vocab_size, hidden))]),
    )
    superfluous = set(loader.unread())
    if spec.tie_embeddings:
        superfluous.discard("lm_head.weight")
    if superfluous:
        some = ", ".join(sorted(superfluous)[:3])
        raise WeightsError(
            f"{source.folder} holds {len(superfluous)} tensors that the config does not call for: {some}"
        )
    return weights


class _Loader:
    """Reads tensors into their final place, dtype and device, and keeps count."""

    def __init__(
        self,
        source: SafetensorsFolder,
        dtype: torch.dtype,
        device: torch.device,
        weights_format: str,
        compacts: bool,
        progress: Progress,
    ) -> None:
        self._source, self._dtype, self._device, self._progress = source, dtype, device, progress
        self._quantizes, self._compacts = weights_format == "int8", compacts
        self._shelf = Shelf()
        self._read: set[str] = set()

    def tensor(self, name: str, shape: tuple[int, ...], *, offset: float = 0.0) -> torch.Tensor:
        return self.fused([(name, shape)], offset=offset)

    def matrix(self, parts: list[tuple[str, tuple[int, ...]]]) -> Matrix:
        """As `fused`, then quantized or compact as asked for, and in memory that is fast to read."""
        stays = not (self._quantizes or self._compacts)
        whole = self.fused(parts, shelved=stays)
        if stays:
            return whole
        if self._quantizes:
            try:
                codes = Int8Matrix.quantize(whole)
            except KernelError as error:
                raise WeightsError(f"{parts[0][0]}: {error}") from error
            return Int8Matrix(self._shelved(codes.codes), codes.scales)
        return CompactMatrix.of(whole, self._shelf.take) or self._shelved(whole)

    def fused(
        self, parts: list[tuple[str, tuple[int, ...]]], *, offset: float = 0.0, shelved: bool = False
    ) -> torch.Tensor:
        """Tensors stacked along their first axis, plus `offset`; each is copied once, straight to its place."""
        rows = sum(shape[0] for _, shape in parts)
        whole = self._empty((rows, *parts[0][1][1:]), self._dtype, shelved)
        start = 0
        for name, shape in parts:
            values = self._source.read(name, shape)
            whole[start : start + shape[0]].copy_(values.float() + offset if offset else values)
            start += shape[0]
            self._read.add(name)
            self._progress("loading weights", len(self._read), len(self._source.names))
        return whole

    def _shelved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if not tensor.is_cpu else self._empty(tensor.shape, tensor.dtype, shelved=True).copy_(tensor)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype, shelved: bool) -> torch.Tensor:
        """On the shelf, which host memory has, or where torch puts it."""
        if not shelved or self._device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self._device)
        return torch.from_numpy(self._shelf.take(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)

    def unread(self) -> Iterator[str]:
        return (name for name in self._source.names - self._read if not _RECOMPUTED.search(name))


def _layer(spec: ModelSpec, loader: _Loader, prefix: str) -> LayerWeights:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv = [("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)]
    gate_up = [("gate_proj", inner), ("up_proj", inner)]

    def matrix(block: str, parts: list[tuple[str, int]], columns: int) -> Matrix:
        return loader.matrix([(f"{prefix}{block}.{part}.weight", (rows, columns)) for part, rows in parts])

    def bias(present: bool, block: str, parts: list[tuple[str, int]]) -> torch.Tensor | None:
        return loader.fused([(f"{prefix}{block}.{part}.bias", (rows,)) for part, rows in parts]) if present else None

    def norm(name: str, size: int = hidden) -> torch.Tensor:
        return loader.tensor(f"{prefix}{name}.weight", (size,), offset=spec.norm_offset)

    def head_norm(name: str) -> torch.Tensor | None:
        return norm(f"self_attn.{name}", spec.head_dim) if spec.qk_norm else None

    # Gemma calls the norm after attention what others call the one before the MLP.
    sandwich = spec.sandwich_norms
    return LayerWeights(
        input_norm=norm("input_layernorm"),
        qkv=matrix("self_attn", qkv, hidden),
        qkv_bias=bias(spec.qkv_bias, "self_attn", qkv),
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
        output=matrix("self_attn", [("o_proj", hidden)], q_rows),
        output_bias=bias(spec.output_bias, "self_attn", [("o_proj", hidden)]),
        attention_out_norm=norm("post_attention_layernorm") if sandwich else None,
        mlp_norm=norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"),
        gate_up=matrix("mlp", gate_up, hidden),
        gate_up_bias=bias(spec.mlp_bias, "mlp", gate_up),
        down=matrix("mlp", [("down_proj", hidden)], inner),
        down_bias=bias(spec.mlp_bias, "mlp", [("down_proj", hidden)]),
        mlp_out_norm=norm("post_feedforward_layernorm") if sandwich else None,
    )
