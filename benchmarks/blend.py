"""Passages reused anywhere: what it saves and what it costs. `python -m benchmarks.blend`

    full      every prompt is computed whole
    prefix    prefix caching: passages were seen before, in other orders
    naive     passages reused as they were computed alone, nothing anew; the guard is off
    5%, ...   that share of their tokens is computed anew; the guard is off
    guarded   as served: 15%, and more where the guard wants it

Passages are real text (the language reference and the source of Python's standard library, PSF licence), each with a
planted line. `lookup` asks for one passage's; `hop` for a value that one passage gives by the name another defines.
Speed: TTFT of one request on an idle engine, and requests a second of a batch, all passages known. Quality: the logits
before each token of the right answer, read by force, against full prefill's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import cpu_name
from benchmarks.quality.compare import Compared, Figure, mean_of
from benchmarks.quality.forced import Forced
from benchmarks.quality.tasks import prose, source
from pagoda import Engine, SamplingParams
from pagoda.blend.segments import BlendSpec, Span
from pagoda.kv.keys import Scope
from pagoda.model.tokenizer import Tokenizer

UNGUARDED = float("inf")
RATIOS = {"naive": 0.0, "5%": 0.05, "10%": 0.1, "15%": 0.15, "30%": 0.3, "100%": 1.0}
KINDS = ("lookup", "hop")
QUESTIONS = 3  # about each context
PREAMBLE = "Some notes on Python.\n\n"
_PLACES = ("harbour", "library", "observatory", "bakery", "orchard", "theatre", "museum", "station", "castle", "mill")
_WORDS = ("copper", "silver", "velvet", "thunder", "pepper", "candle", "marble", "ribbon", "saddle", "lemon", "anchor")
_NAMES = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "theta", "lambda", "epsilon")
console = Console(stderr=True)


@dataclass(frozen=True)
class Context:
    """Tokens of a preamble and passages, and questions about them: what to append, and the tokens of the answer."""

    kind: str
    tokens: list[int]
    spans: tuple[Span, ...]
    questions: list[tuple[list[int], list[int]]]

    def blend(self, variant: str) -> BlendSpec | None:
        """What a variant asks for."""
        if variant in RATIOS:
            return BlendSpec(self.spans, RATIOS[variant], UNGUARDED)
        return BlendSpec(self.spans) if variant == "guarded" else None


def contexts(tokenizer: Tokenizer, kind: str, count: int, passages: int, size: int) -> Iterator[Context]:
    """`count` contexts of `passages` passages of about `size` tokens each."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    for index in range(count):
        rng = random.Random(f"{kind} {index}")
        lines, asked = _facts(kind, passages, rng)
        tokens, spans = encode(PREAMBLE), []
        texts = prose() if kind == "lookup" else source()
        for line in lines:
            first, paragraphs, room = rng.randrange(len(texts)), [], size - len(encode(line))
            while (room := room - len(encode(texts[first % len(texts)]))) > 0 or not paragraphs:
                paragraphs.append(texts[first % len(texts)])
                first += 1
            paragraphs.insert(rng.randint(0, len(paragraphs)), line)
            passage = encode("\n\n".join(paragraphs) + "\n\n")
            spans.append(Span(len(tokens), len(tokens) + len(passage)))
            tokens += passage
        yield Context(
            kind, tokens, tuple(spans), [(encode(question), encode(f" {answer}")) for question, answer in asked]
        )


def _facts(kind: str, passages: int, rng: random.Random) -> tuple[list[str], list[tuple[str, str]]]:
    """A line for each passage, and the questions."""
    if kind == "lookup":
        places, words = rng.sample(_PLACES, passages), rng.sample(_WORDS, passages)
        facts = [(f"Remember the code {place}", word) for place, word in zip(places, words, strict=True)]
        return [f"{question} {answer}." for question, answer in facts], rng.sample(facts, QUESTIONS)
    names, half = rng.sample(_NAMES, passages), passages // 2
    values = [str(rng.randrange(1000, 10000)) for _ in range(half)]
    given = [f"{name} = {value}" for name, value in zip(names, values, strict=False)]
    copied = [f"{name} = {of}" for name, of in zip(names[half : 2 * half], names, strict=False)]
    rest = ["pass"] * (passages - 2 * half)
    asked = [(f"# The value of {name} is", value) for name, value in zip(names[half:], values, strict=False)]
    return [*given, *copied, *rest], asked[:QUESTIONS]


# -- quality ---------------------------------------------------------------------------------------------------------


