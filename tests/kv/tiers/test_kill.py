"""Kill -9 at random instants: what comes back is whole, right and accounted for.

PAGODA_KILLS=200 runs as many kills as the release asks for.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagoda.kv.tiers.records import Found, Missing
from tests.kv.tiers.kit import MAKERS, Clock, get, rid
from tests.kv.tiers.writer import CAPACITY, NUM_IDS, NUM_OWNERS, content

KILLS = int(os.environ.get("PAGODA_KILLS", "5"))


def run_and_kill(name: str, folder: Path, seed: int, delay_s: float) -> list[list[str]]:
    """Lines that the writer had finished when it died."""
    command = [sys.executable, "-m", "tests.kv.tiers.writer", name, str(folder), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        assert writer.stdout.readline() == "ready\n", writer.stderr.read()
        time.sleep(delay_s)
        writer.send_signal(signal.SIGKILL)
        lines = writer.stdout.read().split("\n")
        assert writer.stderr.read() == ""
    return [line.split() for line in lines[:-1]]


@pytest.mark.parametrize("name", ["disk", "shared"])
def test_a_killed_writer_leaves_whole_records_and_exact_accounts(name: str, tmp_path: Path) -> None:
    maker = next(m for m in MAKERS if m.name == name)
    rng = random.Random(7)
    restored = 0
    for kill in range(KILLS):
        said = run_and_kill(name, tmp_path, kill, rng.random() * 0.3)
        promised: dict[int, tuple[int, float]] = {}
        purged: dict[int, int] = {}
        deleting = purging = -1
        writers_clock = 0.0
        for line in said:
            if line[0] == "clock":
                writers_clock = float(line[1])
                continue
            number = int(line[1])
            if line[0] == "purging":
                purging = number
                continue
            if line[0] == "purged":
                purged[number], purging = int(line[2]), -1
                for gone in [n for n in promised if n % NUM_OWNERS == number]:
                    del promised[gone]
                continue
            match line[0]:
                case "put":
                    _, lease = promised.get(number, (0, 0.0))
                    promised[number] = (int(line[2]), max(lease, float(line[3])))
                case "deleting":
                    deleting = number
                case "del":
                    promised.pop(number, None)
                    deleting = -1
        with maker.open(CAPACITY, Clock(time.time()), tmp_path) as tier:
            usage, infos = tier.usage(), {info.id: info for info in tier.scan()}
            assert usage.used_bytes <= CAPACITY
            assert usage.num_records == len(infos)
            assert usage.payload_bytes == sum(info.num_bytes for info in infos.values())
            restored += usage.num_records
            for number in range(NUM_IDS):
                result, data = get(tier, rid(number))
                if isinstance(result, Found):
                    version = int.from_bytes(data[4:8], "little")
                    assert data[: result.num_bytes] == content(number, version)
                    assert version > purged.get(number % NUM_OWNERS, 0)
                    if number in promised:
                        assert version >= promised[number][0]
                else:
                    assert result == Missing()
                    leased = number in promised and promised[number][1] > writers_clock
                    assert not leased or number == deleting or number % NUM_OWNERS == purging
            assert not [n for n in tier.stats() if n.startswith(("corrupt", "truncated", "wrong"))]
            assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) <= CAPACITY
    assert restored > 0
