"""The half that runs in Transformers' environment: cases in, figures of every token out. Imports nothing of ours.

python quantized_side.py WORK.json RESULT.json

A prompt is read in pieces as long as the residual window. Its quantized caches quantize what they hold anew whenever
that window is full, so what a token reads is then what it would read if it were generated.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, QuantizedCache

PIECE = 128  # residual_length, as it is by default


class Reader:
    """A model, and a way to make its cache."""

    def __init__(self, model: Any, options: dict[str, Any] | None) -> None:
        self._model, self._options = model, options

    def cache(self) -> Any:
        """An empty one; a DynamicCache, which keeps everything in full, if there are no options."""
        config = self._model.config
        return DynamicCache() if self._options is None else QuantizedCache(config=config, **self._options)

    def read(self, tokens: list[int], cache: Any) -> Iterator[torch.Tensor]:
        """Logits after every token, a piece at a time. Mutates the cache."""
        for first in range(0, len(tokens), PIECE):
            piece = torch.tensor([tokens[first : first + PIECE]])
            yield self._model(piece, past_key_values=cache).logits[0].float()

    def fill(self, tokens: list[int]) -> Any:
        """A cache that has read these tokens."""
        cache = self.cache()
        for first in range(0, len(tokens), PIECE):
            self._model(torch.tensor([tokens[first : first + PIECE]]), past_key_values=cache, logits_to_keep=1)
        return cache


def fork(cache: Any) -> Any:
    """The same cache to go on from: layers replace their tensors and never write into them."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other


def figures(full: torch.Tensor, other: torch.Tensor, tokens: list[int]) -> dict[str, list[Any]]:
    """As benchmarks/quality/compare.py has them."""
    p, q, target = full.log_softmax(-1), other.log_softmax(-1), torch.tensor(tokens)[:, None]
    return {
        "kl": (p.exp() * (p - q)).sum(-1).tolist(),
        "nll_full": (-p.gather(1, target)[:, 0]).tolist(),
        "nll": (-q.gather(1, target)[:, 0]).tolist(),
        "agrees": (p.argmax(-1) == q.argmax(-1)).tolist(),
        "right": (q.argmax(-1) == target[:, 0]).tolist(),
        "right_full": (p.argmax(-1) == target[:, 0]).tolist(),
    }


def text(full: Reader, others: dict[str, Reader], tokens: list[int]) -> dict[str, dict[str, list[Any]]]:
    """Every token but the first."""
    found: dict[str, dict[str, list[Any]]] = {name: {} for name in others}
    reads = [each.read(tokens[:-1], each.cache()) for each in (full, *others.values())]
    at = 1
    for expected, *logits in zip(*reads, strict=True):
        for kept, each in zip(found.values(), logits, strict=True):
            for key, values in figures(expected, each, tokens[at : at + len(expected)]).items():
                kept.setdefault(key, []).extend(values)
        at += len(expected)
    return found


def recall(full: Reader, others: dict[str, Reader], context: dict[str, Any]) -> list[dict[str, dict[str, list[Any]]]]:
    """Each question's answer, all after the same context."""
    readers = [full, *others.values()]
    filled = [each.fill(context["tokens"]) for each in readers]
    found = []
    for question, answer in context["questions"]:
        first, last = len(question) - 1, len(question) + len(answer) - 1
        expected, *logits = [
            torch.cat(list(each.read([*question, *answer], fork(cache))))[first:last]
            for each, cache in zip(readers, filled, strict=True)
        ]
        found.append({name: figures(expected, each, answer) for name, each in zip(others, logits, strict=True)})
    return found


def speed(reader: Reader, tokens: list[int], steps: int) -> float:
    """Tokens a second, decoding after these."""
    cache = reader.fill(tokens)
    started = time.perf_counter()
    for token in tokens[:steps]:
        for _ in reader.read([token], cache):
            pass
    return steps / (time.perf_counter() - started)


def usable(model: Any, caches: dict[str, dict[str, Any]]) -> tuple[dict[str, Reader], dict[str, str]]:
    """Those that can be made and go beyond their residual window here, and why the others cannot."""
    found, failed = {}, {}
    for name, options in caches.items():
        reader = Reader(model, options)
        try:
            reader.fill(list(range(2 * PIECE)))
        except Exception as error:  # what is wrong with a backend is part of the result
            failed[name] = f"{type(error).__name__}: {error}".strip()
        else:
            found[name] = reader
    return found, failed


@torch.inference_mode()
def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(work["threads"])
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(work["model"], dtype=getattr(torch, work["dtype"]), attn_implementation="sdpa").eval()
    full = Reader(model, None)
    others, failed = usable(model, work["caches"])
    started = time.perf_counter()
    result = {
        "versions": {name: version(name) for name in ("transformers", "torch", "optimum-quanto", "hqq")},
        "failed": failed,
        "text": {name: [text(full, others, each) for each in texts] for name, texts in work["text"].items()},
        "tasks": [[recall(full, others, each) for each in contexts] for contexts in work["tasks"]],
        "tokens_per_s": {
            name: speed(reader, work["context"], work["steps"]) for name, reader in {"full": full, **others}.items()
        },
    }
    result["seconds"] = time.perf_counter() - started
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