def quality(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every variant over every question, against full prefill."""
    full, other = (Forced(open_engine(model, args)) for _ in range(2))
    tokenizer = full.engine.tokenizer
    rows = []
    for kind in KINDS:
        compared: dict[str, list[Compared]] = {variant: [] for variant in (*RATIOS, "guarded")}
        for number, context in enumerate(contexts(tokenizer, kind, args.contexts, args.passages, args.size)):
            console.log(f"quality: {kind} {number + 1} of {args.contexts}")
            with other.free() as engine:  # passages alone, so that one request runs at a time from here on
                engine.generate([context.tokens], SamplingParams(max_tokens=0), blends=[context.blend("naive")])
            for each in compared.values():
                each.append(Compared())
            for question, answer in context.questions:
                tokens = [*context.tokens, *question, *answer]
                start = len(tokens) - len(answer)
                expected = _read(full, tokens, start, None)
                for variant, units in compared.items():
                    units[-1].add(expected, _read(other, tokens, start, context.blend(variant)), answer)
        rows += [{"kind": kind, "variant": variant, **_figures(units)} for variant, units in compared.items()]
    return rows


def _read(forced: Forced, tokens: Sequence[int], start: int, blend: BlendSpec | None) -> torch.Tensor:
    return torch.cat([logits for _, logits in forced.read(tokens, start, decode=True, share=True, blend=blend)])


def _figures(units: Sequence[Compared]) -> dict[str, Any]:
    """`right`, `right_full` and `agrees` are of tokens of the right answers; intervals are over contexts."""

    def mean(name: str) -> Figure:
        return mean_of([[float(value) for value in getattr(unit, name)] for unit in units])

    nll = mean_of([[b - a for a, b in zip(unit.nll_full, unit.nll, strict=True)] for unit in units])
    named = {name: asdict(mean(name)) for name in ("kl", "agrees", "right", "right_full")}
    return {**named, "nll_change": asdict(nll), "counts": mean("right_full").value >= 0.7}


# -- speed -----------------------------------------------------------------------------------------------------------


def speed(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """TTFT and throughput of every variant; rounds are interleaved, so that what else runs meets all of them alike."""
    engine = open_engine(model, args)
    pool = list(contexts(engine.tokenizer, "lookup", args.rounds + 1, args.passages, args.speed_size))
    variants = ("full", "prefix", *RATIOS, "guarded")
    ttft: dict[str, list[float]] = {variant: [] for variant in variants}
    per_s: dict[str, list[float]] = {variant: [] for variant in variants}
    for number, context in enumerate(pool):
        console.log(f"speed: round {number + 1} of {len(pool)}")
        engine.core.cache.clear()
        # All passages are known: alone, and as a prompt of another order for prefix caching.
        engine.generate([context.tokens], SamplingParams(max_tokens=0), blends=[context.blend("naive")])
        other = reordered(context, number + 1)
        engine.generate([other.tokens], SamplingParams(max_tokens=0), scope=Scope("prefix"))
        order = list(variants)
        random.Random(number).shuffle(order)
        for variant in order:
            one = timed(engine, [context], variant, number, 1)
            batch = timed(engine, [reordered(context, seed) for seed in range(args.batch)], variant, number, 8)
            if number:  # the first warms up
                ttft[variant].append(one)
                per_s[variant].append(args.batch / batch)
    return [
        {
            "variant": variant,
            "num_tokens": len(pool[0].tokens),
            "ttft_s": asdict(_median(ttft[variant])),
            "speedup": asdict(_median([a / b for a, b in zip(ttft["full"], ttft[variant], strict=True)])),
            "requests_per_s": asdict(_median(per_s[variant])),
        }
        for variant in variants
    ]


def reordered(context: Context, seed: int) -> Context:
    """The same passages in another order."""
    order = random.Random(seed).sample(context.spans, len(context.spans))
    tokens, spans = context.tokens[: context.spans[0].start], []
    for span in order:
        spans.append(Span(len(tokens), len(tokens) + span.stop - span.start))
        tokens = tokens + context.tokens[span.start : span.stop]
    return Context(context.kind, tokens, tuple(spans), context.questions)


def timed(engine: Engine, batch: Sequence[Context], variant: str, number: int, max_tokens: int) -> float:
    """Seconds until all of a batch are answered."""
    scope = Scope(salt=f"full-{number}-{max_tokens}") if variant == "full" else Scope("prefix" * (variant == "prefix"))
    prompts = [[*context.tokens, *context.questions[0][0]] for context in batch]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    engine.generate(prompts, params, scope=scope, blends=[context.blend(variant) for context in batch])
    return time.perf_counter() - started


def _median(values: Sequence[float]) -> Figure:
    """The median, and the range that holds the true one with 95% or more (sign test)."""
    ordered, n = sorted(values), len(values)
    out = max(0, int(n / 2 - 0.98 * n**0.5))
    return Figure(statistics.median(ordered), ordered[out], ordered[n - 1 - out], n)


# -- report ----------------------------------------------------------------------------------------------------------


def open_engine(model: str, args: argparse.Namespace) -> Engine:
    return Engine(model, kv_memory=args.kv_memory, token_budget=args.token_budget, progress=False)


def show(report: dict[str, Any]) -> None:
    table = Table("variant", "TTFT, s", "faster", "requests/s", "n", title=f"speed, {report['tokens']} tokens")
    for row in report["speed"]:
        cells = [
            _cell(row["ttft_s"], "{:.3f}"),
            _cell(row["speedup"], "{:.2f}"),
            _cell(row["requests_per_s"], "{:.2f}"),
        ]
        table.add_row(row["variant"], *cells, str(row["ttft_s"]["n"]))
    Console().print(table)
    table = Table(
        "task", "variant", "KL, nats", "same token", "right", "right: full", "NLL change", "contexts", "counts"
    )
    for row in report["quality"]:
        cells = [_cell(row[key], form) for key, form in (("kl", "{:.1e}"), ("agrees", "{:.1%}"), ("right", "{:.1%}"))]
        cells += [f"{row['right_full']['value']:.1%}", f"{row['nll_change']['value']:+.3f}"]
        table.add_row(row["kind"], row["variant"], *cells, str(row["kl"]["n"]), "yes" if row["counts"] else "no")
    Console().print(table)


def _cell(figure: dict[str, float], form: str) -> str:
    return f"{form.format(figure['value'])} [{form.format(figure['low'])}, {form.format(figure['high'])}]"


def draw(report: dict[str, Any], path: Path) -> None:
    """TTFT, KL and right answers as the ratio grows."""
    from matplotlib.figure import Figure as Plot

    plot = Plot(figsize=(14, 4.2), layout="constrained")
    on_ttft, on_kl, on_right = plot.subplots(1, 3)
    places = [100 * ratio for ratio in RATIOS.values()]
    by_name = {row["variant"]: row for row in report["speed"]}

    def line(axes: Any, figures: Sequence[dict[str, float]], label: str) -> None:
        values = [one["value"] for one in figures]
        around = [[one["value"] - one["low"] for one in figures], [one["high"] - one["value"] for one in figures]]
        axes.errorbar(places, values, yerr=around, marker=".", capsize=2, label=label)

    if by_name:
        line(on_ttft, [by_name[name]["ttft_s"] for name in RATIOS], "blended")
        for name, style in (("full", "-"), ("prefix", "--")):
            on_ttft.axhline(by_name[name]["ttft_s"]["value"], color="grey", linestyle=style, label=name)
        on_ttft.axhline(by_name["full"]["ttft_s"]["value"] / 2.5, color="green", linestyle=":", label="full / 2.5")
    on_ttft.set_ylim(bottom=0)
    on_ttft.set_ylabel("TTFT, seconds")
    for kind in KINDS:
        rows = {row["variant"]: row for row in report["quality"] if row["kind"] == kind}
        if rows:
            line(on_kl, [rows[name]["kl"] for name in RATIOS], kind)
            line(on_right, [rows[name]["right"] for name in RATIOS], kind)
            on_right.axhline(rows["naive"]["right_full"]["value"], color="grey", label=f"full, {kind}")
    on_kl.set_yscale("symlog", linthresh=1e-4)
    on_kl.set_ylabel("KL(full || blended) of the answer, nats")
    on_right.set_ylabel("tokens of the answer that are right")
    for axes in (on_ttft, on_kl, on_right):
        axes.set_xlabel("computed anew, % of the passages' tokens")
        if axes.lines:
            axes.legend(fontsize="small")
    plot.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--contexts", type=int, default=8, help="of each task, with 3 questions each (%(default)s)")
    parser.add_argument("--passages", type=int, default=6, help="in each context (%(default)s)")
    parser.add_argument("--size", type=int, default=200, help="tokens of a passage, for quality (%(default)s)")
    parser.add_argument("--speed-size", type=int, default=600, help="tokens of a passage, for speed (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of speed, after one to warm up (%(default)s)")
    parser.add_argument("--batch", type=int, default=3, help="requests at once, for throughput (%(default)s)")
    parser.add_argument("--token-budget", type=int, default=512, help="rows of a step (%(default)s)")
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--only", choices=("speed", "quality"), help="leave the other out")
    parser.add_argument("--output", type=Path, default=Path("results/blend"), help="folder (%(default)s)")
    args = parser.parse_args()
    if not 2 * QUESTIONS <= args.passages <= len(_PLACES):
        parser.error(f"--passages must be between {2 * QUESTIONS} and {len(_PLACES)}")
    report: dict[str, Any] = {
        "model": args.model,
        "cpu": cpu_name(),
        "tokens": args.passages * args.speed_size,
        "settings": {key: str(value) for key, value in vars(args).items()},
        "speed": [] if args.only == "quality" else speed(args.model, args),
        "quality": [] if args.only == "speed" else quality(args.model, args),
    }
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "blend.json").write_text(json.dumps(report, indent=2))
    show(report)
    draw(report, args.output / "blend.png")


if __name__ == "__main__":
    main()
