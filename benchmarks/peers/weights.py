"""One export of the weights for all engines: a safetensors folder in BF16 and, of the same numbers, a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch

from pagoda.files import written_atomically
from pagoda.model.gguf import convert_gguf
from pagoda.model.registry import resolve

_BF16_FILE_TYPE = 32  # llama.cpp's number for "mostly BF16"


@dataclass(frozen=True, slots=True)
class Weights:
    """The same model for every kind of engine; without GGUF files if it came from elsewhere."""

    folder: Path
    gguf: Path | None
    gguf_bf16: Path | None


def export(model: str, cache: Path, tell: Callable[[str], None]) -> Weights:
    """The files of a model by name, made below `cache` if they are not there."""
    path = resolve(model)
    if path.is_dir():
        return Weights(path, None, None)
    tell(f"weights: {path.name} as safetensors in BF16")
    folder = convert_gguf(path, torch.bfloat16)
    target = cache / "weights" / f"{folder.name}.gguf"
    if not target.is_file():
        tell(f"weights: {path.name} as GGUF in BF16")
        target.parent.mkdir(parents=True, exist_ok=True)
        with written_atomically(target) as temporary:
            write_bf16_gguf(path, temporary)
    return Weights(folder, path, target)


def write_bf16_gguf(source: Path, target: Path) -> None:
    """Write a GGUF file anew with matrices in BF16; vectors, which llama.cpp wants in FP32, hold BF16 values too."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    writer.add_file_type(_BF16_FILE_TYPE)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        values = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type))).to(torch.bfloat16)
        if values.dim() < 2:
            writer.add_tensor(tensor.name, values.float().numpy())
        else:
            raw = values.view(torch.uint8).numpy()
            writer.add_tensor(tensor.name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
