"""A process that writes, replaces, deletes and reads records until it is killed, and says what it was promised.

Its clock leaps, so that leases begin and end within a second.

python -m tests.kv.tiers.writer TIER FOLDER SEED    ->    "put NUMBER VERSION LEASE" or "del NUMBER" once done,
                                                             "deleting NUMBER" or "clock SECONDS" before,
                                                             "purging OWNER" before and "purged OWNER VERSION" after
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from pagoda.kv.keys import OwnerTag
from pagoda.kv.tiers.records import Corrupt, Record, Stored, Target
from tests.kv.tiers.kit import KIB, MAKERS, Clock, payload, rid, tag

CAPACITY = 1024 * KIB
NUM_IDS = 100
NUM_OWNERS = 4


def owner_of(number: int) -> OwnerTag:
    """Whose a record is."""
    return tag(str(number % NUM_OWNERS))


def content(number: int, version: int) -> bytes:
    """The bytes of one version: its number and version, then noise that only this version has."""
    size = 1000 + (number * 977 + version * 131) % 30_000
    return number.to_bytes(4, "little") + version.to_bytes(4, "little") + payload(number * 1_000_003 + version, size)


def main() -> None:
    maker = next(m for m in MAKERS if m.name == sys.argv[1])
    rng = random.Random(int(sys.argv[3]))
    clock = Clock(time.time())
    buffers = [bytearray(64 * KIB) for _ in range(3)]
    with maker.open(CAPACITY, clock, Path(sys.argv[2])) as tier:
        print("ready", flush=True)
        version = 0
        while True:
            version += 1
            numbers = [rng.randrange(NUM_IDS) for _ in range(rng.randrange(1, 6))]
            lease = clock.now + 1000 if rng.random() < 0.1 else 0.0
            results = tier.put([Record(rid(n), content(n, version), lease, owner_of(n)) for n in numbers])
            for number, result in zip(numbers, results, strict=True):
                if isinstance(result, Stored):
                    print("put", number, version, lease)
            if version % 7 == 0:
                victim = rng.randrange(NUM_IDS)
                print("deleting", victim, flush=True)
                tier.delete([rid(victim)])
                print("del", victim)
            if version % 11 == 0:
                owner = rng.randrange(NUM_OWNERS)
                print("purging", owner, flush=True)
                tier.purge(tag(str(owner)))
                print("purged", owner, version)
            read = tier.get_into([Target(rid(rng.randrange(NUM_IDS)), buffer) for buffer in buffers])
            if any(isinstance(result, Corrupt) for result in read):
                raise RuntimeError("a record that nobody damaged is corrupt")
            if version % 40 == 0:
                print("clock", clock.now + 400, flush=True)
                clock.now += 400
            sys.stdout.flush()


if __name__ == "__main__":
    main()
