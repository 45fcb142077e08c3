from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="encryption needs the extra 'encryption'")

from pagoda.errors import ConfigError
from pagoda.kv.tiers.encrypted import SEAL_BYTES, EncryptedTier
from pagoda.kv.tiers.fake import MemoryTier
from pagoda.kv.tiers.records import Corrupt, Found, Missing, Record
from pagoda.kv.tiers.spec import load_key
from tests.kv.tiers.kit import KIB, get, record, rid


def test_the_store_sees_neither_payload_nor_repetition() -> None:
    inner = MemoryTier(1 << 20)
    tier = EncryptedTier(inner, bytes(32))
    tier.put([Record(rid(n), bytes(8 * KIB)) for n in range(2)])
    sealed = [get(inner, rid(n))[1][: 8 * KIB + SEAL_BYTES] for n in range(2)]
    assert sealed[0][12:] != sealed[1][12:]
    assert bytes(16) not in sealed[0]


@pytest.mark.parametrize("offset", [0, 11, 12, 4000, 8 * KIB + 12, 8 * KIB + SEAL_BYTES - 1])
def test_a_changed_byte_anywhere_is_a_counted_miss(offset: int) -> None:
    inner = MemoryTier(1 << 20)
    tier = EncryptedTier(inner, bytes(32))
    tier.put([record(0)])
    sealed = bytearray(get(inner, rid(0))[1][: 8 * KIB + SEAL_BYTES])
    sealed[offset] ^= 1
    inner.put([Record(rid(0), sealed)])
    assert get(tier, rid(0))[0] == Corrupt("seal")
    assert tier.lookup([rid(0)]) == [Missing()]
    assert tier.stats()["corrupt_seal"] == 1


def test_a_record_moved_to_another_name_or_key_does_not_open() -> None:
    inner = MemoryTier(1 << 20)
    EncryptedTier(inner, bytes(32)).put([record(0), record(1)])
    inner.put([Record(rid(2), get(inner, rid(0))[1][: 8 * KIB + SEAL_BYTES])])
    assert get(EncryptedTier(inner, bytes(32)), rid(2))[0] == Corrupt("seal")
    assert get(EncryptedTier(inner, b"x" * 32), rid(1))[0] == Corrupt("seal")
    assert get(EncryptedTier(inner, bytes(32)), rid(0), 8 * KIB) == (Found(8 * KIB), record(0).data)


def test_keys_from_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIER_KEY", "ab" * 32)
    (tmp_path / "key").write_text("cd" * 16 + "\n")
    assert load_key("env:TIER_KEY") == b"\xab" * 32
    assert load_key(f"file:{tmp_path}/key") == b"\xcd" * 16
    monkeypatch.setenv("TIER_KEY", "not hex")
    for source, message in (("env:TIER_KEY", "hexadecimal"), ("env:NONE", "no encryption key"), ("x", "env:NAME")):
        with pytest.raises(ConfigError, match=message):
            load_key(source)
    (tmp_path / "key").write_text("abcd")
    with pytest.raises(ConfigError, match="has 2 bytes") as caught:
        load_key(f"file:{tmp_path}/key")
    assert "abcd" not in str(caught.value)
