"""How near blended KV comes: every variant reads the questions and their right answers by force, against full prefill.

    prompt   preamble | passages ...................... | question answer | question answer | ...
             computed | reused, some of it anew         | computed: the logits before each answer's tokens are compared

All questions about a context follow one another in one prompt, so that it is computed once for each variant.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.blend.tasks import VARIANTS, Context, contexts
from benchmarks.quality.compare import Compared, Figure, mean_of
from benchmarks.quality.forced import Forced
from pagoda import Engine, SamplingParams
from pagoda.blend.segments import DEFAULT_MIN_CONFIDENCE, BlendSpec

Record = dict[str, Any]


def measure(
    engine: Engine,
    path: Path,
    kinds: Sequence[str],
    num_contexts: int,
    passages: int,
    size: int,
    log: Callable[[str], None],
) -> list[Record]:
    """Every variant over `num_contexts` contexts of each of `kinds`; a run goes on where an earlier one ended.

    Returns:
        A record for each context and variant; `path` gets them, a line each, as they come.
    """
    forced = Forced(engine)
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {(record["kind"], record["context"]) for record in records}
    made = [enumerate(contexts(engine.tokenizer, kind, num_contexts, passages, size)) for kind in kinds]
    for each in zip(*made, strict=True):  # in turns, so that a run cut short has as many of each
        for number, context in each:
            if (context.kind, number) not in known:
                log(f"quality: {context.kind} {number + 1} of {num_contexts}")
                new = [{"kind": context.kind, "context": number, **record} for record in _compare(forced, context)]
                with path.open("a") as file:
                    file.writelines(json.dumps(record) + "\n" for record in new)
                records += new
    return records


def _compare(forced: Forced, context: Context) -> list[Record]:
    tokens, answers = list(context.tokens), []
    newline = forced.engine.tokenizer.encode("\n", add_special_tokens=False)
    for question, answer in context.questions:
        tokens += question
        answers.append((len(tokens), answer))
        tokens += [*answer, *newline]
    with forced.free() as engine:  # passages alone, so that one request runs at a time from here on
        engine.generate([context.tokens], SamplingParams(max_tokens=0), blends=[context.blend("naive")])
    expected = _read(forced, tokens, answers[0][0], None)
    records = []
    for variant in VARIANTS:
        # All questions are in one prompt, so which of them are doubted is reckoned afterwards: see `figures`.
        blend = replace(context.blend(variant), min_confidence=0.0)
        found = _read(forced, tokens, answers[0][0], blend)
        compared = []
        for start, answer in answers:
            rows = slice(start - answers[0][0], start - answers[0][0] + len(answer))
            one = Compared()
            one.add(expected[rows], found[rows], answer)
            confidence = float(found[rows.start].softmax(-1).max())  # in the answer's first token
            compared.append({**asdict(one), "confidence": confidence})
        progress = forced.blend
        assert progress is not None, "these variants blend"
        records.append(
            {
                "variant": variant,
                "deviation": progress.deviation,
                "blended": progress.num_blended,
                "recomputed": progress.num_recomputed,
                "answers": compared,
            }
        )
    return records


def _read(forced: Forced, tokens: Sequence[int], start: int, blend: BlendSpec | None) -> torch.Tensor:
    return torch.cat([logits for _, logits in forced.read(tokens, start, decode=False, blend=blend)])


def figures(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Each task and variant: means over answers or their tokens, with intervals over contexts.

    `same` and `right` are shares of whole answers: same as full prefill's, and right; `change` is how many points more
    are right than with full prefill. `doubted` of the answers are too unsure for "guarded", and become full prefill's.
    """
    rows = []
    ordered = sorted(records, key=lambda record: (record["kind"], VARIANTS.index(record["variant"])))
    for (kind, variant), group in itertools.groupby(ordered, key=lambda record: (record["kind"], record["variant"])):
        units = [record["answers"] for record in group]
        doubted = _mean(units, lambda answer: [answer["confidence"] < DEFAULT_MIN_CONFIDENCE])
        if variant == "guarded":
            units = [[_settled(answer) for answer in unit] for unit in units]
        right_full = _mean(units, lambda answer: [all(answer["right_full"])])
        rows.append(
            {
                "kind": kind,
                "variant": variant,
                "kl": asdict(_mean(units, lambda answer: answer["kl"])),
                "agrees": asdict(_mean(units, lambda answer: answer["agrees"])),
                "same": asdict(_mean(units, lambda answer: [all(answer["agrees"])])),
                "right": asdict(_mean(units, lambda answer: [all(answer["right"])])),
                "right_full": asdict(right_full),
                "doubted": asdict(doubted),
                "change": asdict(
                    _mean(units, lambda answer: [100.0 * (all(answer["right"]) - all(answer["right_full"]))])
                ),
                "num_answers": sum(map(len, units)),
                "counts": right_full.value >= 0.7,
            }
        )
    return rows


def _settled(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """An answer as it is served: full prefill's where the blend is doubted."""
    if answer["confidence"] >= DEFAULT_MIN_CONFIDENCE:
        return answer
    whole = {"kl": [0.0 for _ in answer["kl"]], "agrees": [True for _ in answer["agrees"]]}
    return {**answer, **whole, "right": answer["right_full"], "nll": answer["nll_full"]}


def _mean(
    units: Sequence[Sequence[Mapping[str, Any]]], values: Callable[[Mapping[str, Any]], Sequence[float]]
) -> Figure:
    return mean_of([[float(value) for answer in unit for value in values(answer)] for unit in units])
