"""`pagoda serve`: the HTTP server."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagoda.cli import listening, options
from pagoda.cli.banner import log_to_stderr, print_banner
from pagoda.cli.config import Config
from pagoda.cli.listening import LogLevel, Routing
from pagoda.cli.replicas import publish_events, serve_replicas
from pagoda.errors import ConfigError

if TYPE_CHECKING:
    from pagoda.engine.engine import Engine
    from pagoda.server.auth import ApiKeys
    from pagoda.server.tracing import Tracing

_cluster_option = partial(typer.Option, rich_help_panel="Cluster")
logger = logging.getLogger(__name__)


class QueuePolicy(StrEnum):
    """The order of waiting requests."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    LPM = "lpm"


def serve(
    model: options.Model = options.DEFAULT_MODEL,
    host: listening.Host = listening.LOOPBACK,
    port: listening.Port = listening.PORT,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name clients may use; repeatable. \\[default: the model's own]")
    ] = None,
    access_log: Annotated[
        Path | None, typer.Option(help="Append a line for each request, of hashes only, for `pagoda replay`.")
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Send a trace of each request to this OpenTelemetry collector, like http://127.0.0.1:4318/v1/traces."
        ),
    ] = None,
    log_level: listening.Logging = LogLevel.INFO,
    kv_memory: options.KvMemory = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = 64,
    token_budget: options.TokenBudget = 512,
    block_size: options.BlockSize = None,
    dtype: options.Dtype = "auto",
    kv_format: options.KvFormat = "auto",
    kv_skip_layers: options.KvSkipLayers = "",
    weights: options.WeightsFormat = "full",
    tier: options.Tiers = None,
    secret: options.Secret = None,
    tier_key: options.TierKey = None,
    tier_after_hits: options.TierAfterHits = 0,
    tier_lossy: options.TierLossy = False,
    audit: options.Audit = 0.0,
    eviction: options.Eviction = "reuse",
    kv_policy: options.KvPolicy = None,
    host_memory: options.HostMemory = "1GiB",
    pressure: options.Pressure = "on",
    memory_limit: options.MemoryLimit = None,
    queue_policy: Annotated[
        QueuePolicy,
        options.memory_option(help="Order of waiting requests: arrival, priority, or longest prefix match."),
    ] = QueuePolicy.FCFS,
    lease_share: Annotated[
        float,
        options.memory_option(
            min=0, max=1, help="Most of the KV cache that prefixes with a guaranteed lifetime may hold."
        ),
    ] = 0.5,
    api_key: listening.ApiKey = None,
    admin_key: Annotated[
        str | None,
        listening.key_option(
            envvar="PAGODA_ADMIN_KEY", help="Key of the operator's routes: usage by tenant, pins, clearing the cache."
        ),
    ] = None,
    api_keys_file: Annotated[
        Path | None,
        listening.access_option(
            help="Keys and their tenants: TOML, with shares and classes; or one 'KEY [TENANT]' a line."
        ),
    ] = None,
    prices: Annotated[Path | None, listening.access_option(help="What tokens cost, for `pagoda usage`: TOML.")] = None,
    prefill_next_turn: Annotated[
        bool,
        options.memory_option(
            "--prefill-next-turn", help="After a chat's answer, compute what the next turn's prompt will begin with."
        ),
    ] = False,
    blend_ratio: Annotated[
        float,
        options.memory_option(
            min=0,
            max=1,
            help="Of passages marked for reuse anywhere, the share computed anew where a request does not say.",
        ),
    ] = 0.15,
    blend_auto: Annotated[
        bool,
        options.memory_option(
            "--blend-auto",
            help="Reuse passages of long user messages anywhere, marked or not; answers change within bounds.",
        ),
    ] = False,
    usage_file: Annotated[
        Path | None, listening.access_option(help="Where the token counts of tenants and keys survive restarts.")
    ] = None,
    caches_file: Annotated[
        Path | None, options.memory_option(help="Where named caches survive restarts, with the text that they hold.")
    ] = None,
    public_file: Annotated[
        Path | None, options.memory_option(help="Where it survives restarts which prefixes are public, as token ids.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="A LoRA adapter, NAME=FOLDER; clients ask for model NAME; repeatable."),
    ] = None,
    replicas: Annotated[int, _cluster_option(min=1, help="Engines in processes of their own, behind one address.")] = 1,
    routing: listening.RoutingOption = Routing.PREFIX_AWARE,
    kv_events: Annotated[
        str | None,
        _cluster_option(
            metavar="ENDPOINT", help="Publish block events (ZeroMQ): tcp://127.0.0.1:5557; port * takes a free one."
        ),
    ] = None,
    kv_events_replay: Annotated[
        str, _cluster_option(metavar="ENDPOINT", help="Where missed block events are asked for.")
    ] = "tcp://127.0.0.1:*",
    kv_events_tokens: Annotated[
        bool, _cluster_option("--kv-events-tokens", help="Tell token ids in block events.")
    ] = False,
    cluster_token: listening.ClusterToken = None,
    config: Config = None,
) -> None:
    """Serve MODEL over an HTTP API for OpenAI's and Anthropic's clients."""
    # One text at a time needs no threads of the tokenizers' own: the model's have the cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from pagoda.cluster.local import ReplicaOf
    from pagoda.server.access_log import AccessLog
    from pagoda.server.ledger import Ledger
    from pagoda.server.named_caches import NamedCaches
    from pagoda.server.passages import BlendDefaults
    from pagoda.server.prices import Prices
    from pagoda.server.public_prefixes import PublicPrefixes
    from pagoda.server.sockets import bind

    if blend_auto:
        options.check_blend_auto(kv_format)
    ladder = options.pressure_config(pressure, memory_limit)
    names = tuple(served_model_name or (model,))
    folders = _adapters(adapter or (), names)
    replica = ReplicaOf.from_environment()
    if replica is not None:
        replica.die_with_parent()
        access_log, usage_file = replica.own(access_log), replica.own(usage_file)
        caches_file, public_file = replica.own(caches_file), replica.own(public_file)
        tier = [spec.replace("{replica}", str(replica.number)) for spec in tier or ()]
    elif replicas > 1:
        log_to_stderr(str(log_level))
        has_keys = (api_key or api_keys_file) is not None
        return serve_replicas(replicas, host, port, routing, str(log_level), cluster_token, names[0], has_keys=has_keys)
    log_to_stderr(str(log_level), "" if replica is None else f"replica {replica.number}: ")
    keys = _api_keys(api_key, api_keys_file)
    table = Prices() if prices is None else Prices.load(prices)
    ledger, caches, public = Ledger(usage_file), NamedCaches(caches_file), PublicPrefixes(public_file)
    log = None if access_log is None else AccessLog(access_log, model, secret)
    tracing = None if otlp_endpoint is None else _tracing(otlp_endpoint, model)
    with bind(host, port) if replica is None else replica.listen() as sock:
        engine = options.load_engine(
            model,
            kv_memory=kv_memory,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            block_size=block_size,
            dtype=dtype,
            kv_format=kv_format,
            kv_skip_layers=options.parse_layers(kv_skip_layers),
            weights_format=weights,
            queue_policy=str(queue_policy),
            lease_share=lease_share,
            eviction=eviction,
            kv_policy=kv_policy,
            host_memory=host_memory,
            tiers=tier or (),
            secret=secret,
            tenants={} if keys is None else keys.specs,
            tier_key=tier_key,
            tier_after_hits=tier_after_hits,
            tier_lossy=tier_lossy,
            audit=audit,
            num_engines=1 if replica is None else replica.count,
            pressure=ladder,
        )
        events = None
        if kv_events is not None:
            events = publish_events(
                engine, kv_events, kv_events_replay, secret, cluster_token, with_tokens=kv_events_tokens
            )
        for adapter_name, folder in folders.items():
            engine.adapters.load(adapter_name, folder)

        from pagoda.server.app import create_app
        from pagoda.server.run import DrainingServer

        about = _about(engine, names[0])
        if replica is None:
            print_banner(about, names[0], host, sock.getsockname()[1], has_keys=keys is not None)
        else:
            for label, text in about.items():
                logger.info("%s: %s", label, text)
        serving = options.as_async(engine)
        if events is not None:
            events.tell_all = serving.tell_all_blocks
        app = create_app(
            serving,
            api_keys=keys,
            admin_key=admin_key,
            served_model_names=names,
            prices=table,
            ledger=ledger,
            caches=caches,
            public=public,
            prefill_next_turn=prefill_next_turn,
            blend=BlendDefaults(blend_ratio, blend_auto),
            access_log=log,
            tracing=tracing,
            kv_events=None if events is None else events.ports,
            cluster_token=cluster_token,
        )
        server = DrainingServer(app, log_level=str(log_level))
        # Uvicorn handles these signals and then raises them again for whoever was there before: nobody.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        # The process is for this alone from here on. What is loaded by now lasts to the end, so the garbage collector
        # need not walk it: 230,000 objects, for which all requests would have to wait a third of a second now and then.
        gc.collect()
        gc.freeze()
        server.run(sockets=[sock])
        if events is not None:
            events.close()
    if server.force_exit:
        # A second Ctrl-C: the engine's thread may be in the middle of a long step, which nothing can interrupt.
        os._exit(130)


