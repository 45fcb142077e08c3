"""Perplexity along a text far longer than the model's context, with StreamingLLM's sinks and without."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.quality.forced import Forced

# Modules whose import does something, or that need what not every machine has.
_SKIPPED = ("antigravity", "idlelib", "lib2to3", "this", "tkinter", "turtle", "turtledemo", "test", "__")


def library() -> Iterator[str]:
    """Source of Python's standard library, module by module."""
    for module in sorted(pkgutil.iter_modules(), key=lambda each: each.name):
        name = module.name
        if name not in sys.stdlib_module_names or name.startswith(_SKIPPED):
            continue
        try:
            yield inspect.getsource(import_module(name))
        except (ImportError, OSError, TypeError):  # not on this platform, or not written in Python
            continue


def long_text(forced: Forced, num_tokens: int) -> list[int]:
    """So many tokens of it, or all there are."""
    tokens: list[int] = []
    for text in library():
        tokens += forced.engine.tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) >= num_tokens:
            break
    return tokens[:num_tokens]


def measure(
    forced: Forced, num_tokens: int, window: int, pieces: int, sinks: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Perplexity in equal pieces of the text, and the most blocks held during each."""
    tokens = long_text(forced, num_tokens)
    bounds = np.linspace(1, len(tokens), pieces + 1).astype(int)
    cache = forced.engine.core.cache
    nll = np.full(len(tokens), np.nan)
    blocks = np.zeros(pieces, dtype=int)
    policy = {"name": "streaming", "sinks": sinks, "budget": window}
    piece = -1
    for position, logits in forced.read(tokens, 1, decode=False, kv_policy=policy):
        at = min(int(np.searchsorted(bounds, position, side="right")) - 1, pieces - 1)
        if at > piece:
            so_far = f", perplexity {np.exp(nll[bounds[piece] : bounds[at]].mean()):.3f}" if at else ""
            tell(f"streaming: {sinks} sinks, token {position:,} of {len(tokens):,}, {blocks.max()} blocks{so_far}")
            piece = at
        blocks[at] = max(blocks[at], cache.num_held_blocks)
        wanted = logits.new_tensor(tokens[position : position + len(logits)]).long()[:, None]
        nll[position : position + len(logits)] = -logits.log_softmax(-1).gather(1, wanted)[:, 0].numpy()
    perplexity = [float(np.exp(nll[first:last].mean())) for first, last in pairwise(bounds)]
    return {
        "num_tokens": len(tokens),
        "window": window,
        "sinks": sinks,
        "bounds": bounds.tolist(),
        "perplexity": perplexity,
        "most_blocks": blocks.tolist(),
    }
