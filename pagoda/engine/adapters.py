"""Adapters: the LoRA adapters that requests may name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pagoda.engine.runner import ModelRunner
from pagoda.errors import ConfigError, ModelNotFound
from pagoda.kv.keys import Scope
from pagoda.kv.radix_node import TokenArray
from pagoda.model.lora import Adapter, load_adapter


def adapted(scope: Scope, adapter: Adapter, tokens: TokenArray) -> Scope:
    """The scope of a prompt that an adapter answers; raises InvalidRequest if it lacks what activates the adapter."""
    return replace(scope, adapter=adapter.identity, adapter_from=adapter.first_token(tokens))


class Adapters:
    """A table of loaded adapters. They come and go while requests run; a request keeps what it began with.

    Args:
        table: by name; whoever serves requests reads it.
        runner: has the model they are for.
        model_name: no adapter may have it.
    """

    def __init__(self, table: dict[str, Adapter], runner: ModelRunner, model_name: str) -> None:
        self._table = table
        self._runner = runner
        self._model_name = model_name

    @property
    def names(self) -> Sequence[str]:
        """The names that requests may use."""
        return tuple(self._table)

    def read(self, path: str | Path) -> Adapter:
        """Read an adapter from a folder, as PEFT saves it. Changes nothing: any thread may do it.

        Raises:
            ModelError: it cannot be read, or is not for this model.
        """
        decoder = self._runner.decoder
        return load_adapter(Path(path).expanduser(), decoder.spec, decoder.dtype, decoder.device)

    def add(self, name: str, adapter: Adapter) -> None:
        """Let requests use an adapter by a name; another one of that name is replaced.

        Raises:
            ConfigError: the name is the model's, or empty.
        """
        if name in ("", self._model_name):
            raise ConfigError(f"an adapter needs a name of its own, got {name!r}")
        self._table[name] = adapter

    def load(self, name: str, path: str | Path) -> None:
        """`read` and `add`."""
        self.add(name, self.read(path))

    def unload(self, name: str) -> None:
        """Forget a name; requests that began with it end with it.

        Raises:
            ModelNotFound: there is no such adapter.
        """
        if self._table.pop(name, None) is None:
            raise ModelNotFound(f"there is no adapter {name!r}", param="model")
