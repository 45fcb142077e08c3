"""Can one tenant tell, from its own answers, whether another sent a certain prefix? It must not be able to.

    round:   A sends a prefix, or, at random, another one of the same length
             B sends the first prefix and a question, and notes the time to its first token and `cached_tokens`

A classifier that sees B's two figures guesses which of both it was. Its area under the ROC curve (AUC) is 0.5 if they
tell nothing. The same probe by A itself, whose AUC must be near 1, shows that the classifier would see a leak.

    python -m benchmarks.isolation [--model smollm2] [--pairs 500] [--prefix-tokens 64] [--kv-format int4] [--json FILE]

The server is the real one, over HTTP, with nothing else to do. Exit status 1 if B's AUC is more than 0.05 from 0.5.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from pagoda.engine.aio import AsyncEngine
from pagoda.engine.engine import Engine
from pagoda.server.app import create_app
from pagoda.server.auth import ApiKeys
from pagoda.server.run import DrainingServer
from pagoda.server.sockets import bind

Floats = npt.NDArray[np.float64]
BAND = 0.05
NUM_FOLDS = 5


@dataclass(frozen=True)
class Result:
    """AUCs of one prober: by the time to first token alone, by `cached_tokens` alone, and by a classifier on both."""

    prober: str
    num_probes: int
    auc_ttft: float
    auc_cached_tokens: float
    auc: float
    auc_low: float
    auc_high: float
    median_ttft_ms_sent: float
    median_ttft_ms_not_sent: float


def auc(scores: Floats, labels: npt.NDArray[np.bool_]) -> float:
    """The chance that a random positive scores above a random negative; ties count half."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts)[inverse] - (counts[inverse] - 1) / 2
    num_pos, num_neg = int(labels.sum()), int((~labels).sum())
    return float((ranks[labels].sum() - num_pos * (num_pos + 1) / 2) / (num_pos * num_neg))


def classify(features: Floats, labels: npt.NDArray[np.bool_], rng: np.random.Generator) -> Floats:
    """Scores `[n]` of a linear discriminant, each from a fit to the other folds."""
    fold = rng.permutation(len(labels)) % NUM_FOLDS
    scores = np.empty(len(labels))
    for index in range(NUM_FOLDS):
        train, test = fold != index, fold == index
        mean, spread = features[train].mean(axis=0), features[train].std(axis=0)
        scaled = (features - mean) / np.where(spread > 0, spread, 1.0)
        a, b = scaled[train & labels], scaled[train & ~labels]
        within = np.cov(a.T) + np.cov(b.T) + 1e-3 * np.eye(features.shape[1])
        scores[test] = scaled[test] @ np.linalg.solve(within, a.mean(axis=0) - b.mean(axis=0))
    return scores


def judge(prober: str, probes: Floats, labels: npt.NDArray[np.bool_], rng: np.random.Generator) -> Result:
    """The figures of `probes`, `[n, 2]`: seconds to the first token, cached tokens."""
    ttft = np.log(probes[:, 0])
    scores = classify(np.column_stack([ttft, probes[:, 1]]), labels, rng)
    draws = []
    for _ in range(500):
        pick = rng.integers(0, len(labels), len(labels))
        draws.append(auc(scores[pick], labels[pick]))
    low, high = np.quantile(draws, [0.025, 0.975])
    return Result(
        prober=prober,
        num_probes=len(labels),
        auc_ttft=auc(-ttft, labels),
        auc_cached_tokens=auc(probes[:, 1], labels),
        auc=auc(scores, labels),
        auc_low=float(low),
        auc_high=float(high),
        median_ttft_ms_sent=float(np.median(probes[labels, 0]) * 1e3),
        median_ttft_ms_not_sent=float(np.median(probes[~labels, 0]) * 1e3),
    )


@asynccontextmanager
async def serve(model: str, kv_memory: str, kv_format: str) -> AsyncIterator[tuple[httpx.AsyncClient, int]]:
    """A client of a server with two tenants, a and b, whose keys are their names; and the size of the vocabulary."""
    sizes: dict[str, Any] = {"kv_memory": kv_memory, "max_model_len": 512, "max_num_seqs": 4, "token_budget": 512}
    engine = Engine(model, kv_format=kv_format, progress=False, **sizes)
    app = create_app(AsyncEngine(engine), api_keys=ApiKeys({"a": "a", "b": "b"}), drain_s=1)
    server = DrainingServer(app, log_level="warning")
    sock = bind("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:
        await asyncio.sleep(0.01)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=60) as client:
        yield client, engine.tokenizer.vocab_size
    server.should_exit = True
    await serving


async def probe(client: httpx.AsyncClient, key: str, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token of an answer, and the tokens that hit."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    started, ttft, cached = time.perf_counter(), None, 0
    async with client.stream("POST", "/v1/completions", json=body, headers={"x-api-key": key}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            ttft = ttft or time.perf_counter() - started
            if (usage := json.loads(line[6:]).get("usage")) is not None:
                cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert ttft is not None, "the stream had no chunk"
    return ttft, cached


async def measure(
    model: str, kv_memory: str, kv_format: str, pairs: int, prefix_tokens: int, seed: int
) -> list[Result]:
    """Probe `pairs` times with the prefix sent and as often without, in random order; then the control."""
    rng = np.random.default_rng(seed)

    async with serve(model, kv_memory, kv_format) as (client, vocab_size):

        def tokens(count: int) -> list[int]:
            return [int(token) for token in rng.integers(0, vocab_size, count)]

        for _ in range(20):
            await probe(client, "b", tokens(prefix_tokens + 8))
        results = []
        for prober, num_pairs in (("b", pairs), ("a", max(20, pairs // 10))):
            labels = rng.permutation(np.repeat([True, False], num_pairs))
            probes = []
            for sent in labels:
                prefix, other = tokens(prefix_tokens), tokens(prefix_tokens)
                await probe(client, "a", (prefix if sent else other) + tokens(8))
                probes.append(await probe(client, prober, prefix + tokens(8)))
            results.append(judge(prober, np.array(probes, dtype=np.float64), labels, rng))
    return results


def main() -> None:
    """Run, print, and exit with 1 if B can tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kv-memory", default="128MiB")
    parser.add_argument("--kv-format", default="auto")
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--prefix-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = asyncio.run(
        measure(args.model, args.kv_memory, args.kv_format, args.pairs, args.prefix_tokens, args.seed)
    )
    for each in results:
        who = "another tenant" if each.prober == "b" else "the same tenant (control)"
        print(
            f"{who}: AUC {each.auc:.3f} [{each.auc_low:.3f}, {each.auc_high:.3f}] over {each.num_probes} probes; "
            f"TTFT alone {each.auc_ttft:.3f}, cached_tokens alone {each.auc_cached_tokens:.3f}; median TTFT "
            f"{each.median_ttft_ms_sent:.1f} ms sent, {each.median_ttft_ms_not_sent:.1f} ms not sent"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in results], indent=1))
    sys.exit(abs(results[0].auc - 0.5) > BAND)


if __name__ == "__main__":
    main()
