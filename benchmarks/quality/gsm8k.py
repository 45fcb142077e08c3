"""Free answers to GSM8K questions (Cobbe et al., arXiv:2110.14168): do they agree with the full run's, and how far?"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.quality.compare import Figure, mean_of
from benchmarks.quality.forced import Forced
from pagoda import SamplingParams
from pagoda.engine.outputs import Completion

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
    """Share of answers that are right, and that are the full run's; how long texts stay identical, in tokens."""
    given = _answers(full, asked)
    report: dict[str, Any] = {"num_questions": len(asked), "right_full": asdict(_right(given, asked)), "variants": {}}
    for name, variant in variants.items():
        own = _answers(variant, asked)
        both = list(zip(given, own, strict=True))
        report["variants"][name] = {
            "right": asdict(_right(own, asked)),
            "same_answer": asdict(mean_of([[answer_in(a.text) == answer_in(b.text)] for a, b in both])),
            "same_text": asdict(mean_of([[a.text == b.text] for a, b in both])),
            "mean_same": asdict(mean_of([[num_alike(a.token_ids, b.token_ids)] for a, b in both])),
        }
    return report


def num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens come before the first that differs."""
    shorter = min(len(one), len(other))
    return next((index for index in range(shorter) if one[index] != other[index]), shorter)


def _answers(forced: Forced, asked: list[tuple[str, str]]) -> list[Completion]:
    tokenizer = forced.engine.tokenizer
    if tokenizer.has_chat_template:
        rendered = [tokenizer.render_chat([{"role": "user", "content": question}]) for question, _ in asked]
        prompts = [tokenizer.encode(text, add_special_tokens=False) for text in rendered]
    else:
        prompts = [tokenizer.encode(f"Question: {question}\nAnswer:") for question, _ in asked]
    params = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0, stop=("\nQuestion:",))
    with forced.free() as engine:
        return [generation.completions[0] for generation in engine.generate(prompts, params)]


def _right(given: list[Completion], asked: list[tuple[str, str]]) -> Figure:
    return mean_of([[answer_in(each.text) == answer] for each, (_, answer) in zip(given, asked, strict=True)])
