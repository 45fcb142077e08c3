"""`pagoda cluster`: replicas on Ray Serve."""

from __future__ import annotations

import importlib.util
import signal
from typing import Annotated, Any

import typer

from pagoda.cli import listening, options
from pagoda.cli.config import Config
from pagoda.cli.listening import Routing
from pagoda.errors import ConfigError


def cluster(
    model: options.Model = options.DEFAULT_MODEL,
    host: listening.Host = listening.LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = listening.PORT,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas to begin with, and at least.")] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="As many as pressure asks for, at most. \\[default: --replicas]")
    ] = None,
    num_cpus: Annotated[float, typer.Option(help="Cores that Ray reserves for a replica.")] = 1.0,
    ray_address: Annotated[
        str | None, typer.Option(help="A running Ray cluster. \\[default: a new one, on loopback]")
    ] = None,
    routing: listening.RoutingOption = Routing.PREFIX_AWARE,
    kv_memory: options.KvMemory = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = 64,
    token_budget: options.TokenBudget = 512,
    block_size: options.BlockSize = None,
    dtype: options.Dtype = "auto",
    tier: options.Tiers = None,
    secret: options.Secret = None,
    tier_key: options.TierKey = None,
    tier_after_hits: options.TierAfterHits = 0,
    eviction: options.Eviction = "reuse",
    config: Config = None,
) -> None:
    """Serve MODEL with replicas on Ray Serve, which come and go with the pressure. It has no API keys: see the docs."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("this needs the extra `ray`: pip install 'pagoda-kv[ray]'")
    most = replicas if max_replicas is None else max_replicas
    if most < replicas:
        raise ConfigError(f"--max-replicas is {most}, less than --replicas, {replicas}")
    import ray
    from ray import serve

    from pagoda.cluster.ray_app import application

    settings: dict[str, Any] = {
        "model": model,
        "kv_memory": kv_memory,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "token_budget": token_budget,
        "block_size": block_size,
        "dtype": dtype,
        "tiers": tier or (),
        "secret": secret,
        "tier_key": tier_key,
        "tier_after_hits": tier_after_hits,
        "eviction": eviction,
        "num_engines": most,
    }
    where: dict[str, Any] = {"address": ray_address}
    if ray_address is None:
        where = {"include_dashboard": False, "_node_ip_address": listening.LOOPBACK}
    try:
        ray.init(**where)
    except Exception as error:  # Ray raises whatever it likes, a bare Exception where its processes are not up in time
        raise ConfigError(f"Ray does not start: {error}") from error
    serve.start(http_options={"host": host, "port": port})
    app = application(settings, policy=str(routing), min_replicas=replicas, max_replicas=most, num_cpus=num_cpus)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own prints a stack and leaves at once
    serve.run(app, name="pagoda", blocking=True)
