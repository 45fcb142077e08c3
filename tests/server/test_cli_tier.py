"""`pagoda tier`: what it says of a disk tier that is whole, damaged, absent or in use."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from pagoda import cli
from pagoda.kv.keys import BlockKey, KeyChain
from pagoda.kv.tiers.records import Record, RecordId
from pagoda.kv.tiers.spec import open_tier, parse_tier

SIZE = 64 << 10


@pytest.fixture
def spec(tmp_path: Path) -> str:
    """A disk tier of 20 records, one leased."""
    spec = f"disk:{tmp_path / 'kv'}:64MiB"
    rng = np.random.default_rng(3)
    with open_tier(parse_tier(spec)) as tier:
        tier.put(
            [
                Record(
                    RecordId(BlockKey(bytes([n]) * 32)),
                    rng.integers(0, 256, SIZE, dtype=np.uint8),
                    lease_until=4e9 * (n == 7),
                )
                for n in range(20)
            ]
        )
    return spec


def run(*args: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, ["tier", *args], input=answer, env={"COLUMNS": "120"})


def test_ls(spec: str) -> None:
    result = run("ls", spec, "--limit", "2")
    assert result.exit_code == 0, result.output
    assert "20 records, 1 leased" in result.output
    assert "of 64.0 MiB used" in result.output
    assert "64.0 KiB" in result.output
    assert result.output.count(" group 0 shard 0 ") == 2


def test_verify_a_whole_tier(spec: str) -> None:
    result = run("verify", spec)
    assert result.exit_code == 0, result.output
    assert "20 records are good, 0 are not" in result.output


def test_verify_counts_damage_and_drops_it(spec: str, tmp_path: Path) -> None:
    payload = np.random.default_rng(3).integers(0, 256, SIZE, dtype=np.uint8).tobytes()
    damaged = 0
    for path in (tmp_path / "kv").iterdir():
        data = path.read_bytes()
        at = data.find(payload)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 1000)
                file.write(bytes([data[at + 1000] ^ 1]))
            damaged += 1
    assert damaged == 1
    result = run("verify", spec)
    assert result.exit_code == 1
    assert "19 records are good, 1 are not" in result.output
    assert "corrupt, checksum: 1" in result.output
    assert "19 records are good, 0 are not" in run("verify", spec).output


def test_purge_asks(spec: str) -> None:
    refused = run("purge", spec, answer="n\n")
    assert refused.exit_code == 1
    assert "Delete 20 records, 1.2 MiB" in refused.output
    assert "20 records," in run("ls", spec).output
    done = run("purge", spec, "--yes")
    assert done.exit_code == 0
    assert "20 records deleted" in done.output
    left = run("ls", spec).output
    assert "0 records, 0 leased" in left
    assert "of that hold no record: a file that was taken stays" in left


def test_a_tenants_records_alone_are_purged(spec: str) -> None:
    keys = KeyChain(bytes(32), hashlib.sha256(b"the servers'").digest())
    with open_tier(parse_tier(spec)) as tier:
        tier.put([Record(RecordId(BlockKey(b"a" * 32)), bytes(SIZE), owner=keys.owner("acme"))])
    assert "0 records deleted" in run("purge", spec, "--tenant", "acme", "--secret", "another", "--yes").output
    assert "1 record deleted" in run("purge", spec, "--tenant", "acme", "--secret", "the servers'", "--yes").output
    assert "20 records," in run("ls", spec).output


@pytest.mark.parametrize("kind", ["disk", "dram", "shm"])
def test_bench_measures_and_leaves_nothing(kind: str, spec: str, tmp_path: Path) -> None:
    spec = {"disk": spec, "dram": "dram:16MiB", "shm": f"shm:{tmp_path / 'shared'}:16MiB"}[kind]
    before = sorted(tmp_path.rglob("*"))
    result = run("bench", spec, "--total", "1MiB", "--record", "64KiB", "--rounds", "2")
    assert result.exit_code == 0, result.output
    assert "64.0 KiB" in result.output
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ls", "dram:1GiB"], "a dram tier is memory of the process that serves"),
        (["ls", "disk:/no/such/folder:1GiB"], "there is no tier at /no/such/folder"),
        (["verify", "shm:/no/such/file:1GiB"], "there is no tier at /no/such/file"),
        (["purge", "tape:1"], "of no kind known here"),
        (["bench", "dram:1GiB", "--total", "much"], "not a size"),
        (["bench", "dram:1MiB", "--total", "4MiB", "--record", "2MiB"], "a record was not stored"),
    ],
)
def test_mistakes_are_one_clear_line(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pagoda", "tier", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_tier_in_use_says_by_whom(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_tier(parse_tier(spec)):
        result = run("ls", spec)
    assert result.exit_code != 0
    assert "in use by process" in str(result.exception)


def test_a_disk_is_not_opened_with_another_size(spec: str) -> None:
    for size in ("2GiB", "16MiB"):
        result = run("purge", spec.replace("64MiB", size), "--yes")
        assert "was made with another size" in str(result.exception)
    assert "20 records," in run("ls", spec).output
