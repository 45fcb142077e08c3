"""Small random models in folders, each beside the Transformers model that it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagoda import Engine
from tests.model import models, tokenizers_made_here

CONTEXT = 256


def make_model(folder: Path, variant: str, **changes: Any) -> tuple[Path, Any]:
    tokenizer = tokenizers_made_here.byte_level()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": CONTEXT}
    reference = models.build(variant, **(sizes | changes))
    return tokenizers_made_here.save(tokenizer, models.save(reference, folder)), reference


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Two layers that see everything, two that see 24 tokens."""
    changes = {"sliding_window": 24, "num_hidden_layers": 4, "max_window_layers": 2}
    return make_model(tmp_path_factory.mktemp("hybrid"), "qwen2-mixed-windows", **changes)


@pytest.fixture(scope="session")
def window_first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A window of 24 tokens in every other layer, from the first on."""
    kinds = ["sliding_attention", "full_attention"] * 2
    changes = {"sliding_window": 24, "num_hidden_layers": 4, "layer_types": kinds}
    return make_model(tmp_path_factory.mktemp("window-first"), "qwen2-mixed-windows", **changes)


def make_engine(folder: Path, num_blocks: int = 120, **options: Any) -> Engine:
    """An engine of blocks of 8 tokens."""
    settings: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 16, "token_budget": 48, "block_size": 8}
    settings |= options
    if "kv_memory" not in settings:
        stride = _stride(str(folder), settings["block_size"])
        settings["kv_memory"] = num_blocks * stride
    return Engine(str(folder), progress=False, **settings)


_STRIDES: dict[tuple[str, int], int] = {}


def _stride(folder: str, block_size: int) -> int:
    if (folder, block_size) not in _STRIDES:
        probe = Engine(folder, progress=False, dtype="float32", block_size=block_size, kv_memory="2MiB")
        _STRIDES[folder, block_size] = probe.core.cache.layout.pool_block_bytes
    return _STRIDES[folder, block_size]


def text(length: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, length).tolist()
