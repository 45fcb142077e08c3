"""Measure what the README claims of the engine: `python -m benchmarks.show`.

ttft          cold against warm time to first token behind a long system prompt
conversation  what each turn of a conversation computes
sharing       KV blocks of concurrent requests behind one system prompt, and their outputs
waste         unused slots of allocated blocks over a mixed batch
equality      logits cold, warm and after preemption
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from rich.table import Table

from benchmarks import consoles
from benchmarks.texts import source_text
from pagoda import Engine, SamplingParams
from pagoda.engine.outputs import StepStats
from pagoda.engine.step_plan import Rows

QUESTIONS = [
    "What does this module do?",
    "Which class is the most important one?",
    "Is there a function that opens a file?",
    "How are errors reported?",
    "Name one constant that is defined here.",
    "Where does the code check its arguments?",
    "What would you test first?",
    "Which names are exported?",
]
console = consoles.progress()


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)


def chat_tokens(engine: Engine, messages: Sequence[dict[str, str]]) -> list[int]:
    return engine.tokenizer.encode(engine.tokenizer.render_chat(messages), add_special_tokens=False)


def system_prompt(engine: Engine, num_tokens: int) -> str:
    """A text of `num_tokens` tokens."""
    tokens = engine.tokenizer.encode(source_text(num_tokens * 6), add_special_tokens=False)
    return engine.tokenizer.decode(tokens[:num_tokens])


def asks(engine: Engine, count: int, num_tokens: int = 2000) -> list[list[int]]:
    system = {"role": "system", "content": system_prompt(engine, num_tokens)}
    return [
        chat_tokens(engine, [system, {"role": "user", "content": f"{QUESTIONS[i % len(QUESTIONS)]} ({i})"}])
        for i in range(count)
    ]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ttft(engine: Engine, rounds: int) -> dict[str, Any]:
    """Cold and warm in turn; each round asks a question that was never asked before."""
    cold, warm, hits = [], [], []
    prompts = asks(engine, 2 * rounds + 2)
    engine.generate(prompts.pop(), greedy(1))
    for _ in range(rounds):
        engine.core.cache.clear()
        cold.append(timed(lambda: engine.generate(prompts.pop(), greedy(1)))[0])
        seconds, [warm_out] = timed(lambda: engine.generate(prompts.pop(), greedy(1)))
        warm.append(seconds)
        hits.append(warm_out.usage.num_hit_tokens)
    return {
        "num_prompt_tokens": warm_out.usage.num_prompt_tokens,
        "num_hit_tokens": statistics.median(hits),
        "cold_s": spread(cold),
        "warm_s": spread(warm),
        "ratio": statistics.median(c / w for c, w in zip(cold, warm, strict=True)),
    }


def conversation(engine: Engine, turns: int = 10) -> dict[str, Any]:
    """Each turn's prompt has all before it; what the last answer re-tokenizes to is computed again from there."""
    engine.core.cache.clear()
    messages = [{"role": "system", "content": system_prompt(engine, 500)}]
    rows, known = [], []
    for turn in range(turns):
        messages.append({"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)]})
        prompt = chat_tokens(engine, messages)
        same = next(
            (i for i, (a, b) in enumerate(zip(prompt, known, strict=False)) if a != b), min(len(prompt), len(known))
        )
        [out] = engine.generate([prompt], greedy(48))
        rows.append(
            {
                "num_prompt_tokens": len(prompt),
                "num_hit_tokens": out.usage.num_hit_tokens,
                "num_same_tokens": same,
                "num_computed_tokens": len(prompt) - out.usage.num_hit_tokens,
            }
        )
        messages.append({"role": "assistant", "content": out.text})
        known = prompt + out.completions[0].token_ids[:-1]  # the last token was sampled, not computed
    return {"turns": rows, "every_known_token_hit": all(r["num_hit_tokens"] == r["num_same_tokens"] for r in rows)}


class Watch:
    """An observer that keeps the peak of held blocks and the waste of each step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.peak = 0
        self.waste: list[float] = []

    def on_step(self, stats: StepStats) -> None:
        cache = self.engine.core.cache
        self.peak = max(self.peak, stats.num_held_blocks)
        leases = [sample.lease for sample in self.engine.core._scheduler.running if sample.lease]
        if leases:
            unused = sum(lease.capacity - lease.num_computed_tokens for lease in leases)
            self.waste.append(unused / (cache.num_held_blocks * cache.block_size))

    def on_admitted(self, num_query_tokens: int, num_hit_tokens: int) -> None:
        pass

    def on_finished(self, stats: object) -> None:
        pass


def watched(engine: Engine, work: Callable[[], Any]) -> tuple[Watch, Any]:
    watch = Watch(engine)
    engine.core.observers.append(watch)
    result = work()
    engine.core.observers.remove(watch)
    return watch, result


def sharing(engine: Engine, users: int = 32, max_tokens: int = 32) -> dict[str, Any]:
    prompts = asks(engine, users)
    alone = []
    for prompt in prompts:
        engine.core.cache.clear()
        alone.append(engine.generate([prompt], greedy(max_tokens))[0].completions[0].token_ids)
    engine.core.cache.clear()
    watch, together = watched(engine, lambda: engine.generate(prompts, greedy(max_tokens)))
    size = engine.core.cache.block_size
    unshared = sum(-(-(len(p) + len(o)) // size) for p, o in zip(prompts, alone, strict=True))
    equal = sum(g.completions[0].token_ids == o for g, o in zip(together, alone, strict=True))
    return {
        "users": users,
        "peak_blocks": watch.peak,
        "blocks_without_sharing": unshared,
        "ratio": unshared / watch.peak,
        "equal_outputs": equal,
    }


def waste(engine: Engine, requests: int = 48) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    text = engine.tokenizer.encode(source_text(400_000), add_special_tokens=False)
    engine.core.cache.clear()
    lengths = rng.integers(20, 800, requests)
    starts = rng.integers(0, len(text) - 800, requests)
    prompts = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    params = [greedy(int(n), ignore_eos=True) for n in rng.integers(10, 120, requests)]
    watch, _ = watched(engine, lambda: engine.generate(prompts, params))
    return {"requests": requests, "steps": len(watch.waste), "unused_share": statistics.mean(watch.waste)}


class Recorder:
    """A runner that keeps the logits of every step, by the tokens that led to them."""

    def __init__(self, engine: Engine) -> None:
        self.inner = engine.core._runner
        self.logits: dict[tuple[int, ...], torch.Tensor] = {}

    def execute(self, plan: Sequence[Rows]) -> torch.Tensor:
        logits = self.inner.execute(plan)
        wanted = [rows.sample.tokens.view.tolist() for rows in plan if rows.needs_logits]
        self.logits.update((tuple(tokens), row.clone()) for tokens, row in zip(wanted, logits, strict=True))
        return logits

    def spoilt(self, plan: Sequence[Rows]) -> list[Rows]:
        return self.inner.spoilt(plan)


def equality(engine: Engine, max_tokens: int = 48) -> dict[str, Any]:
    """Largest logit differences from a cold run on the same tokens; `chunking` is what another token budget causes.

    Where another token came out, the best two logits of the cold run must be closer than twice that.
    """
    prompts = asks(engine, 4, 700)
    core = engine.core

    def recorded(prepare: Callable[[], None], preempt: bool = False) -> dict[tuple[int, ...], torch.Tensor]:
        recorder = Recorder(engine)
        for i, prompt in enumerate(prompts):
            prepare()
            core._runner = recorder
            core.add(f"equality-{i}", prompt, greedy(max_tokens, ignore_eos=True))
            steps = 0
            while core.has_work:
                core.step()
                steps += 1
                if preempt and steps % 16 == 0 and core._scheduler.running:
                    core._scheduler._preempt(core._scheduler.running[-1])
                    core.cache.clear()
            core._runner = recorder.inner
        return recorder.logits

    def difference(a: dict[tuple[int, ...], torch.Tensor], b: dict[tuple[int, ...], torch.Tensor]) -> dict[str, Any]:
        common = a.keys() & b.keys()
        top2 = {key: a[key].topk(2).values for key in common if a[key].argmax() != b[key].argmax()}
        return {
            "max_abs_logit_difference": max(float((a[key] - b[key]).abs().max()) for key in common),
            "compared_tokens": len(common),
            "equal_tokens": len(common) - len(top2),
            "max_top2_gap_where_they_differ": max((float(best - next_) for best, next_ in top2.values()), default=0.0),
        }

    def cold() -> None:
        core.cache.clear()

    def warm() -> None:
        core.cache.clear()
        engine.generate(asks(engine, 8, 700)[7], greedy(1))

    base = recorded(cold)
    budget = engine.config.token_budget
    object.__setattr__(engine.config, "token_budget", 96)
    chunked = recorded(cold)
    object.__setattr__(engine.config, "token_budget", budget)
    return {
        "dtype": engine.core.cache.layout.layers[0].parts[0].dtype,
        "chunking": difference(base, chunked),
        "warm": difference(base, recorded(warm)),
        "preempted": difference(base, recorded(cold, preempt=True)),
    }


SECTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "ttft": ttft,
    "conversation": conversation,
    "sharing": sharing,
    "waste": waste,
    "equality": equality,
}


def table(name: str, result: dict[str, Any]) -> Table:
    shown = Table(title=name, title_justify="left", show_header=False)
    for key, value in result.items():
        text = (
            json.dumps(value) if isinstance(value, dict) else f"{value:.4g}" if isinstance(value, float) else str(value)
        )
        shown.add_row(key, text)
    return shown


def turns_table(result: dict[str, Any]) -> Table:
    shown = Table(title="conversation", title_justify="left")
    for column in ("turn", "prompt tokens", "hit", "known before", "computed"):
        shown.add_column(column, justify="right")
    for number, row in enumerate(result["turns"], start=1):
        values = ("num_prompt_tokens", "num_hit_tokens", "num_same_tokens", "num_computed_tokens")
        shown.add_row(str(number), *(str(row[value]) for value in values))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto", help="float32 makes `sharing` and `equality` exact (default: auto)")
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of `ttft`, cold and warm in turn")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args()
    engine = Engine(args.model, dtype=args.dtype, kv_memory=args.kv_memory)
    results = {}
    for name in args.only:
        console.print(f"measuring {name} ...")
        results[name] = ttft(engine, args.rounds) if name == "ttft" else SECTIONS[name](engine)
        if not args.json:
            consoles.results().print(
                turns_table(results[name]) if name == "conversation" else table(name, results[name])
            )
    if args.json:
        json.dump(results, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
