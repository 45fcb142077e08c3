"""`--config FILE`: options of a command from a TOML file, under the names they have on the command line.

    kv-memory = "2GiB"
    tier = ["dram:8GiB", "disk:/var/cache/pagoda:100GiB"]
    tier-key = "file:/etc/pagoda/tier-key"

What is given on the command line or in the environment goes before what the file says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pagoda.errors import ConfigError
from pagoda.toml import parse_toml


def _apply(context: typer.Context, path: Path | None) -> Path | None:
    if path is not None:
        known = {name: param for param in context.command.params for name in _names(param)}
        context.default_map = _load(path, known, context)
    return path


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,  # before the options for which it has values
        callback=_apply,
        help="TOML file of options, named as here without dashes; the command line and the environment go first.",
    ),
]


def _names(param: Any) -> list[str]:
    """What a parameter is called in a file: an option by its long names, an argument by its own."""
    if param.param_type_name == "argument":
        return [param.name]
    return [name.removeprefix("--") for name in param.opts if name.startswith("--") and name != "--config"]


def _load(path: Path, known: dict[str, Any], context: typer.Context) -> dict[str, Any]:
    """The file's values by parameter. Raises ConfigError."""
    try:
        values = parse_toml(path.read_text())
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error}") from error
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"the configuration {path} has {name!r}; the options are {', '.join(known)}")
        if isinstance(value, dict):
            raise ConfigError(f"the configuration {path} has a table {name!r}; options are values or lists")
        try:
            known[name].process_value(context, value)
        except (ConfigError, typer.BadParameter) as error:
            why = error.message if isinstance(error, typer.BadParameter) else error
            raise ConfigError(f"the configuration {path} has a wrong value for {name!r}: {why}") from None
    return {known[name].name: value for name, value in values.items()}
