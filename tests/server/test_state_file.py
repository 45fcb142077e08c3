"""Files that keep state over restarts: one that cannot be written is an error before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda.errors import ConfigError
from pagoda.server.ledger import Ledger
from pagoda.server.named_caches import NamedCaches
from pagoda.server.public_prefixes import PublicPrefixes


@pytest.mark.parametrize("owner", [Ledger, NamedCaches, PublicPrefixes])
def test_a_file_that_cannot_be_written_is_an_error_at_start(tmp_path: Path, owner: Callable[[Path], object]) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*gone.state\.json: No such file or directory"):
        owner(tmp_path / "gone" / "state.json")
    owner(tmp_path / "state.json")
    assert list(tmp_path.iterdir()) == []  # nothing is written before there is something to keep
