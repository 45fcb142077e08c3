from __future__ import annotations

import json
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient

from pagoda.engine.outputs import FinishReason, RequestStats, Usage
from pagoda.errors import ConfigError
from pagoda.kv.keys import Scope
from pagoda.plan.access_log import read_access_log
from pagoda.server.access_log import AccessLog
from pagoda.server.app import create_app
from tests.server.fake_backend import FakeBackend
from tests.waiting import PATIENCE_S


def stats(prompt: range, scope: Scope | None = None, ttft_s: float | None = 0.1, e2e_s: float = 1.0) -> RequestStats:
    usage = Usage(len(prompt), 3, 5)
    tokens = np.array(prompt, dtype=np.int32)
    return RequestStats("r", tokens, scope or Scope(), FinishReason.STOP, usage, 0.0, ttft_s, (), e2e_s)


def written(path: Path, *finished: RequestStats, secret: str | None = "s", model: str = "m") -> list[list[int]]:
    """The ids of each request, in the order of the file."""
    log = AccessLog(path, model, secret)
    for one in finished:
        log.on_finished(one)
    log.close()
    return [request.blocks.tolist() for request in read_access_log(path)]


def test_ids_are_equal_as_far_as_prompts_are(tmp_path: Path) -> None:
    one, two, three = written(tmp_path / "log", stats(range(40)), stats(range(50)), stats(range(1, 41)))
    assert [len(ids) for ids in (one, two, three)] == [3, 4, 3]
    assert one[:2] == two[:2]
    assert one[2] != two[2]  # eight tokens are not sixteen
    assert not set(two) & set(three)


def test_nothing_is_shared_across_tenants_models_or_secrets(tmp_path: Path) -> None:
    (mine,) = written(tmp_path / "a", stats(range(32)))
    assert written(tmp_path / "b", stats(range(32))) == [mine]
    for number, other in enumerate(
        [
            written(tmp_path / "c", stats(range(32), Scope("tenant"))),
            written(tmp_path / "d", stats(range(32)), model="other"),
            written(tmp_path / "e", stats(range(32)), secret="other"),
            written(tmp_path / "f", stats(range(32)), secret=None),
            written(tmp_path / "g", stats(range(32)), secret=None),
        ]
    ):
        assert not set(other[0]) & set(mine), number


def test_a_log_is_appended_to_and_its_owners_alone(tmp_path: Path) -> None:
    written(tmp_path / "log", stats(range(16)))
    assert len(written(tmp_path / "log", stats(range(16)))) == 2
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert lines[0] == lines[2] == {"pagoda_access_log": 1, "model": "m", "block_tokens": 16}
    assert {key: lines[1][key] for key in ("prompt", "output", "hit")} == {"prompt": 16, "output": 5, "hit": 3}


def test_a_request_without_an_answer_is_not_logged(tmp_path: Path) -> None:
    assert written(tmp_path / "log", stats(range(16), ttft_s=None)) == []


def test_a_writer_that_falls_behind_drops_lines_and_blocks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.server.access_log._MAX_QUEUED", 2)
    go = threading.Event()
    monkeypatch.setattr(AccessLog, "_ids", lambda self, stats: b"\0" * 8 if go.wait(PATIENCE_S) else b"")
    log = AccessLog(tmp_path / "log", "m")
    for _ in range(10):
        log.on_finished(stats(range(16)))
    assert 7 <= log.num_dropped <= 8  # two wait, and one may be in the writer's hands
    go.set()
    log.close()
    assert len(list(read_access_log(tmp_path / "log"))) == 10 - log.num_dropped


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="access log"):
        AccessLog(tmp_path / "no" / "log", "m")


def test_the_server_logs_what_it_answers(tmp_path: Path) -> None:
    app = create_app(FakeBackend(), access_log=AccessLog(tmp_path / "log", "m"))
    body = {"model": "fake", "prompt": "x" * 40, "max_tokens": 3}
    with TestClient(app) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        for _ in range(2):
            assert client.post("/v1/completions", json={**body, "model": model}).status_code == 200
    one, two = read_access_log(tmp_path / "log")
    assert one.blocks.tolist() == two.blocks.tolist()
    assert (one.num_prompt_tokens, one.num_output_tokens) == (40, 3)
    assert b"xxx" not in (tmp_path / "log").read_bytes()
