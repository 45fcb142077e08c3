"""Backend: all that the server asks of an engine. `pagoda.engine.aio.AsyncEngine` is the real one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from pagoda.engine.admin import CacheAdmin
from pagoda.engine.outputs import AgeHistogram, EngineObserver, RequestOutput, TierReport
from pagoda.engine.params import BlendSpec, LeaseSpec, SamplingParams
from pagoda.engine.pressure.report import PressureReport
from pagoda.kv.keys import Scope

__all__ = ["Backend", "BackendStats", "CacheAdmin", "Scope", "Tokenizer"]


T = TypeVar("T")


class Tokenizer(Protocol):
    """Text to token ids and back. Called from several threads at once."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text of a conversation; raises InvalidRequest where the model's template refuses it."""

    def token_text(self, token_id: int) -> str:
        """One token as text; incomplete UTF-8 shows as U+FFFD."""

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes."""


class BackendStats(Protocol):
    """A snapshot of the engine. KV figures are blocks and `free + held + cached == num_blocks`."""

    @property
    def num_blocks(self) -> int: ...  # noqa: D102
    @property
    def num_free_blocks(self) -> int: ...  # noqa: D102
    @property
    def num_held_blocks(self) -> int: ...  # noqa: D102
    @property
    def num_cached_blocks(self) -> int: ...  # noqa: D102
    @property
    def num_leased_blocks(self) -> int: ...  # noqa: D102
    @property
    def lease_limit_blocks(self) -> int: ...  # noqa: D102
    @property
    def num_leases(self) -> int: ...  # noqa: D102
    @property
    def num_leases_refused(self) -> int: ...  # noqa: D102
    @property
    def block_size(self) -> int: ...  # noqa: D102
    @property
    def num_running(self) -> int: ...  # noqa: D102
    @property
    def num_waiting(self) -> int: ...  # noqa: D102
    @property
    def host_bytes(self) -> int: ...  # noqa: D102
    @property
    def fetched_bytes(self) -> int: ...  # noqa: D102
    @property
    def pressure(self) -> PressureReport: ...  # noqa: D102


class Backend(Protocol):
    """An engine behind an asyncio facade."""

    @property
    def model_name(self) -> str:
        """The id shown in /v1/models."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output together."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def is_healthy(self) -> bool:
        """Whether the engine's thread is alive."""

    async def start(self) -> None:
        """Start the engine's thread."""

    async def stop(self, drain_s: float = 10.0) -> None:
        """Admit nothing more; give streams `drain_s` seconds to finish, then abort them."""

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        scope: Scope = ...,
        priority: int = 0,
        leases: Sequence[LeaseSpec] = (),
        adapter: str | None = None,
        blend: BlendSpec | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request; closing the generator aborts it. Refusals raise at the first item."""

    def block_names(self, prompt: Sequence[int], scope: Scope, adapter: str | None = None) -> Sequence[int] | None:
        """What block events call a prompt's whole blocks; None if there are no events. Called from any thread."""

    @property
    def adapters(self) -> Sequence[str]:
        """The names of the LoRA adapters that requests may ask for."""

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter from a folder while requests run; raises ModelError or ConfigError if it cannot be."""

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; raises ModelNotFound if there is none of the name."""

    async def reload_weights(self, path: str) -> str:
        """Go on with other weights, whose identity it returns; raises PagodaError if they cannot be had."""

    async def manage(self, work: Callable[[CacheAdmin], T]) -> T:
        """The result of `work` on the cache, between two steps of the engine."""

    def add_observer(self, observer: EngineObserver) -> None:
        """Tell `observer` of every step and request from now on."""

    def stats(self) -> BackendStats:
        """A snapshot; does not wait for the engine."""

    def tiers(self) -> Sequence[TierReport]:
        """The figures of each tier below the device, fastest first; does not wait for any."""

    def block_ages(self) -> Sequence[AgeHistogram]:
        """How long sampled blocks lived, lay idle and waited for a hit."""
