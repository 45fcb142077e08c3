"""Options that several commands share, and the engine they describe."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagoda.errors import ConfigError

if TYPE_CHECKING:
    from pagoda.engine.aio import AsyncEngine
    from pagoda.engine.engine import Engine
    from pagoda.engine.pressure.config import PressureConfig

DEFAULT_MODEL = "smollm2"
memory_option = partial(typer.Option, rich_help_panel="Memory and batching")


def _check_size(param: typer.CallbackParam, size: str | None) -> str | None:
    from pagoda.kv.sizes import parse_size

    if size is not None:
        _check(param.opts[0], parse_size, size)
    return size


def _check_tiers(specs: list[str] | None) -> list[str] | None:
    for spec in specs or ():
        from pagoda.kv.tiers.spec import parse_tier

        _check("--tier", parse_tier, spec)
    return specs


def _check_format(name: str) -> str:
    if name != "auto":
        from pagoda.kv.formats import parse_format

        _check("--kv-format", parse_format, name)
    return name


def check_blend_auto(kv_format: str) -> None:
    """Whether passages can be reused at all with a format; raises ConfigError."""
    from pagoda.kv.formats import parse_format

    if kv_format != "auto" and parse_format(kv_format).is_quantized:
        raise ConfigError(
            f"--blend-auto does not go with --kv-format {kv_format}: quantized KV cannot be reused at other positions"
        )


def parse_layers(text: str) -> tuple[int, ...]:
    """Layer numbers from `0,1,29`, or none from an empty text. Raises ConfigError."""
    try:
        return tuple(int(number) for number in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(f"not a list of layers: {text!r}; write such as 0,1,29") from None


def _check_eviction(name: str) -> str:
    from pagoda.kv.eviction import make_policy

    _check("--eviction", make_policy, name)
    return name


def _check_layers(text: str) -> str:
    _check("--kv-skip-layers", parse_layers, text)
    return text


def _check_kv_policy(text: str | None) -> str | None:
    if text is not None:
        from pagoda.engine.kv_policy import default_policy

        _check("--kv-policy", default_policy, text)
    return text


def _check(option: str, parse: Callable[[str], object], text: str) -> None:
    """Read a value now, while it is known which option has it."""
    try:
        parse(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


Model = Annotated[
    str, typer.Argument(help="smollm2, a Hugging Face folder or hub id, or a GGUF file.", show_default=True)
]
KvMemory = Annotated[
    str | None,
    memory_option(
        "--kv-memory",
        metavar="SIZE",
        callback=_check_size,
        help="KV cache size, such as 512MiB or 2GiB. "
        "\\[default: half of the available memory, or what all requests at full context fill if that is less]",
    ),
]
MaxModelLen = Annotated[
    int | None, memory_option(min=1, help="Most tokens of prompt and output together. \\[default: the model's]")
]
MaxNumSeqs = Annotated[int, memory_option(min=1, help="Most requests computed at once.")]
TokenBudget = Annotated[int, memory_option(min=1, help="Most tokens of one step, prefill and decode.")]
BlockSize = Annotated[
    int | None, memory_option(min=1, help="Tokens of a KV block. \\[default: 16, with keys in int4 32]")
]
Tiers = Annotated[
    list[str] | None,
    memory_option(
        "--tier",
        metavar="SPEC",
        callback=_check_tiers,
        help="Where KV goes when the pool is full: dram:8GiB, disk:/path:100GiB, ... Repeatable, fastest first.",
    ),
]
Secret = Annotated[
    str | None,
    memory_option(
        envvar="PAGODA_SECRET",
        show_envvar=True,
        help="Shared by servers that share tiers; names of stored blocks tell nothing without it.",
    ),
]
TierAfterHits = Annotated[
    int,
    memory_option(
        min=0,
        help="Write a block to tiers that outlive the process when it was hit so often; 0: as soon as it is full.",
    ),
]
TierLossy = Annotated[
    bool,
    memory_option(
        "--tier-lossy", help="Let requests that do not say so have blocks from tiers whose codec loses something."
    ),
]
Audit = Annotated[
    float,
    memory_option(
        min=0,
        max=1,
        help="Compute this share of hit blocks again and compare; what is wrong goes, and the tier it came from.",
    ),
]
TierKey = Annotated[
    str | None,
    memory_option(
        metavar="SOURCE",
        envvar="PAGODA_TIER_KEY",
        show_envvar=True,
        help="Seal what tiers outside this process hold (AES-GCM): env:NAME or file:PATH of a key in hexadecimal.",
    ),
]
KvPolicy = Annotated[
    str | None,
    memory_option(
        "--kv-policy",
        metavar="POLICY",
        callback=_check_kv_policy,
        help="What requests that do not say it drop of their KV: h2o:512, streaming:1024, ... \\[default: nothing]",
    ),
]
HostMemory = Annotated[
    str,
    memory_option(
        "--host-memory",
        metavar="SIZE",
        callback=_check_size,
        help="Most memory for KV that infinigen and quest recall; it is taken as it is needed.",
    ),
]
Eviction = Annotated[
    str,
    memory_option(
        metavar="POLICY",
        callback=_check_eviction,
        help="What goes first when the pool is full: reuse, lru, lfu, fifo, slru, s3fifo or gdsf.",
    ),
]
KvFormat = Annotated[
    str,
    memory_option(
        "--kv-format",
        metavar="FORMAT",
        callback=_check_format,
        help="How keys and values are stored: auto, bf16, fp16, fp32, fp8_e4m3, fp8_e5m2, int8, int4 or KEYS/VALUES.",
    ),
]
KvSkipLayers = Annotated[
    str,
    memory_option(
        "--kv-skip-layers",
        metavar="LAYERS",
        callback=_check_layers,
        help="Layers that --kv-format leaves as the model computes, such as 0,1,29.",
    ),
]
WeightsFormat = Annotated[
    str,
    memory_option(
        "--weights", metavar="FORMAT", help="full, or int8: half the bytes to keep and to read, at a small loss."
    ),
]
MemoryLimit = Annotated[
    str | None,
    memory_option(
        "--memory-limit",
        metavar="SIZE",
        callback=_check_size,
        help="Most memory of this process; near it, requests are refused. \\[default: its cgroup's limit, if any]",
    ),
]
Pressure = Annotated[
    str,
    memory_option(
        metavar="on|off|FILE",
        help="What to do when there is more to do than room: the pressure ladder, as it is or as a TOML file says.",
    ),
]
Dtype = Annotated[str, memory_option(help="auto, float32 or bfloat16.")]

MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token each time.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total probability.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]


def pressure_config(pressure: str, memory_limit: str | None) -> PressureConfig:
    """What the options say of the ladder.

    Raises:
        ConfigError: the file that is named cannot be read, or is wrong.
    """
    from dataclasses import replace

    from pagoda.engine.pressure.config import PressureConfig
    from pagoda.kv.sizes import parse_size

    if pressure == "off":
        config = PressureConfig.off()
    else:
        config = PressureConfig() if pressure == "on" else PressureConfig.load(Path(pressure))
    return config if memory_limit is None else replace(config, memory_limit=parse_size(memory_limit))


def load_engine(model: str, **settings: Any) -> Engine:
    """The engine of `model`, with progress shown while it loads.

    Raises:
        PagodaError: the model or a setting is wrong.
    """
    from pagoda.engine.engine import Engine

    return Engine(model, **settings)


def as_async(engine: Engine) -> AsyncEngine:
    """The asyncio facade of an engine, not yet started."""
    from pagoda.engine.aio import AsyncEngine

    return AsyncEngine(engine)
