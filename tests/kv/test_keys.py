"""BlockKeys: what they depend on, and that no two inputs read the same."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.errors import ConfigError, InvariantError
from pagoda.kv.keys import KEY_BYTES, BlockKey, KeyChain, Scope

FINGERPRINT = bytes(range(32))
TOKENS = np.arange(64, dtype=np.int32)
CHAIN = KeyChain(FINGERPRINT, b"secret")
GOLDEN = "e282d1f3d3cbf680b05939ae469bce13cca85a317875f54937a60ea5bef1c05a"


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_chain_is_repeated_children(block_size: int, dtype: type) -> None:
    parent = CHAIN.root(Scope("tenant"))
    keys = CHAIN.chain(parent, TOKENS.astype(dtype), block_size)
    for start, key in zip(range(0, 64, block_size), keys, strict=True):
        parent = CHAIN.child(parent, TOKENS[start : start + block_size])
        assert key == parent
        assert len(key) == KEY_BYTES


def test_golden_keys() -> None:
    """Stored blocks outlive the process: a change of these values orphans every store."""
    root = CHAIN.root(Scope("tenant", "salt", "adapter"))
    chain = CHAIN.chain(root, TOKENS, 16)
    assert hashlib.sha256(root + b"".join(chain)).hexdigest() == GOLDEN


def test_roots_differ_by_everything_in_the_scope_fingerprint_and_secret() -> None:
    roots = [
        CHAIN.root(Scope()),
        CHAIN.root(Scope("a")),
        CHAIN.root(Scope(salt="a")),
        CHAIN.root(Scope(adapter="a")),
        KeyChain(bytes(32), b"secret").root(Scope()),
        KeyChain(FINGERPRINT, b"other").root(Scope()),
        KeyChain(FINGERPRINT).root(Scope()),
    ]
    assert len(set(roots)) == len(roots)


def test_children_differ_by_parent_tokens_order_extra_and_secret() -> None:
    root, block = CHAIN.root(Scope()), TOKENS[:16]
    keys = [
        CHAIN.child(root, block),
        CHAIN.child(CHAIN.root(Scope("a")), block),
        CHAIN.child(root, block[::-1]),
        CHAIN.child(root, block + 1),
        CHAIN.child(root, block, b"image"),
        CHAIN.child(root, block, b"imagf"),
        KeyChain(FINGERPRINT, b"other").child(root, block),
        CHAIN.child(CHAIN.child(root, block), block),
    ]
    assert len(set(keys)) == len(keys)


def test_a_block_depends_on_all_before_it() -> None:
    root = CHAIN.root(Scope())
    changed = TOKENS.copy()
    changed[0] = 99
    pairs = zip(CHAIN.chain(root, TOKENS, 16), CHAIN.chain(root, changed, 16), strict=True)
    assert all(a != b for a, b in pairs)


def test_pseudo_tokens_of_images_need_all_their_bits() -> None:
    root = CHAIN.root(Scope())
    low, high = np.array([1], dtype=np.int64), np.array([2**40 + 1], dtype=np.int64)
    assert CHAIN.child(root, low) != CHAIN.child(root, high)


def test_a_block_with_one_wide_token_changes_no_other_block() -> None:
    """Whether a sequence is stored as int32 or int64 depends on all of it; a block's key, on the block and before."""
    root = CHAIN.root(Scope())
    wide = TOKENS.astype(np.int64)
    wide[40] = 2**40
    narrow_keys, keys = CHAIN.chain(root, TOKENS, 16), CHAIN.chain(root, wide, 16)
    assert keys[:2] == narrow_keys[:2]
    assert set(keys[2:]).isdisjoint(narrow_keys)
    assert keys[2] == CHAIN.child(keys[1], wide[32:48])


def test_no_two_contents_read_the_same() -> None:
    """Extra as tokens, two narrow tokens as a wide one: lengths in front of both tell them apart."""
    root = CHAIN.root(Scope())
    two, one = np.array([5, 6], dtype=np.int32), np.array([6], dtype=np.int32)
    wide = np.frombuffer(two.tobytes(), dtype=np.int64)
    keys = [CHAIN.child(root, two), CHAIN.child(root, one, two[:1].tobytes()), CHAIN.child(root, wide)]
    assert len(set(keys)) == 3


def test_a_root_cannot_be_read_as_a_child() -> None:
    """Both digest the same bytes here: fingerprint as parent, empty namespace as no extra, the rest as four tokens."""
    scope = Scope(salt="four", adapter="8 bytes.")
    assert scope.to_bytes()[:8] == bytes(4) + (4).to_bytes(4, "big")
    tokens = np.frombuffer(scope.to_bytes()[8:], dtype=np.int32)
    assert tokens.size == 4
    assert CHAIN.child(BlockKey(FINGERPRINT), tokens) != CHAIN.root(scope)


def test_a_chain_ends_at_a_block_boundary() -> None:
    with pytest.raises(InvariantError, match="whole blocks"):
        CHAIN.chain(CHAIN.root(Scope()), TOKENS[:17], 16)


fields = st.text(st.sampled_from(["a", "b", "\0", "\1", "é"]), max_size=3)


@given(st.tuples(fields, fields, fields), st.tuples(fields, fields, fields))
def test_scopes_are_encoded_without_ambiguity(a: tuple[str, str, str], b: tuple[str, str, str]) -> None:
    assert (Scope(*a).to_bytes() == Scope(*b).to_bytes()) == (a == b)


def test_where_an_adapter_begins_is_part_of_the_scope() -> None:
    scopes = [Scope(adapter="a"), Scope(adapter="a", adapter_from=1), Scope(adapter="a1"), Scope(adapter="a", salt="1")]
    assert len({CHAIN.root(scope) for scope in scopes}) == 4


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="64 bytes"):
        KeyChain(FINGERPRINT, b"x" * 65)
    with pytest.raises(ConfigError, match="32 bytes"):
        KeyChain(b"short")
