"""`pagoda serve --config FILE`: where each option's value comes from, and what is said of a bad file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pagoda import cli
from pagoda.cli import options
from pagoda.errors import ConfigError

FILE = """
model = "from-file"
kv-memory = "1MiB"
max-num-seqs = 3
port = 0
tier = ["dram:1MiB", "disk:/nowhere:8MiB?write=back"]
tier-key = "file:/etc/key"
"""


class Stop(Exception):
    """Ends the command where the engine would be loaded."""


def serve(monkeypatch: pytest.MonkeyPatch, *args: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """What the command would load its engine with."""
    seen: dict[str, Any] = {}

    def load_engine(model: str, **settings: Any) -> None:
        seen.update(settings, model=model)
        raise Stop

    monkeypatch.setattr(options, "load_engine", load_engine)
    result = CliRunner().invoke(cli.app, ["serve", *args], env=env)
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert isinstance(result.exception, Stop), result.output
    return seen


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pagoda.toml"
    path.write_text(FILE)
    return path


def test_values_come_from_the_file(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    seen = serve(monkeypatch, "--config", str(file))
    assert seen["model"] == "from-file"
    assert seen["kv_memory"] == "1MiB"
    assert seen["max_num_seqs"] == 3
    assert list(seen["tiers"]) == ["dram:1MiB", "disk:/nowhere:8MiB?write=back"]
    assert seen["tier_key"] == "file:/etc/key"
    assert seen["token_budget"] == 512


def test_the_command_line_and_the_environment_go_first(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    arguments = ["other", "--kv-memory", "2MiB", "--tier", "dram:9MiB", "--config", str(file)]
    seen = serve(monkeypatch, *arguments, env={"PAGODA_TIER_KEY": "env:HERE"})
    assert (seen["model"], seen["kv_memory"], list(seen["tiers"])) == ("other", "2MiB", ["dram:9MiB"])
    assert seen["tier_key"] == "env:HERE"
    assert seen["max_num_seqs"] == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kv_memory = 1", "has 'kv_memory'; the options are .*kv-memory"),
        ("config = 'x'", "has 'config'"),
        ("[tier]\nx = 1", "has a table 'tier'"),
        ("port = ", "cannot be read: it is no TOML: .*at the end of line 1"),
        ("max-num-seqs = 'many'", "bad.toml has a wrong value for 'max-num-seqs': .*integer"),
        ("tier = 3", "bad.toml has a wrong value for 'tier'"),
    ],
)
def test_a_bad_file_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        serve(monkeypatch, "--config", str(tmp_path / "bad.toml"))


def test_no_file_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        serve(monkeypatch, "--config", str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-memory", "lots"], "--kv-memory: not a size: 'lots'"),
        (["--tier", "dram:1GiB", "--tier", "disk:/tmp/x:1Gx"], "--tier: the tier 'disk:/tmp/x:1Gx' has a wrong size"),
    ],
)
def test_a_wrong_size_names_its_option(monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve(monkeypatch, *arguments)
