"""Pagoda as the memory of vLLM: a KV connector, loaded without a patch.

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "PagodaConnector", "kv_connector_module_path": "pagoda.integrations.vllm_connector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": ["disk:/var/cache/pagoda:100GiB"]}}'

This file is vLLM's words for what `pagoda.integrations.vllm` does: one object in the scheduler's process, one in each
worker's. Written for and tested with vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pagoda.errors import ConfigError
from pagoda.integrations.vllm.keys import fingerprint, weights_identity
from pagoda.integrations.vllm.messages import Orders, Replies
from pagoda.integrations.vllm.metrics import PagodaMetrics, PagodaStats
from pagoda.integrations.vllm.scheduler import SchedulerSide
from pagoda.integrations.vllm.settings import Settings, read_settings
from pagoda.integrations.vllm.worker import WorkerSide
from pagoda.kv.keys import KeyChain

logger = init_logger("vllm.pagoda")

_SOURCES = {"dram": CacheHitSource.HOST, "shared": CacheHitSource.HOST, "disk": CacheHitSource.DISK}


class PagodaConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Tiers below vLLM's KV cache; see docs/vllm.md.

    Raises:
        ConfigError: a setting is wrong, or the model's cache is of a kind that is not kept.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        _check(vllm_config, kv_cache_config)
        block_size = vllm_config.cache_config.block_size
        parallel = vllm_config.parallel_config
        if role is KVConnectorRole.SCHEDULER:
            chain = KeyChain(fingerprint(_facts(vllm_config, kv_cache_config, settings)), settings.secret)
            self._scheduler = SchedulerSide(chain, block_size, parallel.world_size, settings.namespace)
        else:
            self._worker = WorkerSide(
                settings, block_size, kv_cache_config.num_blocks, parallel.rank, parallel.world_size
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a miss later."""
        return False

    # -- in a worker -------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take vLLM's cache; the tiers are opened now."""
        self._worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Orders) -> None:
        """A step begins: loads from tiers run beside it."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Take the blocks for what was loaded; it is placed at the end of steps."""
        self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No layer is waited for: a request runs when all of its blocks are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved layer by layer: a record holds all layers of a block."""

    def wait_for_save(self) -> None:
        """Copy out the blocks that the step completed; the tiers' threads write them."""
        self._worker.save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Which loads are finished. No request's end waits for a save."""
        return None, self._worker.finish() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """What was not loaded; vLLM computes it."""
        return self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> Replies | None:
        """What the scheduler is waiting for."""
        return self._worker.take_replies()

    # -- in the scheduler --------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many more tokens tiers have; None while the workers look."""
        count = self._scheduler.matched_tokens(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks for them."""
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Which tiers they come from."""
        found: dict[CacheHitSource, int] = {}
        size = self._vllm_config.cache_config.block_size
        for tier in self._scheduler.sources(request.request_id):
            source = _SOURCES.get(tier.split("-")[0], CacheHitSource.EXTERNAL_UNSPECIFIED)
            found[source] = found.get(source, 0) + size
        return found

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        """What the workers do with this step."""
        state = scheduler_output.kv_connector_block_state
        return self._scheduler.orders(scheduler_output.num_scheduled_tokens, lambda name: state.get_block_ids(name)[0])

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers said of it."""
        self._scheduler.update(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks may go at once; the client is told where its prompt came from."""
        return False, self._scheduler.finished(request)

    def reset_cache(self) -> bool:
        """Tiers are not emptied: what they have is not found any more."""
        self._scheduler.forget()
        return True

    # -- in both -----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> PagodaStats | None:
        """What was counted since the last call."""
        if self.role is KVConnectorRole.WORKER:
            figures = self._worker.take_figures()
        else:
            figures = self._scheduler.take_figures()
        return PagodaStats.of(figures) if figures else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PagodaStats | None:
        """Stats from what was sent between processes."""
        return PagodaStats(data=data) if data else None

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PagodaMetrics:
        """What `/metrics` shows of it."""
        return PagodaMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Write what is queued, for a moment, and let go of the tiers."""
        if self.role is KVConnectorRole.WORKER:
            self._worker.close()


def _check(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse what would be wrong or useless, with words, before anything is opened."""
    transfer, groups = vllm_config.kv_transfer_config, kv_cache_config.kv_cache_groups
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            'set "kv_load_failure_policy": "recompute" in the KV transfer config: else vLLM fails requests'
        )
    if len(groups) != 1:
        raise ConfigError(
            f"the cache of this model has {len(groups)} groups of layers, and vLLM names failed blocks only where it "
            "has one; try --disable-hybrid-kv-cache-manager"
        )
    if groups[0].kv_cache_spec.block_size != vllm_config.cache_config.block_size:
        raise ConfigError("blocks of several sizes, as with context parallelism, are not kept")


def _facts(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> dict[str, str]:
    """All that makes a block of one vLLM useless to another."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    [group] = kv_cache_config.kv_cache_groups
    weights = settings.identity or weights_identity(model.model, model.revision)
    return {
        "engine": f"vllm {vllm.__version__}",
        "weights": weights,
        "config": model.hf_config.to_json_string(use_diff=False),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache": f"{cache.cache_dtype} {cache.block_size} {kv_cache_config.kv_cache_layout} {group.kv_cache_spec!r}",
        "layers": " ".join(group.layer_names),
        "shards": f"tp{parallel.tensor_parallel_size} pp{parallel.pipeline_parallel_size}",
        "processor": _processor(),
    }


def _processor() -> str:
    """The kind of processor: on a CPU, attention packs keys for the instructions it has."""
    if current_platform.is_cpu():
        arch = current_platform.get_cpu_architecture()
        return f"cpu {arch} {torch.backends.cpu.get_cpu_capability()} amx={torch.cpu._is_amx_tile_supported()}"
    return str(current_platform.get_device_name())
