"""Policies where the decoder runs all layers in one native call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagoda import SamplingParams
from pagoda.engine.outputs import Generation
from pagoda.engine.sparse.hook import SparseHook
from pagoda.sparse.spec import parse_kv_policy
from tests.sparse.conftest import make_engine, make_model, text

NUM_PROMPT, NUM_OUTPUT = 120, 24
POLICIES: dict[str, dict[str, Any] | None] = {
    "full": None,
    "streaming": {"name": "streaming", "budget": 40, "interval": 8},
    "h2o": {"name": "h2o", "budget": 40, "interval": 8},
    "pyramid": {"name": "pyramid", "budget": 48, "window": 16},
    "quest": {"name": "quest", "budget": 56, "recent": 8, "block": 8},
    "infinigen": {"name": "infinigen", "budget": 56, "recent": 8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that fill tiles, and layers enough to foretell two."""
    sizes = {"vocab_size": 512, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 5, "head_dim": 16}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    return make_model(tmp_path_factory.mktemp("tiles"), "llama", **sizes, **heads)[0]


def generate(folder: Path, names: list[str], *, in_one_call: bool) -> list[Generation]:
    engine = make_engine(folder, dtype="bfloat16")
    decoder = engine.core._runner.decoder
    if not decoder._can_fuse:
        pytest.skip("no matrix tiles on this machine")
    decoder._can_fuse = in_one_call
    wishes = [None if POLICIES[name] is None else parse_kv_policy(POLICIES[name]) for name in names]
    params = [
        SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True, kv_policy=wish) for wish in wishes
    ]
    found = engine.generate([text(NUM_PROMPT, seed=index) for index in range(len(names))], params)
    engine.core.cache.check()
    assert engine.core.cache.num_held_blocks == 0
    return found


@pytest.mark.parametrize("names", [[name] for name in POLICIES] + [list(POLICIES)], ids="+".join)
def test_the_books_are_the_same_as_layer_by_layer(
    folder: Path, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no layer calls back. Roundings decide choices here: tests/kernels/test_fused.py compares what is computed."""
    by_layers = generate(folder, names, in_one_call=False)

    def never(*given: Any) -> None:
        raise AssertionError("a layer called the hook")

    for call in ("before_layer", "before_attention", "after_attention"):
        monkeypatch.setattr(SparseHook, call, never)
    one_call = generate(folder, names, in_one_call=True)
    for name, got, expected in zip(names, one_call, by_layers, strict=True):
        assert len(got.completions[0].token_ids) == NUM_OUTPUT
        if name == "full":
            assert got.sparse is None
            continue
        for field in ("num_compactions", "num_kept_tokens", "num_blocks", "num_returned_blocks", "host_bytes"):
            assert getattr(got.sparse, field) == getattr(expected.sparse, field)
        assert (got.sparse.fetched_bytes > 0) == (name in ("quest", "infinigen"))
