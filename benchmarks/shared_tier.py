"""What one replica computed, another restores: `python -m benchmarks.shared_tier`.

Two replicas over one shared tier, each prompt asked three times: of one replica, which computes it; of the other, which
has never seen it and may restore it from the tier; of the other again, from its pool. Reported are times to first
token, the tokens that hit, and whether the answers are the same. `--tier` takes any tier that processes may share: a
folder as an object store (the default), `shm:NAME:SIZE`, an S3 address, Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from benchmarks import consoles
from benchmarks.cluster import completion, events, replicas
from benchmarks.texts import source_text

console = consoles.progress()
TOKEN = "benchmark"
STEPS = ("computed by one", "restored by the other", "from its own pool")


@dataclass(frozen=True)
class Answer:
    """What one request gave."""

    ttft_s: float
    num_prompt_tokens: int
    num_hit_tokens: int
    text: str


async def ask(http: httpx.AsyncClient, prompt: str, max_tokens: int) -> Answer:
    """Stream a completion."""
    started, first, text, usage = time.perf_counter(), None, "", {}
    async with completion(http, prompt, max_tokens) as answer:
        async for event in events(answer):
            first = time.perf_counter() - started if first is None else first
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
    hit = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(first or 0.0, usage["prompt_tokens"], hit, text)


async def until_stored(http: httpx.AsyncClient, wait_s: float = 20.0) -> None:
    """Wait until a replica writes nothing more to its tier."""
    deadline, before = time.monotonic() + wait_s, -1
    while time.monotonic() < deadline:
        tiers = (await http.get("/v1/kv/overview")).json()["tiers"]
        written = sum(tier["written_records"] for tier in tiers)
        if written == before and written:
            return
        before = written
        await asyncio.sleep(0.5)


async def measure(args: argparse.Namespace, tier: str) -> list[list[Answer]]:
    """For each prompt, the answers of all STEPS."""
    text = source_text((args.prompts + 1) * args.chars)
    starts = range(0, (args.prompts + 1) * args.chars, args.chars)
    prompts = [text[start : start + args.chars] for start in starts]
    more = ["--tier", tier, "--secret", "benchmark"]
    headers = {"x-pagoda-token": TOKEN}
    rows = []
    async with replicas(args, token=TOKEN, more=more) as fleet:
        one, other = (
            httpx.AsyncClient(base_url=url, headers=headers, timeout=600, trust_env=False) for url in fleet.urls
        )
        async with one, other:
            for http in one, other:  # what a process does once is no part of it
                await ask(http, prompts[0][::-1], args.max_tokens)
            for prompt in prompts[1:]:
                computed = await ask(one, prompt, args.max_tokens)
                await until_stored(one)
                await asyncio.sleep(args.settle)
                rows.append([computed, *[await ask(other, prompt, args.max_tokens) for _ in range(2)]])
    return rows


def print_rows(tier: str, rows: list[list[Answer]]) -> dict[str, Any]:
    """A table, and its figures."""
    table = Table("", "TTFT median", "tokens hit", title=tier, box=None)
    figures: dict[str, Any] = {"tier": tier, "prompts": len(rows)}
    for step, answers in zip(STEPS, zip(*rows, strict=True), strict=True):
        ttft = statistics.median(answer.ttft_s for answer in answers)
        hit = sum(answer.num_hit_tokens for answer in answers) / sum(answer.num_prompt_tokens for answer in answers)
        table.add_row(step, f"{ttft * 1000:.0f} ms", f"{hit:.1%}")
        figures[step] = {"ttft_p50_s": round(ttft, 4), "hit_rate": round(hit, 4)}
    figures["same_answers"] = all(len({answer.text for answer in row}) == 1 for row in rows)
    console.print(table)
    console.print(f"answers are {'the same' if figures['same_answers'] else 'not all the same'}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tier", help="a shared tier (default: a folder of its own, as an object store)")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--chars", type=int, default=12_000, help="of a prompt")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--kv-memory", default="512MiB", help="of each replica")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--settle", type=float, default=6.0, help="seconds until others see what was stored")
    parser.add_argument("--out", type=Path, help="figures as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tier = args.tier or f"file://{folder}"
        figures = print_rows("a folder" if args.tier is None else tier, asyncio.run(measure(args, tier)))
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
