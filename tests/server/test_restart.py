"""`pagoda serve --tier disk:...` as a process of its own: stopped or killed, it comes back warm and answers alike.

PAGODA_KILLS=200 kills it as often as a release asks for.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagoda import Engine, SamplingParams
from pagoda.kv.tiers.disk import DiskTier
from pagoda.kv.tiers.records import Found, Target
from tests.model import models, tokenizers_made_here
from tests.waiting import PATIENCE_S, until

from .nursery import Nursery, Server, nursery

# A model as tiny as this one computes faster than a busy machine restores: let the server believe that it is slow.
SLOW_MODEL = """
import functools
from pagoda.engine import scheduler
scheduler.PrefillSpeed = functools.partial(scheduler.PrefillSpeed, 100.0)
"""
CAPACITY = 16 << 20
KILLS = int(os.environ.get("PAGODA_KILLS", "6"))
PROMPTS = [
    f"Ledger {n}: the harbour master counts the boats at dawn and at dusk, {n} days in a row, and writes down "
    "the tide, the wind and the name of every captain who paid." * 2
    for n in range(6)
]


@pytest.fixture(scope="module")
def parent() -> Iterator[Nursery]:
    with nursery(SLOW_MODEL) as parent:
        yield parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


def make_model(folder: Path, **sizes: int) -> Path:
    tokenizer = tokenizers_made_here.byte_level()
    usual = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512}
    built = models.build("llama", **(usual | sizes))
    return tokenizers_made_here.save(tokenizer, models.save(built, folder))


def born(parent: Nursery, model: Path, disk: Path, log: Path) -> Server:
    options = {
        "--dtype": "float32",
        "--kv-memory": "1MiB",
        "--log-level": "warning",
        "--tier": f"disk:{disk}:{CAPACITY}",
    }
    return Server(parent, [str(model), *(word for pair in options.items() for word in pair)], log)


def ask(server: Server, prompt: str) -> tuple[str, int]:
    """The answer and how many tokens of the prompt were cached."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def metric(server: Server, name: str) -> float:
    """A sample of /metrics, by its name and labels as written there."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))


def stop(server: Server) -> None:
    server.send(signal.SIGTERM)
    assert server.wait() == 0
    assert "Traceback" not in server.printed


def test_a_server_that_is_started_again_is_warm(parent: Nursery, model: Path, tmp_path: Path) -> None:
    server = born(parent, model, tmp_path / "kv", tmp_path / "first")
    text, cached = ask(server, PROMPTS[0])
    assert cached == 0
    stop(server)  # at once: stopping writes what is queued
    server = born(parent, model, tmp_path / "kv", tmp_path / "second")
    again, cached = ask(server, PROMPTS[0])
    assert again == text
    assert cached > 50
    assert cached % 16 == 0
    assert metric(server, "pagoda_restored_tokens_total") == cached
    assert metric(server, 'pagoda_tier_restored_tokens_total{tier="disk"}') == cached
    [tier] = httpx.get(f"{server.url}/health").json()["tiers"]
    assert tier["name"] == "disk"
    assert tier["state"] == "ok"
    assert tier["num_records"] >= cached // 16
    stop(server)


def test_a_server_that_is_stopped_has_let_go_of_its_model(parent: Nursery, tmp_path: Path) -> None:
    """In BF16 and of sizes that the native decoder takes: what holds it at exit is told on stderr, as leaked."""
    sizes = {"vocab_size": 352, "hidden_size": 96, "intermediate_size": 64, "head_dim": 16}
    model = make_model(tmp_path, **sizes)
    server = Server(parent, [str(model), "--dtype", "bfloat16", "--kv-memory", "1MiB"], tmp_path / "log")
    assert ask(server, PROMPTS[0])[0]
    stop(server)
    assert "leaked" not in server.printed


def check_accounts(disk: Path) -> int:
    """Open what a killed server left: everything in it verifies and is counted exactly. Returns the records."""
    with DiskTier(disk, CAPACITY) as tier:
        usage, infos = tier.usage(), list(tier.scan())
        assert usage.num_records == len(infos) == len({info.id for info in infos})
        assert usage.payload_bytes == sum(info.num_bytes for info in infos)
        assert usage.used_bytes == sum(path.stat().st_size for path in disk.iterdir()) <= CAPACITY
        found = tier.get_into([Target(info.id, bytearray(info.num_bytes)) for info in infos])
        assert found == [Found(info.num_bytes) for info in infos]
        assert not [name for name in tier.stats() if name.startswith(("corrupt", "truncated", "wrong", "foreign"))]
    return len(infos)


@pytest.mark.slow
def test_killed_in_traffic_it_comes_back_warm_and_right(parent: Nursery, model: Path, tmp_path: Path) -> None:
    engine = Engine(str(model), dtype="float32", kv_memory="1MiB", progress=False)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)

    def right(prompt: str) -> str:
        return engine.generate(prompt, params)[0].text

    first = right(PROMPTS[0])
    rng = random.Random(11)
    disk = tmp_path / "kv"
    num_warm = num_answers = num_records = 0
    with ThreadPoolExecutor(4) as clients:
        for kill in range(KILLS):
            server = born(parent, model, disk, tmp_path / f"log-{kill}")
            text, cached = ask(server, PROMPTS[0])
            assert text == first
            num_warm += cached > 50
            if not kill:
                assert cached == 0
                # From here on the first prompt is on disk: what is not there yet is not there after a kill.
                until(lambda server=server: metric(server, 'pagoda_tier_records{tier="disk"}') >= 5)
            # New prompts, so that there is something to write, and old ones.
            prompts = [f"{kill}: {prompt}" for prompt in PROMPTS] + [f"{max(0, kill - 1)}: {PROMPTS[1]}"]
            asked = [(prompt, clients.submit(ask, server, prompt)) for prompt in prompts]
            wanted = rng.randrange(len(asked))
            until(lambda asked=asked, wanted=wanted: sum(answer.done() for _, answer in asked) >= wanted)
            time.sleep(rng.random() * 0.05)  # in the middle of the next, or of what is written
            server.kill()
            for prompt, answer in asked:
                error = answer.exception()
                assert error is None or isinstance(error, httpx.TransportError), error
                assert error is not None or answer.result()[0] == right(prompt)
                num_answers += error is None
            num_records = check_accounts(disk)
            assert num_records >= 5
            assert "Traceback" not in server.printed
        server = born(parent, model, disk, tmp_path / "log-last")
        assert [ask(server, prompt)[0] for prompt in prompts] == [right(prompt) for prompt in prompts]
        server.kill()
    print(
        f"{KILLS} kills, {num_warm} warm restarts, {num_answers} answers in traffic, {num_records} records in the end"
    )
    assert num_warm == KILLS - 1
    assert KILLS < 5 or num_answers > 0
