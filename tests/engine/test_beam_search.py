"""Beam search over a real decoder equals Transformers': the same sequences and scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagoda.engine.engine import Engine
from tests.model import models, tokenizers_made_here

EOS_IDS = [5, 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Any]:
    tokenizer = tokenizers_made_here.byte_level()
    reference = models.build(
        "llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=256, eos_token_id=EOS_IDS
    )
    reference.generation_config.eos_token_id = EOS_IDS
    folder = tokenizers_made_here.save(tokenizer, models.save(reference, tmp_path_factory.mktemp("beams")))
    engine = Engine(str(folder), dtype="float32", kv_memory="4MiB", block_size=8, lease_share=0.0, progress=False)
    return engine, reference


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize(("width", "length_penalty"), [(1, 1.0), (4, 1.0), (5, 0.0), (3, -1.0), (6, 2.0)])
def test_equal_to_transformers(
    model: tuple[Engine, Any], width: int, length_penalty: float, early_stopping: bool | str
) -> None:
    engine, reference = model
    stop_ids = frozenset({17, 23, 40, 77, 120, *range(200, 240)})  # many, so that some beams end early
    engine_stops = stop_ids | engine.core._eos_ids
    prompt = np.random.default_rng(width).integers(10, 300, 37).tolist()
    settings = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    with torch.inference_mode():
        truth = reference.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=18,
            do_sample=False,
            eos_token_id=sorted(engine_stops),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
    [found] = engine.beam_search(
        [prompt], width=width, n=width, max_tokens=18, stop_token_ids=stop_ids, logprobs=2, **settings
    )
    sequences = truth.sequences[:, len(prompt) :].tolist()
    expected = [sequence[: _length(sequence, engine_stops)] for sequence in sequences]
    assert [completion.token_ids for completion in found.completions] == expected
    if width > 1:
        scores = [completion.score for completion in found.completions]
        assert scores == pytest.approx(truth.sequences_scores.tolist(), abs=2e-4)
    first = found.completions[0]
    assert len(first.logprobs) == len(first.token_ids)
    assert sum(token.logprob for token in first.logprobs) / len(first.token_ids) ** length_penalty == pytest.approx(
        first.score
    )
    engine.core.cache.check()
    assert engine.core.cache.num_held_blocks == 0


def _length(tokens: list[int], stops: frozenset[int]) -> int:
    return next((index + 1 for index, token in enumerate(tokens) if token in stops), len(tokens))
