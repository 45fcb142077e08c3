"""Names of blocks outside vLLM: which model wrote them, for whom, after which tokens.

    fingerprint   weights (by content), all that vLLM knows of the model, layout of its cache, kind of processor
    scope         namespace + cache_salt + adapter (by content)
    key[i]        H(key[i-1], tokens of block i, images and audio in it)

vLLM's own block hashes name an adapter by its path and depend on a seed; these outlive processes and machines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pagoda.errors import ConfigError, WeightsError
from pagoda.files import content_hash
from pagoda.kv.keys import BlockKey, KeyChain, Scope

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


class VllmRequest(Protocol):
    """What is used of vLLM's `Request`."""

    request_id: str
    all_token_ids: Sequence[int]
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    prompt_token_ids: Sequence[int] | None
    prompt_embeds: Any
    mm_features: Sequence[Any]
    lora_request: Any
    cache_salt: str | None
    skip_reading_prefix_cache: bool
    kv_transfer_params: Mapping[str, Any] | None


def fingerprint(facts: Mapping[str, str]) -> bytes:
    """32 bytes that differ whenever stored blocks are not interchangeable."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).digest()


def weights_identity(model: str, revision: str | None = None) -> str:
    """SHA-256 over the content of a model's weights; each file is read once and remembered by size and time.

    Args:
        model: a folder, a file, or a name on the hub whose files are here already.

    Raises:
        ConfigError: the weights are nowhere on this machine.
        WeightsError: a file cannot be read.
    """
    path = Path(model)
    if not path.exists():
        path = _from_hub(model, revision)
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS)
    if not files:
        raise ConfigError(f'no weights in {path} to name blocks by; set "identity" in kv_connector_extra_config')
    return _hash_of(files)


def _from_hub(model: str, revision: str | None) -> Path:
    try:
        import huggingface_hub

        return Path(huggingface_hub.snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:
        raise ConfigError(
            f'the weights of {model!r} are not on this machine: set "identity" in kv_connector_extra_config'
        ) from error


def _hash_of(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{content_hash(file)}\n".encode())
    return digest.hexdigest()


def scope_of(request: VllmRequest, namespace: str) -> Scope | None:
    """Who may share a request's blocks; None if nobody can be told: embeddings as a prompt, an adapter not on disk."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return None
    adapter = ""
    if request.lora_request is not None:
        folder = Path(request.lora_request.lora_path)
        try:
            adapter = _hash_of(sorted(file for file in folder.iterdir() if file.is_file()))
        except (OSError, WeightsError):
            return None
    return Scope(namespace=namespace, salt=request.cache_salt or "", adapter=adapter)


class RequestKeys:
    """The keys of a request's whole blocks, made when they are first wanted and kept."""

    def __init__(self, chain: KeyChain, request: VllmRequest, scope: Scope, block_size: int) -> None:
        self._chain = chain
        self._request = request
        self._block_size = block_size
        self._last = chain.root(scope)
        self._keys: list[BlockKey] = []

    def between(self, first: int, stop: int) -> list[BlockKey]:
        """The keys of blocks `first` to before `stop`, all of whose tokens must be known."""
        known, size = len(self._keys), self._block_size
        if stop > known:
            tokens = np.array(self._request.all_token_ids[known * size : stop * size], dtype=np.int64)
            if self._request.mm_features:
                for index in range(known, stop):
                    own = tokens[(index - known) * size : (index - known + 1) * size]
                    self._last = self._chain.child(self._last, own, self._extra(index * size))
                    self._keys.append(self._last)
            else:
                self._keys += self._chain.chain(self._last, tokens, size)
                self._last = self._keys[-1]
        return self._keys[first:stop]

    def _extra(self, start: int) -> bytes:
        """Images and audio with a token in the block that begins at `start`, and where in it each begins."""
        parts = []
        for feature in self._request.mm_features:
            offset, length = feature.mm_position.offset - start, feature.mm_position.length
            if offset < self._block_size and offset + length > 0:
                parts.append([feature.identifier, offset])
        return json.dumps(parts).encode() if parts else b""
