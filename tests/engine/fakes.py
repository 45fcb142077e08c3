"""A runner without a model: its next token is a function of what it reads through the block tables.

The fake pool stores tokens where a real one stores KV. The runner writes the new tokens at their slots, reads each
request's whole context back through its block table, and hashes it. A lost block, a wrong table or a write to a shared
block changes what it reads, and so the output: outputs equal `expected_output` only if every block held what it should.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pagoda.engine.config import EngineConfig
from pagoda.engine.core import EngineCore
from pagoda.engine.outputs import Completion
from pagoda.engine.params import SamplingParams
from pagoda.engine.runner import build_batch
from pagoda.engine.step_plan import Rows
from pagoda.kv.hierarchy import Hierarchy, WritePolicy
from pagoda.kv.keys import KeyChain, Scope
from pagoda.kv.tiered import TieredCache
from pagoda.kv.tiers.base import Tier
from tests.kv.fakes import TokenPool, make

VOCAB = 64
EOS = 0


def next_token(context: Sequence[int]) -> int:
    """The fake model. Never EOS."""
    digest = hashlib.blake2b(np.asarray(context, dtype=np.int64).tobytes(), digest_size=4).digest()
    return 1 + int.from_bytes(digest) % (VOCAB - 1)


def expected_output(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeRunner:
    """See the module. `num_computed` counts the rows of all steps; `steps` has each step's plan sizes.

    A step takes `seconds_per_token` for each of its rows, which pass as `sleep` lets them.
    """

    def __init__(self, pool: TokenPool, windows: tuple[int | None, ...]) -> None:
        self.pool = pool
        self.windows = windows
        self.steps: list[list[int]] = []
        self.fail_next = False
        self.seconds_per_token = 0.0
        self.sleep: Callable[[float], None] = time.sleep

    @property
    def num_computed(self) -> int:
        return sum(sum(step) for step in self.steps)

    def execute(self, plan: Sequence[Rows]) -> torch.Tensor:
        if self.fail_next:
            raise RuntimeError("the fake runner was told to fail")
        self.steps.append([rows.stop - rows.start for rows in plan])
        self.sleep(self.seconds_per_token * sum(self.steps[-1]))
        batch = build_batch(plan, torch.device("cpu"))
        flat = self.pool.slots.reshape(-1)
        for slots in batch.slot_mapping:
            flat[slots.numpy()] = batch.token_ids.numpy()
        logits = []
        for index, rows in enumerate(plan):
            contexts = [self._read(table[index].numpy(), rows.stop) for table in batch.block_tables]
            full = rows.sample.tokens.view[: rows.stop].tolist()
            for context, window in zip(contexts, self.windows, strict=True):
                start = 0 if window is None else max(0, rows.stop - window)
                assert context[start:] == full[start:], "the block table does not lead to the request's own tokens"
            if rows.needs_logits:
                row = torch.zeros(VOCAB)
                row[next_token(full)] = 5.0
                logits.append(row)
        return torch.stack(logits) if logits else torch.empty(0, VOCAB)

    def spoilt(self, plan: Sequence[Rows]) -> list[Rows]:
        return []

    def _read(self, table: np.ndarray, length: int) -> list[int]:
        positions = np.arange(length)
        size = self.pool.slots.shape[1]
        return self.pool.slots.reshape(-1)[table[positions // size] * size + positions % size].tolist()


class FakeTokenizer:
    """Token i is a letter or a digit; enough for text and stop strings."""

    strips_leading_space = False
    vocab_size = VOCAB

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1 + ord(char) % (VOCAB - 1) for char in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.token_text(token) for token in ids)

    def token_text(self, token_id: int) -> str:
        return chr(ord("0") + token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS


def make_core(
    num_blocks: int = 64,
    block_size: int = 4,
    windows: tuple[int | None, ...] = (None,),
    max_model_len: int = 512,
    tiers: Sequence[tuple[Tier, WritePolicy]] = (),
    after_hits: int = 0,
    clock: Callable[[], float] = time.monotonic,
    **config: Any,
) -> tuple[EngineCore, FakeRunner]:
    shares = {name: spec.share for name, spec in config.get("tenants", {}).items()}
    cache, pool = make(num_blocks, block_size, windows, shares=shares)
    if tiers:
        hierarchy = Hierarchy(
            tiers,
            block_bytes=cache.layout.block_bytes,
            num_groups=len(windows),
            after_hits=after_hits,
            clock=clock,
        )
        cache = TieredCache(cache.layout, pool, hierarchy, KeyChain(cache.layout.fingerprint({"weights": "fake"})))
    runner = FakeRunner(pool, windows)
    settings = {"block_size": block_size, "max_num_seqs": 16, "token_budget": 32} | config
    core = EngineCore(
        runner,
        cache,
        FakeTokenizer(),  # type: ignore[arg-type]
        EngineConfig(**settings),
        vocab_size=VOCAB,
        eos_ids=[EOS],
        max_model_len=max_model_len,
    )
    return core, runner


def run(core: EngineCore, limit: int = 2000) -> dict[str, list[Completion]]:
    """Step until nothing is left; completions by request id. Checks the books after every step."""
    done: dict[str, list[Completion]] = {}
    for _ in range(limit):
        if not core.has_work:
            return done
        for output in core.step():
            samples = done.setdefault(output.request_id, [])
            for delta in output.deltas:
                while len(samples) <= delta.index:
                    samples.append(Completion(len(samples)))
                samples[delta.index].add(delta)
        core.cache.check()
    raise AssertionError(f"still busy after {limit} steps")


def random_load(
    core: EngineCore,
    rng: np.random.Generator,
    *,
    num_steps: int,
    arrivals: float,
    max_tokens: int,
    before_step: Callable[[int], None] = lambda step: None,
    scopes: Sequence[Scope] = (Scope(),),
    until: Callable[[], bool] = lambda: True,
) -> None:
    """Requests that share prefixes at random, some aborted; checks the books after each step, and every output.

    Args:
        arrivals: the chance that a step begins with a new request.
        max_tokens: outputs are shorter than this.
        before_step: called with the step's number.
        scopes: each request has one of these.
        until: what must have happened in the end, where threads' speed decides when: the load goes on for it, 30 times
            as long if need be.
    """
    prompts: dict[str, list[int]] = {}
    finished: dict[str, list[int]] = {}
    for step in range(30 * num_steps):
        if step >= num_steps and until():
            break
        before_step(step)
        if rng.random() < arrivals and core.num_waiting < 5:
            base = list(prompts.values())[rng.integers(len(prompts))][: rng.integers(60)] if prompts else []
            name = f"r{step}"
            prompts[name] = (base + rng.integers(1, VOCAB, rng.integers(1, 20)).tolist())[:70]
            params = SamplingParams(max_tokens=int(rng.integers(1, max_tokens)), temperature=0.0)
            core.add(name, prompts[name], params, scope=scopes[rng.integers(len(scopes)) if len(scopes) > 1 else 0])
            finished[name] = []
        if rng.random() < 0.05 and prompts:
            core.abort(list(prompts)[rng.integers(len(prompts))])
        for output in core.step():
            finished[output.request_id] += output.deltas[0].token_ids
        core.cache.check()
    assert until(), "what must have happened has not"
    for name, completions in run(core, limit=100_000).items():
        finished[name] += completions[0].token_ids
    for name, tokens in finished.items():
        assert tokens == expected_output(prompts[name], len(tokens))
