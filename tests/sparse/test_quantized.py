"""kv_policy over a quantized pool: entries keep their codes, and what would have to change them is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagoda import Engine, SamplingParams
from pagoda.errors import ConfigError, InvalidRequest
from pagoda.kernels import dispatch
from pagoda.sparse.spec import parse_kv_policy
from tests.sparse.conftest import make_engine, text

FORMATS = ["int8", "fp8_e4m3", "int8/int4"]
POLICIES = {
    "h2o": {"name": "h2o", "budget": 40, "interval": 10},
    "snapkv": {"name": "snapkv", "budget": 40, "window": 16},
    "pyramid": {"name": "pyramid", "budget": 40, "window": 16},
}


def run(engine: Engine, prompt: list[int], policy: dict[str, Any] | str | None, count: int = 30) -> list[int]:
    wish = None if policy is None else parse_kv_policy(policy)
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, kv_policy=wish)
    [generation] = engine.generate([prompt], params)
    engine.core.cache.check()
    assert engine.core.cache.num_held_blocks == 0
    assert (generation.sparse is not None) == (wish is not None)
    return generation.completions[0].token_ids


@pytest.mark.parametrize("kv_format", FORMATS)
def test_entries_are_moved_as_they_are_stored(llama: tuple[Path, Any], kv_format: str) -> None:
    memory = make_engine(llama[0], kv_format=kv_format).core.sparsity.memory  # type: ignore[union-attr]
    view = memory.views[1]
    num_heads, size = view.keys.shape[1:3]
    old, new = np.array([7, 2, 9, 4], dtype=np.int32), np.array([2, 11], dtype=np.int32)
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 4 * size, num_heads, view.head_dim, generator=generator)
    slots = torch.from_numpy((old[:, None].astype(np.int64) * size + np.arange(size)).ravel())
    dispatch.write_kv(view, k, v, slots)
    order = [torch.randperm(4 * size, generator=generator)[: 2 * size - 3].sort().values for _ in range(num_heads)]
    keep = torch.stack(order)
    before = [part.clone() for part in view.parts()]
    memory.move(1, old, new, keep)
    for was, now in zip(before, view.parts(), strict=True):
        for head, kept in enumerate(keep.tolist()):
            for at, entry in enumerate(kept):
                source = was[int(old[entry // size]), head, entry % size]
                assert torch.equal(now[int(new[at // size]), head, at % size].float(), source.float())
        others = sorted(set(range(len(was))) - set(new.tolist()))
        as_bytes = [part.view(torch.uint8) if part.itemsize == 1 else part for part in (was, now)]
        assert torch.equal(as_bytes[0][others], as_bytes[1][others]), "no other block was written"


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("name", POLICIES)
def test_outputs_do_not_depend_on_preemption(llama: tuple[Path, Any], name: str, kv_format: str) -> None:
    prompt = text(110)
    alone = run(make_engine(llama[0], kv_format=kv_format), prompt, POLICIES[name])
    assert alone != run(make_engine(llama[0], kv_format=kv_format), prompt, None), "or nothing is shown here"
    engine = make_engine(llama[0], kv_format=kv_format)
    wish = parse_kv_policy(POLICIES[name])
    engine.core.add("r", prompt, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, kv_policy=wish))
    got: list[int] = []
    step = 0
    while engine.core.has_work:
        for each in engine.core.step():
            got += [token for delta in each.deltas for token in delta.token_ids]
        step += 1
        if step in (4, 15):
            engine.core._scheduler.preempt_all()
        engine.core.cache.check()
    assert got == alone
    assert engine.core.cache.num_held_blocks == 0


def test_blocks_come_back(llama: tuple[Path, Any]) -> None:
    engine = make_engine(llama[0], kv_format="int8")
    run(engine, text(120), POLICIES["snapkv"])
    assert engine.core.cache.stats.num_returned_blocks >= 15 - (40 + 30 + 7) // 8


@pytest.mark.parametrize("name", ["streaming:40", "quest:64", "infinigen:64"])
def test_policies_that_compute_with_keys_are_refused(llama: tuple[Path, Any], name: str) -> None:
    engine = make_engine(llama[0], kv_format="int8")
    with pytest.raises(InvalidRequest, match="computes with the keys"):
        run(engine, text(100), name)
    assert run(engine, text(100), None)
    with pytest.raises(ConfigError, match="computes with the keys"):
        make_engine(llama[0], kv_format="int8", kv_policy=name)


@pytest.mark.parametrize("kv_format", ["int4", "int4/int8"])
def test_keys_with_scales_of_a_block_are_refused(llama: tuple[Path, Any], kv_format: str) -> None:
    engine = make_engine(llama[0], kv_format=kv_format)
    with pytest.raises(InvalidRequest, match="a block at a time"):
        run(engine, text(100), POLICIES["h2o"])
    assert run(engine, text(100), None)
