"""Keys at new positions: equal to what the decoder's kernel writes there, for every variant of its frequencies."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from pagoda.blend.rotate import Rotations, gather, move, turn_keys, turns
from pagoda.errors import UnsupportedModel
from pagoda.kernels import KVView, rope_write_kv
from pagoda.model.decoder import _rotations
from pagoda.model.rope import RopeSpec

HEAD_DIM, KV_HEADS, MAX = 16, 2, 4096
BASE = {"max_position_embeddings": MAX}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 4 for i in range(HEAD_DIM // 2)],
    "long_factor": [1.0 + i / 4 for i in range(HEAD_DIM // 2)],
    "original_max_position_embeddings": 512,
    "factor": 8.0,
}
ROPES = {
    "default": {},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "factors": LONGROPE,
}


def tables(name: str) -> Rotations:
    rope = RopeSpec.from_hf_config({**BASE, "rope_parameters": {"rope_theta": 5000.0, **ROPES[name]}})
    spec = SimpleNamespace(max_context=MAX, head_dim=HEAD_DIM)
    return Rotations(*_rotations(spec, rope, torch.device("cpu")))


def view(dtype: torch.dtype = torch.float32) -> KVView:
    return KVView(*(torch.full((40, KV_HEADS, 4, HEAD_DIM), torch.nan, dtype=dtype) for _ in range(2)))


def written(rope: Rotations, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> KVView:
    """The pool after the kernel wrote rows at slots 0, 1, 2, ..."""
    pool = view()
    rope_write_kv(keys[:, :0], keys, values, rope.cos, rope.sin, positions, pool, torch.arange(len(keys)))
    return pool


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("shift", [0, 1, 777, MAX - 50])
def test_a_moved_key_is_the_one_computed_there(name: str, shift: int) -> None:
    torch.manual_seed(1)
    rope = tables(name)
    keys, values = torch.randn(50, KV_HEADS, HEAD_DIM), torch.randn(50, KV_HEADS, HEAD_DIM)
    old = torch.arange(50)
    source = written(rope, keys, values, old)
    expected = written(rope, keys, values, old + shift)
    turn = turns(rope, old, old + shift)
    rows = torch.arange(50)
    targets = 80 + torch.randperm(50)
    move([source], [turn], [rows], [targets])
    moved_keys, moved_values = gather(source, targets)
    there, _ = gather(expected, rows)
    torch.testing.assert_close(moved_keys, there, rtol=0, atol=2e-6)
    torch.testing.assert_close(turn_keys(gather(source, rows)[0], turn), there, rtol=0, atol=2e-6)
    assert torch.equal(moved_values, values)
    if shift == 0:
        assert torch.equal(moved_keys, there)


def test_turns_go_back_and_add_up() -> None:
    rope = tables("yarn")
    keys = torch.randn(9, KV_HEADS, HEAD_DIM)
    a, b, c = (torch.randint(0, MAX, (9,)) for _ in range(3))
    there = turn_keys(keys, turns(rope, a, b))
    torch.testing.assert_close(turn_keys(there, turns(rope, b, a)), keys, rtol=0, atol=3e-6)
    torch.testing.assert_close(
        turn_keys(there, turns(rope, b, c)), turn_keys(keys, turns(rope, a, c)), rtol=0, atol=3e-6
    )
    torch.testing.assert_close(there.norm(dim=-1), keys.norm(dim=-1))


def test_only_the_targets_are_written() -> None:
    rope = tables("default")
    pool = written(rope, torch.randn(8, KV_HEADS, HEAD_DIM), torch.randn(8, KV_HEADS, HEAD_DIM), torch.arange(8))
    before = KVView(pool.keys.clone(), pool.values.clone())
    targets = torch.tensor([30, 21])
    move([pool], [turns(rope, torch.tensor([1, 2]), torch.tensor([100, 7]))], [torch.tensor([1, 2])], [targets])
    rest = torch.ones(160, dtype=torch.bool)
    rest[targets] = False
    for now, then in ((pool.keys, before.keys), (pool.values, before.values)):
        now, then = (x.transpose(1, 2).reshape(160, KV_HEADS, HEAD_DIM)[rest] for x in (now, then))
        assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0))


def test_bfloat16_keys_turn_with_one_rounding() -> None:
    rope = tables("default")
    pool = view(torch.bfloat16)
    keys = torch.randn(20, KV_HEADS, HEAD_DIM).bfloat16()
    rows = torch.arange(20)
    rope_write_kv(keys[:, :0], keys, keys, rope.cos, rope.sin, rows, pool, rows)
    turn = turns(rope, rows, rows + 300)
    move([pool], [turn], [rows], [rows + 100])
    expected = turn_keys(gather(pool, rows)[0], turn)
    torch.testing.assert_close(gather(pool, rows + 100)[0], expected.bfloat16(), rtol=0.01, atol=1e-6)


@pytest.mark.parametrize(
    "scaling",
    [{**LONGROPE, "long_factor": [2.0] * (HEAD_DIM // 2)}, {"rope_type": "made-up", "factor": 2.0}],
)
def test_frequencies_that_change_with_the_length_have_no_tables(scaling: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModel, match="change with the sequence length"):
        RopeSpec.from_hf_config({**BASE, "rope_parameters": {"rope_theta": 5000.0, **scaling}})


def test_every_field_of_a_rope_is_in_its_tables() -> None:
    """Turns come from tables alone: a field that changed keys in another way would break them."""
    rope = RopeSpec.from_hf_config({**BASE, "rope_parameters": {"rope_theta": 5000.0, **ROPES["yarn"]}})
    stretched = dataclasses.replace(rope, attention_factor=2 * rope.attention_factor)
    spec = SimpleNamespace(max_context=64, head_dim=HEAD_DIM)
    one, two = (Rotations(*_rotations(spec, r, torch.device("cpu"))) for r in (rope, stretched))
    old, new = torch.tensor([3, 9]), torch.tensor([40, 1])
    for a, b in zip(turns(one, old, new), turns(two, old, new), strict=True):
        torch.testing.assert_close(a, b)
