"""The report as tables for people, as JSON, and as one PNG."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def save(report: Mapping[str, Any], folder: Path) -> Path:
    """As `quality.json`, which is there whole at any time."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "quality.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report, indent=2))
    return part.replace(path)


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print everything that was measured."""
    for title, part in (("", report), ("Transformers' QuantizedCache, ", report.get("quantized_cache", {}))):
        for corpus, variants in part.get("text", {}).items():
            console.print(_text(f"{title}text: {corpus}", variants))
        if part.get("tasks"):
            console.print(_tasks(f"{title}tasks", part["tasks"]))
    if "divergence" in report:
        table = Table(
            "variant", "never parts", "tokens the same", title=f"greedy, {report['divergence']['followed']} tokens"
        )
        for name, one in report["divergence"]["variants"].items():
            table.add_row(name, interval(one["never"], "{:.0%}"), interval(one["mean_same"], "{:.1f}"))
        console.print(table)
    if "accumulation" in report:
        bounds = report["accumulation"]["bounds"]
        table = Table("variant", *[f"to {bound}" for bound in bounds[1:]], title="KL along a long output, nats")
        for name, means in report["accumulation"]["variants"].items():
            table.add_row(name, *[f"{mean:.1e}" for mean in means])
        console.print(table)
    if "gsm8k" in report:
        table = Table("variant", "right", "same answer", "same text", "tokens the same", title="GSM8K")
        table.add_row("full", interval(report["gsm8k"]["right_full"], "{:.1%}"), "", "", "")
        for name, one in report["gsm8k"]["variants"].items():
            shares = [interval(one[key], "{:.1%}") for key in ("right", "same_answer", "same_text")]
            table.add_row(name, *shares, interval(one["mean_same"], "{:.1f}"))
        console.print(table)
    if "decoding" in report:
        length = report["decoding"]["num_context_tokens"]
        table = Table("", "variant", "tokens a second", title=f"decoding after {length:,} tokens")
        for name, rate in report["decoding"]["tokens_per_s"].items():
            table.add_row("Pagoda", name, f"{rate:.1f}")
        beside = report.get("quantized_cache", {})
        for name, rate in beside.get("tokens_per_s", {}).items():
            table.add_row("Transformers", name, f"{rate:.1f}")
        for name, error in beside.get("failed", {}).items():
            table.add_row("Transformers", name, f"cannot run here: {error}")
        console.print(table)


def _text(title: str, variants: Mapping[str, Any]) -> Table:
    table = Table("variant", "KL, nats", "perplexity change", "same first choice", "tokens", title=title)
    for name, one in variants.items():
        table.add_row(
            name,
            interval(one["kl"], "{:.2e}"),
            interval(one["perplexity_change"], "{:+.3%}"),
            interval(one["top1_agreement"], "{:.2%}"),
            f"{one['num_tokens']:,}",
        )
    return table


def _tasks(title: str, tasks: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("task", "tokens", "n", "contexts", "variant", "right", "change", "answer NLL change", title=title)
    for task in tasks:
        full = task["exact_match_full"]
        row = [task["kind"], str(task["length"] or "all that count"), str(task["num_questions"]), str(full["n"])]
        counts = "" if task["counts"] else "does not count"
        table.add_row(*row, "full", interval(full, "{:.1%}"), counts, "")
        for name, one in task["variants"].items():
            right, change = interval(one["exact_match"], "{:.1%}"), interval(one["exact_match_change"], "{:+.1%}")
            table.add_row("", "", "", "", name, right, change, interval(one["answer_nll_change"], "{:+.3f}"))
    return table


def interval(figure: Mapping[str, float], form: str) -> str:
    return f"{form.format(figure['value'])} [{form.format(figure['low'])}, {form.format(figure['high'])}]"


def draw(report: Mapping[str, Any], path: Path) -> Path:
    """KL on text, right answers to the tasks that count, and KL along a long output."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2), layout="constrained")
    on_text, on_tasks, along = figure.subplots(1, 3)
    names = list(report["variants"])
    corpora = report.get("text", {})
    width = 0.8 / max(1, len(corpora))
    for place, (corpus, variants) in enumerate(corpora.items()):
        kl = [variants[name]["kl"] for name in names]
        values = [one["value"] for one in kl]
        around = [[one["value"] - one["low"] for one in kl], [one["high"] - one["value"] for one in kl]]
        on_text.bar([i + place * width for i in range(len(names))], values, width, yerr=around, label=corpus, capsize=2)
    on_text.set_xticks(range(len(names)), names, rotation=30, ha="right")
    on_text.set_yscale("symlog", linthresh=1e-6)
    on_text.set_ylabel("KL(full || variant), nats per token")
    on_text.set_title("real text")
    if corpora:
        on_text.legend()
    counted = [task for task in report.get("tasks", []) if task["counts"] and task["length"]]
    labels = [f"{task['kind']} {task['length']}" for task in counted]
    width = 0.8 / (len(names) + 1)
    if counted:
        on_tasks.bar(range(len(counted)), [task["exact_match_full"]["value"] for task in counted], width, label="full")
    for place, name in enumerate(names if counted else [], start=1):
        right = [task["variants"][name]["exact_match"]["value"] for task in counted]
        on_tasks.bar([i + place * width for i in range(len(counted))], right, width, label=name)
    on_tasks.set_xticks(range(len(counted)), labels, rotation=30, ha="right")
    on_tasks.set_ylim(0, 1.05)
    on_tasks.set_title("right answers, tasks that count")
    if counted:
        on_tasks.legend(fontsize="small", loc="lower right")
    if "accumulation" in report:
        bounds = report["accumulation"]["bounds"]
        for name, means in report["accumulation"]["variants"].items():
            along.plot(bounds[1:], means, marker=".", label=name)
        along.legend(fontsize="small")
        along.set_yscale("symlog", linthresh=1e-6)
    along.set_xlabel("generated tokens")
    along.set_title("KL along a long output")
    figure.savefig(path, dpi=150)
    return path
