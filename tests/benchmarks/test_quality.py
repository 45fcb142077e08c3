"""The quality suite on a tiny model: no difference measures zero, and more noise in the KV measures more."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.quality import gsm8k
from benchmarks.quality.__main__ import measure, resized
from benchmarks.quality.cases import Case, Size, answers, passages
from benchmarks.quality.compare import Compared, mean_of, pieces
from benchmarks.quality.forced import Forced
from benchmarks.quality.report import draw, save, show
from benchmarks.quality.suite import Suite
from benchmarks.quality.tasks import KINDS, QUESTIONS, tasks
from benchmarks.quality.variants import Variant, open_engine
from pagoda.model.tokenizer import Tokenizer
from tests.model import models, tokenizers_made_here
from tests.model.paged import PagedRun

TOKENIZER = tokenizers_made_here.byte_level()
SIZE = Size(2, 64, 16, KINDS, (500,), (1,), 4, 2, 24, 12, 1, 24, 2)
TOKENS = np.random.default_rng(3).integers(3, 300, 90).tolist()


def saved(family: str, path: Path) -> Path:
    model = models.build(family, vocab_size=TOKENIZER.get_vocab_size(), max_position_embeddings=1024)
    return tokenizers_made_here.save(TOKENIZER, models.save(model, path))


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tokenizer(llama: Path) -> Tokenizer:
    return Tokenizer.from_folder(llama)


def opened(folder: Path, **options: Any) -> Forced:
    settings = {"dtype": "float32", "kv_memory": "16MiB", "block_size": 4}
    return Forced(open_engine(str(folder), Variant("v", settings | options), token_budget=16, max_model_len=None))


def noisy(forced: Forced, scale: float) -> Forced:
    """Every key and value that is written gets noise added, after the step that writes it."""
    decoder, generator = forced._decoder, torch.Generator().manual_seed(1)
    exact = forced._forward

    def forward(batch: Any, kv: Any, group_of_layer: Any, *hooks: Any, **options: Any) -> torch.Tensor:
        logits = exact(batch, kv, group_of_layer, *hooks, **options)
        for view, group in zip(kv, group_of_layer, strict=True):
            slots = batch.slot_mapping[group]
            blocks, offsets = slots // view.keys.shape[2], slots % view.keys.shape[2]
            for part in (view.keys, view.values):
                written = part[blocks, :, offsets]
                part[blocks, :, offsets] = written + scale * torch.randn(written.shape, generator=generator)
        return logits

    forced._forward = forward
    assert decoder.forward == forced._tapped
    return forced


def suite(full: Forced, **variants: Forced) -> Suite:
    return Suite(full, variants, SIZE, tell=lambda what: None)


def whole(pieces: Iterator[Any]) -> Any:
    """The last of what is measured piece by piece."""
    return list(pieces)[-1]


@pytest.mark.parametrize("decode", [False, True])
def test_what_is_read_has_the_models_own_logits(folder: Path, decode: bool) -> None:
    forced = opened(folder)
    expected = PagedRun(models.load(folder)).chunked(TOKENS, [len(TOKENS)])
    for start in (1, 37, 89):
        got = list(forced.read(TOKENS, start, decode=decode))
        assert got[0][0] == start
        assert [at for at, _ in got] == [start + sum(len(each) for _, each in got[:i]) for i in range(len(got))]
        logits = torch.cat([each for _, each in got])
        assert len(logits) == len(TOKENS) - start
        assert (logits - expected[start - 1 : -1]).abs().max() < 1e-3
    forced.engine.core.cache.check()
    assert not forced.engine.core.has_work


@pytest.mark.parametrize("kv_format", ["fp32", "int8", "int4"])
def test_what_follows_a_hit_is_the_same_in_chunks_and_decoded(llama: Path, kv_format: str) -> None:
    forced = opened(llama, kv_format=kv_format)
    context, questions = TOKENS[:60], [TOKENS[60:75], TOKENS[75:]]
    for question in questions:
        tokens = context + question
        shared = list(forced.read(tokens, 66, decode=False, share=True))
        served = list(forced.read(tokens, 66, decode=True))
        assert shared[0][0] == served[0][0] == 66
        apart = torch.cat([each for _, each in shared]) - torch.cat([each for _, each in served])
        assert apart.abs().max() < 1e-3
    assert forced.engine.core.cache.stats.num_hit_tokens == 60


def test_first_tokens_that_are_computed_apart_are_no_part_of_what_is_read(llama: Path) -> None:
    found = []
    for decode in (False, True):
        pieces = list(opened(llama, kv_format="int4").read(TOKENS, 1, decode=decode))
        found.append(torch.cat([logits for _, logits in pieces]))
    assert len(found[0]) == len(TOKENS) - 1
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


def test_rows_that_a_hit_covers_have_no_logits(llama: Path) -> None:
    forced = opened(llama)
    list(forced.read(TOKENS, 66, decode=False, share=True))
    with pytest.raises(AssertionError, match="a hit covers"):
        list(forced.read(TOKENS, 66, decode=False, share=True))


def test_reading_that_is_broken_off_leaves_nothing_behind(folder: Path) -> None:
    forced = opened(folder)
    reading = forced.read(TOKENS, 1, decode=False)
    next(reading)
    reading.close()
    assert not forced.engine.core.has_work
    assert forced.engine.core.cache.num_held_blocks == 0


def test_a_continuation_is_what_the_engine_says(folder: Path) -> None:
    forced = opened(folder)
    [said, _] = forced.continuations([TOKENS, TOKENS[:30]], 10)
    compared = suite(forced, same=opened(folder)).compare(Case(TOKENS + said, len(TOKENS), decode=True))["same"]
    assert compared.right == compared.right_full == [True] * 10
    assert compared.first_divergence is None


def test_no_difference_is_exactly_zero_and_noise_rises(llama: Path) -> None:
    scales = {"same": 0.0, "little": 0.01, "more": 0.1, "much": 1.0}
    variants = {name: noisy(opened(llama), scale) if scale else opened(llama) for name, scale in scales.items()}
    measured = suite(opened(llama), **variants)
    text = " ".join(tokenizers_made_here.CORPUS)
    kl = {name: one["kl"]["value"] for name, one in whole(measured.text("corpus", text)).items()}
    assert kl["same"] == 0.0
    assert 0 < kl["little"] < 0.2 * kl["more"] < 0.2 * 0.5 * kl["much"]
    exact = whole(measured.text("corpus", text))["same"]
    assert exact["perplexity_change"]["value"] == exact["perplexity_change"]["high"] == 0.0
    assert exact["top1_agreement"]["value"] == 1.0
    accumulated = measured.accumulation()
    assert accumulated["variants"]["same"] == [0.0] * 8
    assert np.mean(accumulated["variants"]["little"]) < np.mean(accumulated["variants"]["much"])
    apart = measured.divergence()["variants"]
    assert apart["same"]["mean_same"]["value"] == SIZE.followed
    assert apart["much"]["mean_same"]["value"] < SIZE.followed


def test_the_whole_report(llama: Path, tmp_path: Path) -> None:
    measured = suite(
        opened(llama, token_budget=128, block_size=16), same=opened(llama, token_budget=128, block_size=16)
    )
    recalled = [one for kind in KINDS for one in whole(measured.recall(kind))]
    assert [one["kind"] for one in recalled] == list(KINDS)
    for one in recalled:
        assert one["num_questions"] >= 4
        assert one["variants"]["same"]["answer_nll_change"]["value"] == 0.0
        assert not one["counts"], "a random model recalls nothing"
    asked = [("1 + 1?", "2"), ("2 + 2?", "4")]
    report = {
        "variants": {"same": {}},
        "text": {"corpus": whole(measured.text("corpus", " ".join(tokenizers_made_here.CORPUS)))},
        "tasks": recalled,
        "divergence": measured.divergence(),
        "accumulation": measured.accumulation(),
        "gsm8k": gsm8k.agreement(measured.full, measured.variants, asked),
    }
    assert report["gsm8k"]["variants"]["same"]["same_text"]["value"] == 1.0
    assert report["gsm8k"]["variants"]["same"]["mean_same"]["value"] > 1
    console = Console(record=True, width=200)
    show(report, console)
    assert "never parts" in console.export_text()
    assert draw(report, tmp_path / "quality.png").stat().st_size > 100
    save(report, tmp_path)
    assert json.loads((tmp_path / "quality.json").read_text())["tasks"]


def test_a_task_that_the_full_run_fails_is_given_up(llama: Path) -> None:
    full, same = (opened(llama, token_budget=128, block_size=16) for _ in range(2))
    size = replace(SIZE, lengths=(300, 301), contexts=(20, 1), questions=8)
    asked = Suite(full, {"same": same}, size, tell=lambda what: None)
    [failed, _] = whole(asked.recall("multi_key"))
    assert not failed["counts"]
    assert failed["num_questions"] == 104, "13 contexts of 8 questions are enough to know"
    assert failed["exact_match_full"]["n"] == 13


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_hold_their_answers(tokenizer: Tokenizer, kind: str) -> None:
    first, second = tasks(tokenizer, kind, 1200, 2)
    assert first.context != second.context
    assert first == next(tasks(tokenizer, kind, 1200, 1)), "the same at every run"
    for task in (first, second):
        text = tokenizer.decode(task.context)
        assert 400 < len(task.context) <= 1200
        assert len(task.questions) == QUESTIONS
        for question, answer in task.questions:
            assert tokenizer.decode(answer).strip() in text
            asked = tokenizer.decode(question)
            if kind in ("needle", "multi_key"):
                assert asked + tokenizer.decode(answer) in text
        case = answers(task, decode=True, share=True)[0]
        assert case.tokens[case.start :] == task.questions[0][1]
    [many] = tasks(tokenizer, kind, 1200, 1, questions=6)
    assert len(many.questions) == 6
    assert len({tuple(question) for question, _ in many.questions}) == 6


def test_passages_cover_a_text(tokenizer: Tokenizer) -> None:
    text = "the tide turns at dawn " * 100
    tokens = tokenizer.encode(text)
    first, _, last = passages(tokenizer, text, 3, 50)
    assert (first.tokens, last.tokens) == (tokens[:50], tokens[-50:])
    assert len(passages(tokenizer, "the tide", 2, 500)[0].tokens) == len(tokenizer.encode("the tide")) // 2


def test_divergence_of_known_distributions() -> None:
    compared = Compared()
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    compared.add(p.log(), q.log(), [1])
    assert compared.kl == [pytest.approx(0.25 * np.log(2))]
    assert (compared.nll_full, compared.nll) == ([pytest.approx(np.log(4))], [pytest.approx(np.log(2))])
    assert (compared.agrees, compared.right, compared.right_full) == ([False], [True], [False])
    assert compared.first_divergence == 0


def test_intervals_resample_whole_units() -> None:
    rng = np.random.default_rng(0)
    independent = mean_of([[value] for value in rng.normal(5, 1, 400)])
    assert independent.low < 5 < independent.high
    assert independent.high - independent.low == pytest.approx(4 / 20, rel=0.2)
    copied = mean_of([[value] * 10 for value in rng.normal(5, 1, 40)])
    assert copied.high - copied.low > 2 * (independent.high - independent.low), "ten copies are no ten samples"
    assert copied.n == 40
    assert np.isnan(mean_of([]).value)
    assert pieces([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]


def test_variants_are_written_as_json() -> None:
    assert Variant.parse('x={"kv_format": "int8"}') == Variant("x", {"kv_format": "int8"})
    for wrong in ("x={", "x=3", '={"a": 1}'):
        with pytest.raises(ValueError, match="NAME"):
            Variant.parse(wrong)


def test_gsm8k_answers(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "How many?", "answer": "Many.\n#### 1,200"}) + "\n")
    assert gsm8k.questions(tmp_path, 5) == [("How many?", "1200")]
    assert gsm8k.answer_in("so 3 + 4 = 7, that is $1,200.0.") == "1200"
    assert gsm8k.answer_in("none") is None
    assert [gsm8k.num_alike(*each) for each in (([1, 2], [1, 3]), ([1, 2], [1, 2, 3]), ([2], [1]))] == [1, 2, 0]


def test_a_size_can_be_changed() -> None:
    assert resized(SIZE, '{"unit": 8, "lengths": [400, 800]}') == replace(SIZE, unit=8, lengths=(400, 800))
    for wrong in ('{"units": 8}', "[]", "{"):
        with pytest.raises(ValueError, match=r"--size is|Expecting"):
            resized(SIZE, wrong)


def test_every_piece_is_handed_out_as_it_is_measured(llama: Path) -> None:
    parts = {"only": "text,divergence", "gsm8k": None, "quantized_cache": False, "text": None}
    args = argparse.Namespace(model=str(llama), chunk=128, max_model_len=None, cold=False, decode=False, **parts)
    full = Variant("full", {"dtype": "float32", "kv_memory": "16MiB"})
    size = replace(SIZE, passages=1)
    keys = [set(report) for report in measure(args, size, full, [replace(full, name="again")])]
    assert [("divergence" in each, "text" in each) for each in keys] == [(False, True), (False, True), (True, True)]
