"""Random LoRA adapters as PEFT saves them, and their merged twin: the same model with W + B A * scale."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    model: transformers.PreTrainedModel,
    folder: Path,
    seed: int = 1,
    *,
    rank: int = 4,
    alpha: int = 6,
    modules: tuple[str, ...] = ALL,
    **config: Any,
) -> transformers.PreTrainedModel:
    """Write a random adapter of `model` to `folder`; return the merged model."""
    merged = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    tensors = {}
    for name, linear in merged.named_modules():
        if name.split(".")[-1] not in modules or not isinstance(linear, torch.nn.Linear):
            continue
        a = torch.randn(rank, linear.in_features, generator=generator) * 0.2
        b = torch.randn(linear.out_features, rank, generator=generator) * 0.2
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        with torch.no_grad():
            linear.weight += scale * b @ a
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return merged
