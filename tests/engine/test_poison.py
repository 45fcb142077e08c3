"""A request whose numbers are not finite fails alone: beside it, after it and on its prefix all others are as without.

The model's embedding of one token is NaN, as damaged weights or an overflow would make it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagoda.engine.engine import Engine
from pagoda.engine.outputs import RequestOutput
from pagoda.engine.params import SamplingParams
from pagoda.errors import ModelError
from tests.model import models, tokenizers_made_here

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
BAD = 7
PREFIX = [20 + (7 * i) % 200 for i in range(67)]  # the bad token is in the midst of a block, soon after a tile begins
GOOD = [[*PREFIX, *range(30, 41)], [*range(90, 120)], [*PREFIX, 50]]
POISONED = [*PREFIX, BAD, *range(60, 90)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizers_made_here.byte_level()
    heads = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = models.build("llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=256, **heads)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = torch.nan
    return tokenizers_made_here.save(tokenizer, models.save(model, tmp_path_factory.mktemp("poison")))


def make(folder: Path, dtype: str, kv_format: str, token_budget: int) -> Engine:
    settings = {"kv_memory": "4MiB", "max_num_seqs": 16, "token_budget": token_budget, "block_size": 8}
    return Engine(str(folder), progress=False, dtype=dtype, kv_format=kv_format, **settings)  # type: ignore[arg-type]


def tokens_of(outputs: list[RequestOutput], name: str) -> list[int]:
    assert not any(output.failure for output in outputs if output.request_id == name)
    return [t for output in outputs if output.request_id == name for delta in output.deltas for t in delta.token_ids]


@pytest.mark.parametrize(
    ("dtype", "kv_format"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8"), ("bfloat16", "int4")]
)
@pytest.mark.parametrize(
    ("num_steps", "token_budget"),
    [(0, 72), (1, 70), (2, 72), (5, 70)],  # its first part ends where a block does, or not
)
def test_a_poisoned_request_fails_alone(
    folder: Path, dtype: str, kv_format: str, num_steps: int, token_budget: int
) -> None:
    def same(got: list[list[int]]) -> bool:
        # In BF16 other company may turn a near tie.
        return got == expected if dtype == "float32" else list(map(len, got)) == list(map(len, expected))

    with make(folder, dtype, kv_format, token_budget) as engine:
        expected = [list(each.completions[0].token_ids) for each in engine.generate(GOOD, GREEDY)]
    with make(folder, dtype, kv_format, token_budget) as engine:
        core = engine.core
        core.add("bad", POISONED, GREEDY)
        outputs = [output for _ in range(num_steps) for output in core.step()]
        for index, prompt in enumerate(GOOD):
            core.add(f"good{index}", prompt, GREEDY)
        while core.has_work:
            outputs += core.step()
        [failure] = [output.failure for output in outputs if output.request_id == "bad" and output.finished]
        assert isinstance(failure, ModelError)
        assert same([tokens_of(outputs, f"good{index}") for index in range(len(GOOD))])
        with pytest.raises(ModelError):  # nothing of it is kept, so nothing hides that
            engine.generate([POISONED], GREEDY)
        assert same([list(each.completions[0].token_ids) for each in engine.generate(GOOD, GREEDY)])
        core.cache.check()
        assert core.cache.num_held_blocks == 0


@pytest.mark.parametrize(("dtype", "kv_format"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int4")])
def test_one_that_leaves_after_its_bad_part_spoils_no_other(folder: Path, dtype: str, kv_format: str) -> None:
    with make(folder, dtype, kv_format, 70) as engine:
        core = engine.core
        core.add("bad", POISONED, GREEDY)
        core.step()
        core.abort("bad")
        assert all(len(each.completions[0].token_ids) == 6 for each in engine.generate(GOOD, GREEDY))