def _adapters(given: Sequence[str], model_names: Sequence[str]) -> dict[str, str]:
    """Folders by name, each looked into before the model is loaded for them."""
    from pagoda.model.lora import adapter_config

    folders: dict[str, str] = {}
    for one in given:
        name, separator, path = one.partition("=")
        if not separator or name in ("", *model_names):
            raise ConfigError(f"--adapter takes NAME=FOLDER with a name that is not the model's, got {one!r}")
        adapter_config(Path(path).expanduser())
        folders[name] = path
    return folders


def _tracing(endpoint: str, model: str) -> Tracing:
    try:
        from pagoda.server.tracing import Tracing, otlp_exporter

        return Tracing(model, otlp_exporter(endpoint))
    except ImportError as error:
        raise ConfigError(f"traces need OpenTelemetry: pip install 'pagoda-kv[tracing]' ({error})") from error


def _api_keys(api_key: str | None, path: Path | None) -> ApiKeys | None:
    from pagoda.server.auth import ApiKeys

    if path is not None and api_key is not None:
        raise ConfigError("give --api-key (or PAGODA_API_KEY) or --api-keys-file, not both")
    if path is not None:
        return ApiKeys.load(path)
    return ApiKeys.single(api_key) if api_key is not None else None


def _about(engine: Engine, name: str) -> dict[str, str]:
    """What is served, by label."""
    from pagoda.engine.process_memory import rss_bytes
    from pagoda.kv.sizes import format_size

    cache = engine.cache_info()
    limit = engine.core.pressure.report.memory_limit
    return {
        "Model": f"{name}, context of {engine.max_model_len:,} tokens",
        "KV cache": f"{format_size(cache.bytes_total)}{'' if cache.kv_format == 'auto' else ' in ' + cache.kv_format}"
        f" = {cache.num_blocks:,} blocks of {cache.block_size}"
        f" = {cache.tokens_total:,} tokens = {cache.users_at_full_context:.1f} requests at full context",
        "Memory": f"{format_size(rss_bytes())} resident, the KV cache and the weights with it; "
        + ("no limit known" if limit is None else f"at most {format_size(limit)}"),
    }
