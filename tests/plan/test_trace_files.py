from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from pagoda.errors import ConfigError
from pagoda.plan.access_log import read_access_log
from pagoda.plan.trace_files import detect, open_trace
from tests.plan.test_traces import MOONCAKE, written

BAILIAN = {"timestamp": 2.5, "input_length": 40, "output_length": 8, "hash_ids": [1, 2, 3]}
SESSION = {"timestamp": 5_000_000, "input": "a" * 100, "output": "", "session_id": "x"}
HEADER = {"pagoda_access_log": 1, "model": "m", "block_tokens": 16}


def logged(time: float, *blocks: int, output: int = 1) -> dict[str, object]:
    ids = base64.b64encode(np.array(blocks, dtype="<i8").tobytes()).decode()
    return {"time": time, "prompt": 16 * len(blocks) - 1, "output": output, "hit": 0, "blocks": ids}


@pytest.mark.parametrize(
    ("name", "lines", "format"),
    [
        ("a.jsonl", [MOONCAKE], "mooncake"),
        ("a.jsonl", ["", BAILIAN], "bailian"),
        ("a.jsonl", [{**MOONCAKE, "input_length": 5, "hash_ids": [1]}], "mooncake"),  # one block either way
        ("a.jsonl", [SESSION], "sessions"),
        ("a.log", [HEADER], "access-log"),
        ("a.csv", ["TIMESTAMP,ContextTokens,GeneratedTokens"], "lengths"),
    ],
)
def test_formats_are_told_apart(tmp_path: Path, name: str, lines: list[object], format: str) -> None:
    file = written(tmp_path / name, *lines)
    assert detect(file) == open_trace([file]).format == format


@pytest.mark.parametrize("lines", [[], ["{"], ["[1]"], [{"text": 1}], [{"hash_ids": 5, "input_length": 1}]])
def test_what_is_no_trace_is_said_so(tmp_path: Path, lines: list[object]) -> None:
    with pytest.raises(ConfigError, match="known format"):
        detect(written(tmp_path / "a.jsonl", *lines))


def test_missing_mixed_and_empty_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no trace at"):
        open_trace([tmp_path / "nothing"])
    with pytest.raises(ConfigError, match=r"no \.jsonl"):
        open_trace([tmp_path])
    written(tmp_path / "a.jsonl", MOONCAKE)
    written(tmp_path / "b.jsonl", SESSION)
    with pytest.raises(ConfigError, match="different formats"):
        open_trace([tmp_path])
    with pytest.raises(ConfigError, match="mooncake"):
        open_trace([tmp_path], "parquet")


def test_files_are_merged_by_time_from_zero_and_every_byte_is_reported(tmp_path: Path) -> None:
    one = written(tmp_path / "one.jsonl", {**MOONCAKE, "timestamp": 1000}, {**MOONCAKE, "timestamp": 3000})
    two = written(tmp_path / "two.jsonl", {**MOONCAKE, "timestamp": 2000})
    trace = open_trace([one, two])
    sizes: list[int] = []
    assert [request.time for request in trace.requests(sizes.append)] == [0.0, 1.0, 2.0]
    assert sum(sizes) == trace.num_bytes


def test_sessions_of_a_folder_start_one_after_the_other(tmp_path: Path) -> None:
    for name in "ab":
        written(tmp_path / f"{name}.jsonl", SESSION)
    assert [request.time for request in open_trace([tmp_path], interval_s=7.0).requests()] == [0.0, 7.0]


def test_an_access_log_is_put_in_the_order_of_arrival(tmp_path: Path) -> None:
    file = written(tmp_path / "log", HEADER, logged(30.0, 1, 2), logged(20.0, 1, 3), HEADER, logged(40.5, 9, output=7))
    requests = list(read_access_log(file))
    assert [request.time for request in requests] == [20.0, 30.0, 40.5]
    assert requests[0].blocks.tolist() == [1, 3]
    assert (requests[0].block_tokens, requests[0].num_prompt_tokens) == (16, 31)
    assert requests[2].num_output_tokens == 7
    assert [request.time for request in open_trace([file]).requests()] == [0.0, 10.0, 20.5]


def test_who_ended_much_later_than_others_counts_as_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.plan.access_log._MAX_WAITING", 2)
    file = written(tmp_path / "log", HEADER, *(logged(float(t), t) for t in (10, 11, 12, 13, 1)))
    assert [request.time for request in read_access_log(file)] == [10.0, 11.0, 11.0, 12.0, 13.0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([logged(1.0, 1)], "line 1: a request comes before"),
        ([{**HEADER, "pagoda_access_log": 2}], "line 1: version 2"),
        ([HEADER, {**logged(1.0, 1), "blocks": "!"}], "line 2: "),
        ([HEADER, {**logged(1.0, 1), "prompt": 17}], "line 2: 17 tokens are not 1 blocks"),
        ([HEADER, json.dumps({"time": 1})], "line 2: blocks is missing"),
    ],
)
def test_a_bad_line_of_an_access_log_is_named(tmp_path: Path, lines: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(read_access_log(written(tmp_path / "log", *lines)))
