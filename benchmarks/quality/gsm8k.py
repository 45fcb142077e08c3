"""Free answers to GSM8K questions (Cobbe et al., arXiv:2110.14168): do they agree with the full run's?"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.quality.compare import mean_of
from benchmarks.quality.forced import Forced
from pagoda import SamplingParams

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MAX_TOKENS = 160


def questions(path: Path, count: int) -> list[tuple[str, str]]:
    """The first questions with their answers, from the data set's `test.jsonl` or the folder it is in."""
    file = path / "test.jsonl" if path.is_dir() else path
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:count]]
    return [(row["question"], row["answer"].rpartition("####")[2].strip().replace(",", "")) for row in rows]


def answer_in(text: str) -> str | None:
    """The last number of a text, without separators; None if there is none."""
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "").removesuffix(".0") if numbers else None


def agreement(full: Forced, variants: Mapping[str, Forced], asked: list[tuple[str, str]]) -> dict[str, Any]:
    """Share of answers that are right, and that are the full run's; with the share of identical texts."""
    texts = _answers(full, asked)
    report: dict[str, Any] = {"num_questions": len(asked), "right_full": asdict(_right(texts, asked)), "variants": {}}
    for name, variant in variants.items():
        own = _answers(variant, asked)
        report["variants"][name] = {
            "right": asdict(_right(own, asked)),
            "same_answer": asdict(mean_of([[answer_in(a) == answer_in(b)] for a, b in zip(texts, own, strict=True)])),
            "same_text": asdict(mean_of([[a == b] for a, b in zip(texts, own, strict=True)])),
        }
    return report


def _answers(forced: Forced, asked: list[tuple[str, str]]) -> list[str]:
    tokenizer = forced.engine.tokenizer
    if tokenizer.has_chat_template:
        rendered = [tokenizer.render_chat([{"role": "user", "content": question}]) for question, _ in asked]
        prompts = [tokenizer.encode(text, add_special_tokens=False) for text in rendered]
    else:
        prompts = [tokenizer.encode(f"Question: {question}\nAnswer:") for question, _ in asked]
    params = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0, stop=("\nQuestion:",))
    with forced.free() as engine:
        return [generation.text for generation in engine.generate(prompts, params)]


def _right(texts: list[str], asked: list[tuple[str, str]]) -> Any:
    return mean_of([[answer_in(text) == answer] for text, (_, answer) in zip(texts, asked, strict=True)])
