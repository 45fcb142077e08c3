"""load_model: a name -> everything needed to run the model."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pagoda.errors import ConfigError, WeightsError
from pagoda.files import Progress
from pagoda.kernels import has_matrix_tiles
from pagoda.model.decoder import Decoder
from pagoda.model.gguf import convert_gguf, gguf_identity
from pagoda.model.progress import terminal_progress
from pagoda.model.registry import resolve
from pagoda.model.spec import ModelSpec
from pagoda.model.tokenizer import Tokenizer, read_json
from pagoda.model.weights import WEIGHTS_FORMATS, SafetensorsFolder, load_weights, weights_identity

Check = Callable[[ModelSpec, torch.dtype], object]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    `weights_identity` is the SHA-256 of all that decides its numbers: it enters every BlockKey.
    """

    name: str
    spec: ModelSpec
    decoder: Decoder
    tokenizer: Tokenizer
    weights_identity: str


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    weights_format: str = "full",
    max_model_len: int | None = None,
    check: Check | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model by name (see registry.py).

    Args:
        name: `smollm2`, a folder, a `.gguf` file or a hub id.
        dtype: `float32`, `bfloat16`, or `auto`: what the weights were saved in, if it is one of those, else float32;
            bfloat16 for a GGUF file, whose quantized weights hold no more.
        device: where weights and computation go.
        weights_format: `full`, or `int8`: matrices and embeddings are quantized as they are read, for half the bytes.
        max_model_len: a shorter context than the model's own, in tokens.
        check: told the model's spec and the dtype of its activations before any weight is read; what it raises ends it.
        progress: told about slow steps; by default a bar on stderr if that is a terminal.

    Raises:
        ModelNotFound: no such model.
        UnsupportedModel: an architecture that no decoder here knows.
        WeightsError: missing, truncated, corrupt or ill-fitting weights.
        ConfigError: `dtype`, `weights_format` or `max_model_len` is out of range.
    """
    if dtype not in (*_DTYPES, "auto"):
        raise ConfigError(f"dtype must be auto, {' or '.join(_DTYPES)}, got {dtype!r}")
    if weights_format not in WEIGHTS_FORMATS:
        raise ConfigError(
            f"`--weights` (in Python `weights_format`) must be {' or '.join(WEIGHTS_FORMATS)}, got {weights_format!r}"
        )
    path = resolve(name)
    if progress is not None:
        return _load(name, path, dtype, torch.device(device), weights_format, max_model_len, check, progress)
    with terminal_progress() as bar:
        return _load(name, path, dtype, torch.device(device), weights_format, max_model_len, check, bar)


def _load(
    name: str,
    path: Path,
    dtype: str,
    device: torch.device,
    weights_format: str,
    max_model_len: int | None,
    check: Check | None,
    progress: Progress,
) -> LoadedModel:
    identity = None
    folder = path
    if path.is_file():
        dtype = "bfloat16" if dtype == "auto" else dtype
        folder = convert_gguf(path, _DTYPES[dtype], progress)
        identity = gguf_identity(path)
    config = read_json(folder / "config.json")
    if not config:
        raise WeightsError(f"{folder} has no config.json")
    spec = _with_context(ModelSpec.from_hf_config(config), max_model_len)
    compute = _DTYPES.get(spec.dtype if dtype == "auto" else dtype, torch.float32)
    if check is not None:
        check(spec, compute)
    tokenizer = Tokenizer.from_folder(folder, spec.eos_ids)
    source = SafetensorsFolder(folder)
    weights = load_weights(
        spec,
        source,
        dtype=compute,
        device=device,
        weights_format=weights_format,
        compacts=has_matrix_tiles(),
        progress=progress,
    )
    identity = identity or weights_identity(source, progress)
    if weights_format != "full":
        identity = hashlib.sha256(f"{identity} as {weights_format}".encode()).hexdigest()
    return LoadedModel(name, spec, Decoder(spec, weights), tokenizer, identity)


def _with_context(spec: ModelSpec, max_model_len: int | None) -> ModelSpec:
    if max_model_len is None:
        return spec
    if not 1 <= max_model_len <= spec.max_context:
        raise ConfigError(
            f"`--max-model-len` (in Python `max_model_len`) must be between 1 and the model's {spec.max_context}, "
            f"got {max_model_len}"
        )
    return dataclasses.replace(spec, max_context=max_model_len)
