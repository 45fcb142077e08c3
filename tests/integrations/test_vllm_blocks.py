"""vLLM's tensors as blocks of bytes, and the names of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pagoda.errors import ConfigError
from pagoda.integrations.vllm.block_io import VllmBlocks
from pagoda.integrations.vllm.keys import RequestKeys, fingerprint, scope_of, weights_identity
from pagoda.integrations.vllm.settings import read_settings
from pagoda.kv.keys import KeyChain, Scope
from tests.integrations.fake_vllm import FakeRequest

BLOCKS = 6


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).bfloat16()


def layouts(device: str) -> dict[str, torch.Tensor]:
    """The orders of axes that vLLM's caches come in, `[B, H, N, C]` each."""
    plain = numbers(BLOCKS, 2, 4, 8)
    states = numbers(BLOCKS, 4, 2, 8).permute(0, 2, 1, 3)  # tokens before heads
    packed = numbers(BLOCKS, 3, 2, 4, 8)[:, 1]  # one of three layers within each block
    kernel = numbers(3 * BLOCKS, 2, 4, 8)  # three kernel blocks in a block
    return {name: tensor.to(device) for name, tensor in
            {"plain": plain, "states": states, "packed": packed, "kernel": kernel}.items()}  # fmt: skip


@pytest.mark.parametrize("where", ["host", "as on a device", "cuda"])
def test_a_block_comes_back_as_it_was_and_no_other_changes(where: str) -> None:
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    caches = layouts("cuda" if where == "cuda" else "cpu")
    blocks = VllmBlocks(caches, BLOCKS)
    if where == "as on a device":
        blocks._host = None
    assert blocks.block_bytes == 2 * (64 + 64 + 64 + 3 * 64)
    before = {name: cache.clone() for name, cache in caches.items()}
    rows = np.empty((2, blocks.block_bytes), dtype=np.uint8)
    blocks.export_blocks([4, 1], rows)
    for cache in caches.values():
        cache.zero_()
    blocks.import_blocks([1, 5], rows[::-1])
    for name, cache in caches.items():
        now, was = (c.unflatten(0, (BLOCKS, -1)) for c in (cache, before[name]))
        assert torch.equal(now[1], was[1]), name
        assert torch.equal(now[5], was[4]), name
        assert not now[[0, 2, 3, 4]].any(), name


def test_layers_that_share_memory_are_taken_once() -> None:
    cache = numbers(BLOCKS, 2, 4, 8)
    assert VllmBlocks({"a": cache, "b": cache}, BLOCKS).block_bytes == VllmBlocks({"a": cache}, BLOCKS).block_bytes


@pytest.mark.parametrize("cache", [
    numbers(2, BLOCKS, 4, 8).permute(1, 0, 2, 3),  # keys of all blocks, then values of all blocks
    numbers(BLOCKS + 1, 2, 4, 8),
])  # fmt: skip
def test_a_cache_whose_blocks_are_in_pieces_is_refused(cache: torch.Tensor) -> None:
    with pytest.raises(ConfigError):
        VllmBlocks({"layer": cache}, BLOCKS)


def keys(request: FakeRequest, scope: Scope = Scope()) -> RequestKeys:
    return RequestKeys(KeyChain(bytes(32)), request, scope, 4)  # type: ignore[arg-type]


def test_keys_do_not_depend_on_the_order_in_which_they_are_asked_for() -> None:
    request = FakeRequest(list(range(18)))
    at_once = keys(request).between(0, 4)
    in_parts = keys(request)
    assert [*in_parts.between(0, 1), *in_parts.between(1, 4)] == at_once
    assert in_parts.between(2, 3) == at_once[2:3]
    assert keys(FakeRequest([99, *range(1, 18)])).between(3, 4) != at_once[3:]


@dataclass
class Picture:
    identifier: str
    offset: int
    length: int

    @property
    def mm_position(self) -> SimpleNamespace:
        return SimpleNamespace(offset=self.offset, length=self.length)


def test_a_picture_changes_its_blocks_and_those_after_it() -> None:
    tokens = [0] * 16
    plain, cat, dog, later = (
        keys(FakeRequest(tokens, mm_features=pictures)).between(0, 4)
        for pictures in ([], [Picture("cat", 5, 4)], [Picture("dog", 5, 4)], [Picture("cat", 6, 4)])
    )
    assert plain[0] == cat[0] == dog[0] == later[0]
    assert len({plain[1], cat[1], dog[1], later[1]}) == 4
    assert len({plain[3], cat[3], dog[3], later[3]}) == 4


def test_an_adapter_is_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "adapter"
    folder.mkdir()
    request = FakeRequest([1], lora_request=SimpleNamespace(lora_path=str(folder), lora_name="a"))
    (folder / "adapter_model.safetensors").write_bytes(b"one")
    one = scope_of(request, "")  # type: ignore[arg-type]
    (folder / "adapter_model.safetensors").write_bytes(b"other")
    assert one != scope_of(request, "")  # type: ignore[arg-type]
    request.lora_request.lora_path = str(tmp_path / "nowhere")
    assert scope_of(request, "") is None  # type: ignore[arg-type]


def test_weights_are_named_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_CACHE", str(tmp_path / "cache"))
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
    assert weights_identity(str(one)) == weights_identity(str(other))
    (other / "model.safetensors").write_bytes(b"others!")
    assert weights_identity(str(one)) != weights_identity(str(other))
    (other / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="identity"):
        weights_identity(str(other))


def test_a_fingerprint_is_of_all_facts() -> None:
    assert fingerprint({"a": "1", "b": "2"}) == fingerprint({"b": "2", "a": "1"}) != fingerprint({"a": "1", "b": "3"})


@pytest.mark.parametrize("extra", [
    {}, {"tiers": "dram:1GiB"}, {"tiers": []}, {"tiers": ["dram"]}, {"tiers": ["dram:1MiB"], "secrets": "x"},
    {"tiers": ["dram:1MiB"], "secret": 3}, {"tiers": ["dram:1MiB?write=back"]},
])  # fmt: skip
def test_settings_that_cannot_work_are_refused(extra: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        read_settings(extra, {})
