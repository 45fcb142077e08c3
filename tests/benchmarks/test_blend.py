"""The benchmark of blending: contexts, and what is compared with full prefill."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.blend import quality, speed
from benchmarks.blend.report import draw, show
from benchmarks.blend.tasks import KINDS, PREAMBLE, VARIANTS, contexts
from pagoda import Engine
from tests.model import models, tokenizers_made_here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizers_made_here.byte_level()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 8192, "num_hidden_layers": 3}
    folder = models.save(models.build("llama", **sizes), tmp_path_factory.mktemp("llama"))
    return tokenizers_made_here.save(tokenizer, folder)


@pytest.fixture
def engine(folder: Path) -> Engine:
    return Engine(str(folder), dtype="float32", kv_memory="16MiB", token_budget=64, progress=False)


@pytest.mark.parametrize("kind", KINDS)
def test_contexts_are_passages_that_hold_the_answers(engine: Engine, kind: str) -> None:
    [context] = contexts(engine.tokenizer, kind, 1, 4, 60)
    decode = engine.tokenizer.decode
    assert decode(context.tokens[: context.spans[0].start]) == PREAMBLE
    assert context.spans[-1].stop == len(context.tokens)
    assert len(context.questions) == {"lookup": 4, "hop": 2}[kind]
    told = decode(context.tokens)
    assert all(decode(answer).strip() in told for _, answer in context.questions)
    other = context.reordered(1)
    assert sorted(other.tokens) == sorted(context.tokens)
    passages = [{decode(one.tokens[a:b]) for a, b in one.spans} for one in (context, other)]
    assert passages[0] == passages[1]


def test_quality_is_measured_once_and_exact_where_all_is_computed(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "quality.jsonl"
    records = quality.measure(engine, path, KINDS, 1, 2, 40, lambda _: None)
    assert [(record["kind"], record["variant"]) for record in records] == [(k, v) for k in KINDS for v in VARIANTS]
    again = quality.measure(engine, path, KINDS, 1, 2, 40, lambda _: pytest.fail("measured again"))
    assert again == records
    by_name = {(row["kind"], row["variant"]): row for row in quality.figures(records)}
    for kind in KINDS:
        naive, whole = by_name[kind, "naive"], by_name[kind, "100%"]
        assert whole["kl"]["value"] == pytest.approx(0.0, abs=1e-6)
        assert whole["same"]["value"] == 1.0
        assert whole["change"]["value"] == 0.0
        assert naive["kl"]["value"] > 1e-6
    naive, half = (next(r for r in records if r["variant"] == name) for name in ("naive", "30%"))
    assert naive["recomputed"] == 0 < half["recomputed"] < half["blended"]
    assert naive["deviation"] > half["deviation"] > 0


def test_the_report_shows_and_draws_speed(engine: Engine, tmp_path: Path) -> None:
    rows = speed.measure(engine, 1, 2, 40, 2, lambda _: None)
    assert {row["variant"] for row in rows} == set(speed.ALL)
    assert all(row["ttft_s"]["value"] > 0 < row["requests_per_s"]["value"] for row in rows)
    report = {"tokens": 80, "speed": rows, "quality": []}
    show(report)
    draw(report, tmp_path / "blend.png")
    assert (tmp_path / "blend.png").stat().st_size > 1000
