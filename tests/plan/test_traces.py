from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pagoda.errors import ConfigError
from pagoda.plan.traces import chain, overlap, read_bailian, read_lengths, read_mooncake, read_session

MOONCAKE = {"timestamp": 1500, "input_length": 700, "output_length": 20, "hash_ids": [7, 9]}


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_mooncake(tmp_path: Path) -> None:
    (request,) = read_mooncake(written(tmp_path / "trace.jsonl", MOONCAKE))
    assert (request.time, request.blocks.tolist(), request.block_tokens) == (1.5, [7, 9], 512)
    assert (request.num_prompt_tokens, request.num_output_tokens) == (700, 20)


def test_bailian(tmp_path: Path) -> None:
    line = {
        "chat_id": 160,
        "parent_chat_id": 159,
        "timestamp": 62.5,
        "input_length": 40,
        "output_length": 8,
        "type": "text",
        "turn": 2,
        "hash_ids": [1, 2, 3],
    }
    (request,) = read_bailian(written(tmp_path / "trace.jsonl", line, " "))
    assert (request.time, request.blocks.tolist(), request.block_tokens) == (62.5, [1, 2, 3], 16)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting"),
        ("[1]", "line 2: "),
        ({**MOONCAKE, "hash_ids": ["a"]}, "line 2: invalid literal"),
        ({**MOONCAKE, "hash_ids": [[1], [2]]}, "line 2: 700 tokens do not fit"),
        ({**MOONCAKE, "input_length": 1025}, "line 2: 1025 tokens do not fit in 2 blocks of 512"),
        ({**MOONCAKE, "input_length": -1}, "line 2: -1 tokens"),
        ({"timestamp": 0}, "line 2: hash_ids is missing"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    requests = read_mooncake(written(tmp_path / "trace.jsonl", MOONCAKE, line))
    next(requests)
    with pytest.raises(ConfigError, match=message):
        next(requests)


def test_session_text_is_cut_into_prefix_blocks(tmp_path: Path) -> None:
    first = "a" * 64 + "b" * 30
    lines = [
        {"timestamp": 10_000_000, "input": first, "output": "déjà"},
        {"timestamp": 11_500_000, "input": first + "c" * 40, "output": ""},
    ]
    one, two = read_session(written(tmp_path / "session.jsonl", *lines))
    assert (one.time, two.time) == (0.0, 1.5)
    assert (one.num_prompt_tokens, one.num_output_tokens, one.blocks.size) == (24, 2, 2)
    assert one.blocks[0] == two.blocks[0]
    assert one.blocks[1] != two.blocks[1]


def test_equal_text_after_different_text_is_another_block() -> None:
    ids = chain(b"a" * 128)
    assert ids[0] != ids[1]
    assert np.array_equal(ids, chain(b"a" * 128))
    assert chain(b"").size == 0


def test_session_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 1: input is not a string"):
        next(read_session(written(tmp_path / "session.jsonl", {"timestamp": 1, "input": 5, "output": ""})))


def test_lengths_share_nothing(tmp_path: Path) -> None:
    path = written(
        tmp_path / "trace.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,40,10",
        "2023-11-16 18:17:05.4799600,16,8",
    )
    one, two = read_lengths(path)
    assert (one.time, two.time) == (0.0, 1.5)
    assert (one.blocks.size, two.blocks.size, one.num_output_tokens) == (3, 1, 10)
    assert not set(one.blocks) & set(two.blocks)


@pytest.mark.parametrize("row", ["yesterday,1,1", "2023-11-16 18:17:03.97,x,1", "2023-11-16 18:17:03.97,1", "a"])
def test_a_bad_csv_row_is_named(tmp_path: Path, row: str) -> None:
    path = written(tmp_path / "trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", row)
    with pytest.raises(ConfigError, match=r"trace.csv, line 2: "):
        list(read_lengths(path))


def test_sessions_overlap_and_keep_their_order(tmp_path: Path) -> None:
    def session(name: str, *seconds: float) -> Path:
        lines = [{"timestamp": 1e6 * second, "input": name, "output": ""} for second in seconds]
        return written(tmp_path / name, *lines)

    paths = [session("a", 100, 103, 102), session("b", 7, 8)]
    merged = list(overlap([read_session(path) for path in paths], interval=2.0))
    assert [request.time for request in merged] == [0.0, 2.0, 3.0, 3.0, 3.0]
