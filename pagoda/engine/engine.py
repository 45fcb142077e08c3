"""Engine: a model with its memory, ready to generate. The synchronous public API."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, Self, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pagoda.blend.segments import BlendSpec
from pagoda.engine.adapters import Adapters, adapted
from pagoda.engine.assembly import fingerprint, make_cache
from pagoda.engine.config import EngineConfig
from pagoda.engine.core import EngineCore
from pagoda.engine.kv_policy import default_policy
from pagoda.engine.memory import CacheInfo, fitted, make_pool, safe_kv_memory, useful_kv_memory
from pagoda.engine.outputs import Completion, Generation, SparseReport, Usage
from pagoda.engine.params import BeamSearch, SamplingParams
from pagoda.engine.pressure.config import PressureConfig
from pagoda.engine.runner import ModelRunner, layout_for
from pagoda.engine.sparse.recall_memory import recall_memory
from pagoda.engine.sparse.sparsity import Sparsity, yielding_of
from pagoda.engine.tenants import TenantSpec
from pagoda.errors import ConfigError, InvalidRequest
from pagoda.files import no_progress
from pagoda.kv.cache import KVCache
from pagoda.kv.events import BlockEvent
from pagoda.kv.eviction import make_policy
from pagoda.kv.formats import default_block_size
from pagoda.kv.keys import KeyChain, Scope
from pagoda.kv.radix_node import as_tokens
from pagoda.kv.sizes import format_size, parse_size
from pagoda.kv.staging import StagedPool
from pagoda.kv.tenants import Share
from pagoda.model.loader import LoadedModel, load_model
from pagoda.model.progress import terminal_progress
from pagoda.sparse.store import SparseMemory

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


class Engine:
    """Loads a model, allocates its KV pool and generates.

        from pagoda import Engine, SamplingParams
        with Engine("smollm2") as engine:
            [out] = engine.generate(["The capital of France is"], SamplingParams(max_tokens=8, temperature=0))
            print(out.text, out.usage.num_hit_tokens)

    Args:
        model: `smollm2`, a Hugging Face folder or hub id, or a GGUF file.
        dtype: `float32`, `bfloat16` or `auto`.
        kv_format: how keys and values are stored: `auto` as the model computes, `bf16`, `fp16`, `fp32`, `fp8_e4m3`,
            `fp8_e5m2`, `int8` or `int4`, or two of these as `KEYS/VALUES`; see docs/formats.md.
        kv_skip_layers: layers whose keys and values are stored as the model computes, whatever the format.
        weights_format: `full`, or `int8`: half the bytes to keep and to read (docs/weights.md).
        kv_memory: bytes, or such as `2GiB`, taken at once; None takes half of what is available, or what `max_num_seqs`
            samples at full context fill if that is less.
        block_size: tokens per KV block; None takes 16, or 32 with keys in `int4`.
        max_model_len: a shorter context than the model's own.
        max_num_seqs: most samples running at once; in a small `int4` pool fewer, which a warning says.
        token_budget: most tokens computed in one step.
        queue_policy: `fcfs`, `priority` or `lpm` (longest prefix match).
        lease_share: most of the pool that leases on prefixes may hold.
        eviction: what goes first when the pool is full; a name that `pagoda.kv.eviction.make_policy` knows.
        tiers: where KV goes that the pool has no room for, fastest first: `dram:8GiB`, `disk:/path:100GiB`.
        tier_after_hits: tiers that outlive the process get a block when it was hit so often; 0: as soon as it is full.
        tier_lossy: whether requests that do not say so take blocks from tiers whose codec loses something.
        audit: the chance of each block of a hit to be computed again and compared; what is wrong is forgotten, and the
            tier that it came from is taken out.
        secret: processes that share tiers share it; names of stored blocks tell nothing without it.
        tenants: what each tenant gets, by `Scope.namespace`.
        pressure: what to do when there is more to do than room; by default who asks waits.
        tier_key: where the key is that seals records outside this process: `env:NAME` or `file:PATH`, in hexadecimal.
        kv_policy: what requests that do not say it drop of their KV, such as `h2o:budget=512`; None: nothing.
        num_engines: engines that start together on this machine: what is available to one is its part.
        host_memory: most memory for KV that `infinigen` and `quest` recall, taken as needed; None: no such requests.
        progress: show bars for slow steps, on a terminal.

    Raises:
        ModelNotFound, ModelError: the model cannot be found or loaded.
        ConfigError: a setting is wrong, or the memory holds no block.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2",
        *,
        dtype: str = "auto",
        kv_format: str = "auto",
        kv_skip_layers: Collection[int] = (),
        weights_format: str = "full",
        kv_memory: int | str | None = None,
        block_size: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        token_budget: int = 512,
        queue_policy: str = "fcfs",
        lease_share: float = 0.5,
        eviction: str = "reuse",
        tiers: Sequence[str] = (),
        tier_after_hits: int = 0,
        tier_lossy: bool = False,
        audit: float = 0.0,
        secret: str | None = None,
        tenants: Mapping[str, TenantSpec] = MappingProxyType({}),
        tier_key: str | None = None,
        kv_policy: str | Mapping[str, Any] | None = None,
        num_engines: int = 1,
        host_memory: int | str | None = "1GiB",
        pressure: PressureConfig | None = None,
        progress: bool = True,
    ) -> None:
        default = default_policy(kv_policy)
        if not 0 <= audit <= 1:
            raise ConfigError(f"audit is a share between 0 and 1, got {audit}")
        if block_size is None:
            block_size = default_block_size(kv_format)
        self.config = EngineConfig(
            block_size,
            max_num_seqs,
            token_budget,
            queue_policy,
            lease_share,
            tenants,
            pressure or PressureConfig.off(),
        )
        eviction_policy, asked = make_policy(eviction), None if kv_memory is None else parse_size(kv_memory)
        loaded = load_model(
            os.fspath(model),
            dtype=dtype,
            weights_format=weights_format,
            max_model_len=max_model_len,
            check=lambda spec, compute: layout_for(spec, block_size, compute, kv_format, kv_skip_layers),
            progress=None if progress else no_progress,
        )
        self._weights_format = weights_format
        self.model_name = loaded.name
        self.spec = loaded.spec
        self.tokenizer = loaded.tokenizer
        self.weights_identity = loaded.weights_identity
        layout = layout_for(loaded.spec, block_size, loaded.decoder.dtype, kv_format, kv_skip_layers)
        useful = useful_kv_memory(layout, self.config, loaded.spec.max_context)
        num_bytes = safe_kv_memory(useful, num_engines) if asked is None else asked
        self.config = fitted(self.config, layout, num_bytes)
        taking = f"taking {format_size(num_bytes)} of KV memory"
        logger.info(taking)
        with terminal_progress() if progress else contextlib.nullcontext(no_progress) as show:
            pool = make_pool(layout, num_bytes, self.config, loaded.decoder.device, partial(show, taking))
        shares = {name: spec.share for name, spec in tenants.items() if spec.share != Share()}
        cache = make_cache(
            layout, pool, loaded, eviction_policy, tiers, tier_after_hits, secret, tier_key, shares, tier_lossy
        )
        if isinstance(pool, StagedPool):
            pool.staging.open_blocks = cache.open_blocks
        self.max_model_len = self._longest(cache, loaded.spec.max_context)
        if self.max_model_len < loaded.spec.max_context:
            logger.warning(
                "KV memory holds %d tokens: the context is cut from %d to that; raise `--kv-memory` (in Python "
                "`kv_memory`) for more",
                self.max_model_len,
                loaded.spec.max_context,
            )
        self._runner = ModelRunner(loaded.decoder, pool, cache)
        self.core = EngineCore(
            self._runner,
            cache,
            loaded.tokenizer,
            self.config,
            vocab_size=loaded.spec.vocab_size,
            eos_ids=loaded.tokenizer.eos_ids,
            max_model_len=self.max_model_len,
        )
        frequencies = [rope.frequencies(loaded.spec.head_dim) for rope in loaded.spec.ropes]
        recall = recall_memory(self._runner, loaded, layout, host_memory)
        memory = SparseMemory(layout, self._runner.kv, frequencies, loaded.spec.max_context, recall)
        fit_share, yielding = self.core.pressure.fit_share, yielding_of(tenants)
        self.core.sparsity = Sparsity(cache, memory, token_budget, default, fit_share, yielding)
        self.adapters = Adapters(self.core.adapters, self._runner, loaded.name)
        if audit:
            self.core.audit(audit, pool)
        self._fingerprint = fingerprint(layout, loaded)
        self._bytes_total = pool.num_bytes
        self._kv_format = kv_format
        self._names = itertools.count()

    def reload_weights(self, path: str) -> None:
        """Go on with other weights of the same shape: `read_weights` and `install_weights`."""
        self.install_weights(self.read_weights(path))

    def read_weights(self, path: str) -> LoadedModel:
        """Read other weights for this model. Changes nothing: any thread may do it, while requests run.

        Raises:
            ModelNotFound, ModelError: they cannot be found or loaded.
            ConfigError: their config differs from that of the model that runs.
        """
        decoder = self._runner.decoder
        dtype = str(decoder.dtype).removeprefix("torch.")
        loaded = load_model(
            path,
            dtype=dtype,
            device=decoder.device,
            weights_format=self._weights_format,
            max_model_len=self.spec.max_context,
            progress=no_progress,
        )
        differing = [
            each.name
            for each in fields(self.spec)
            if each.name != "dtype" and getattr(loaded.spec, each.name) != getattr(self.spec, each.name)
        ]
        if differing:
            raise ConfigError(f"{path} is another model: it differs in {', '.join(differing)}")
        return loaded

    def install_weights(self, loaded: LoadedModel) -> None:
        """Compute with these weights from the next step on. No KV of the old ones is ever used again.

        Requests that run go on from what they have generated, which is computed again; leases end. Call it between two
        steps.
        """
        self._runner.decoder = loaded.decoder
        self.weights_identity = loaded.weights_identity
        self._fingerprint = fingerprint(self.core.cache.layout, loaded)
        self.core.renew(self._fingerprint)

    def tell_blocks(
        self, emit: Callable[[Sequence[BlockEvent]], None], secret: str, *, with_tokens: bool = False
    ) -> None:
        """Tell of every block that enters or leaves the cache from now on, on whatever thread steps the engine.

        Call it before the first request.

        Args:
            emit: must not wait.
            secret: engines with the same model and secret name blocks alike; names tell nothing without it.
            with_tokens: whether events have token ids.
        """
        key = hashlib.sha512(b"pagoda block events\0" + secret.encode()).digest()
        self.core.cache.tell(KeyChain(self._fingerprint, key), emit, with_tokens=with_tokens)

    def block_names(self, prompt: Sequence[int], scope: Scope, adapter: str | None = None) -> list[int] | None:
        """What events call a prompt's whole blocks; None if there are none. Any thread may ask.

        Raises:
            InvalidRequest: the prompt lacks what activates the adapter.
        """
        events = self.core.cache.events
        if events is None:
            return None
        tokens = as_tokens(prompt)
        chosen = None if adapter is None else self.core.adapters.get(adapter)
        return events.names(tokens, scope if chosen is None else adapted(scope, chosen, tokens))

    def close(self) -> None:
        """Write what waits to be written to lower tiers, and let go of them and of native memory."""
        self.core.cache.close()
        # Not left to garbage collection: FastAPI's caches keep a server's routes, and so its engine, to the very end.
        self._runner.decoder.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _longest(self, cache: KVCache, max_context: int) -> int:
        """The longest sequence, at most `max_context`, that fits the pool."""
        step = self.config.token_budget
        if cache.peak_blocks(max_context, step) <= cache.num_blocks:
            return max_context
        fits = [n for n in range(0, max_context, cache.block_size) if cache.peak_blocks(n, step) <= cache.num_blocks]
        return max(fits)

    def cache_info(self) -> CacheInfo:
        """The size of the pool in blocks, bytes, tokens and concurrent requests at full context."""
        cache = self.core.cache
        tokens = cache.num_blocks // len(cache.layout.groups) * cache.block_size
        return CacheInfo(
            kv_format=self._kv_format,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            bytes_total=self._bytes_total,
            bytes_per_token=cache.layout.bytes_per_token,
            tokens_total=tokens,
            users_at_full_context=cache.num_blocks / cache.peak_blocks(self.max_model_len, self.config.token_budget),
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        scope: Scope = Scope(),
        adapter: str | None = None,
        blends: Sequence[BlendSpec | None] = (),
        progress: bool = False,
    ) -> list[Generation]:
        """Generate for all prompts, batched; results are in the order of the prompts.

        Args:
            prompts: texts, or lists of token ids; one of either is taken as a list of one.
            params: for all prompts, or one for each.
            adapter: the name of the adapter that answers them.
            blends: each prompt's passages that may be reused wherever they stand; none if empty.
            progress: show a bar on a terminal.

        Raises:
            RequestError: a prompt cannot be served; none is started.
            ModelError: the model failed on one; the others end too.
        """
        texts = _as_list(prompts)
        each = [params or SamplingParams()] * len(texts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(texts):
            raise InvalidRequest(f"{len(each)} SamplingParams for {len(texts)} prompts", param="params")
        of_each = list(blends) or [None] * len(texts)
        if len(of_each) != len(texts):
            raise InvalidRequest(f"{len(of_each)} BlendSpecs for {len(texts)} prompts", param="blends")
        each = [
            replace(one, continues_text=True) if isinstance(text, str) else one
            for one, text in zip(each, texts, strict=True)
        ]
        tokens = [self.tokenizer.encode(text) if isinstance(text, str) else list(text) for text in texts]
        ids = [f"generate-{next(self._names)}" for _ in texts]
        completions = {
            name: tuple(Completion(index) for index in range(one.n)) for name, one in zip(ids, each, strict=True)
        }
        usage: dict[str, Usage] = {}
        sparse: dict[str, SparseReport | None] = {}
        try:
            for name, prompt, one, blend in zip(ids, tokens, each, of_each, strict=True):
                self.core.add(name, prompt, one, scope=scope, adapter=adapter, blend=blend)
            with _bar(len(ids), shown=progress) as advance:
                while len(usage) < len(ids):
                    for output in self.core.step():
                        if output.failure is not None:
                            raise output.failure
                        for delta in output.deltas:
                            completions[output.request_id][delta.index].add(delta)
                        if output.finished:
                            usage[output.request_id], sparse[output.request_id] = output.usage, output.sparse
                            advance()
        finally:
            for name in ids:
                self.core.abort(name)
        return [
            Generation(tuple(prompt), completions[name], usage[name], sparse[name])
            for name, prompt in zip(ids, tokens, strict=True)
        ]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        width: int = 4,
        *,
        n: int = 1,
        max_tokens: int | None = 16,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        ignore_eos: bool = False,
        stop_token_ids: Collection[int] = (),
        logprobs: int | None = None,
        scope: Scope = Scope(),
        adapter: str | None = None,
    ) -> list[Generation]:
        """The `n` best outputs of each prompt, best first, found with `width` beams: see BeamSearch.

        Each completion's `score` is its log-probability over `length ** length_penalty`. The other arguments are
        `SamplingParams`'.

        Raises:
            RequestError: a prompt cannot be served; none is started.
        """
        params = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            beam=BeamSearch(width, length_penalty, early_stopping),
            ignore_eos=ignore_eos,
            stop_token_ids=frozenset(stop_token_ids),
            logprobs=logprobs,
        )
        return self.generate(prompts, params, scope=scope, adapter=adapter)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


@contextlib.contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A progress bar over prompts; yields a function that advances it."""
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown, transient=True) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda: bar.advance(task)
