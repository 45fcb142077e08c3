"""Where a serving step's time goes besides the model: `python -m benchmarks.overhead`.

Runs many requests at once and times the parts of each decode step on the engine's thread (wall time, medians):

    schedule   plan the step, reserve blocks       batch    tensors from the plan
    model      the forward pass                    advance  commit full blocks to the tree
    sample     choose tokens                       append   detokenize, stop strings, outputs

Target: schedule, advance and batch together under 3% of the step at 64 running requests.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from pagoda.engine import choosing as engine_choosing
from pagoda.engine import runner as engine_runner
from pagoda.engine.engine import Engine
from pagoda.engine.params import SamplingParams

MEMORY = ("schedule", "batch", "advance")


class Parts:
    """Adds up the time in wrapped calls until `lap`."""

    def __init__(self) -> None:
        self.now: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Time a method of an object, or a function of a module, from now on."""
        call: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.now[name] += time.perf_counter() - started

        setattr(owner, method, timed)

    def lap(self, step_s: float) -> None:
        """End a step."""
        self.steps.append({**self.now, "step": step_s})
        self.now.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--running", type=int, default=64, help="requests at once (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--shared", type=int, default=128, help="of which all have in common (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="decode steps (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    engine = Engine(args.model, max_num_seqs=args.running)
    core = engine.core
    vocabulary = engine.spec.vocab_size
    generator = torch.Generator().manual_seed(0)

    def random_ids(count: int) -> list[int]:
        return torch.randint(100, vocabulary, (count,), generator=generator).tolist()

    parts = Parts()
    parts.wrap(core._scheduler, "schedule", "schedule")
    parts.wrap(core.cache, "advance", "advance")
    parts.wrap(core._runner, "execute", "execute")
    parts.wrap(engine_runner, "build_batch", "batch")
    parts.wrap(engine_choosing, "sample", "sample")
    parts.wrap(core._chooser, "_append", "append")

    shared = random_ids(args.shared)
    params = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    for index in range(args.running):
        core.add(str(index), shared + random_ids(args.prompt - args.shared), params)
    while core.has_work:
        started = time.perf_counter()
        core.step()
        parts.lap(time.perf_counter() - started)
    engine.close()

    decode = parts.steps[-args.tokens + 1 : -1]  # prompts are computed before, and in the last step all end
    for step in decode:
        step["model"] = step["execute"] - step["batch"]
        step["rest"] = step["step"] - sum(step[k] for k in ("schedule", "execute", "advance", "sample", "append"))
        del step["execute"]
    medians = {name: statistics.median(step[name] for step in decode) for name in decode[0]}
    share = sum(medians[name] for name in MEMORY) / medians["step"]
    if args.json:
        json.dump({"ms": {k: v * 1e3 for k, v in medians.items()}, "memory_share": share}, sys.stdout, indent=2)
        return
    for name, seconds in medians.items():
        print(f"{name:10}{seconds * 1e3:9.3f} ms{seconds / medians['step']:8.1%}")
    print(f"scheduling and memory management: {share:.1%} of a step with {args.running} running")


if __name__ == "__main__":
    main()
