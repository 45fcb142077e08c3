"""`pagoda plan`: what a model's KV takes, who fits on which hardware, and what it costs. Nothing is loaded or run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pagoda.errors import ConfigError, ModelNotFound, WeightsError
from pagoda.kv.sizes import parse_size

if TYPE_CHECKING:
    from pagoda.plan.hardware import Hardware
    from pagoda.plan.shape import ModelShape

_HARDWARE = "Hardware"
_DEFAULT_CONTEXTS = (2048, 8192, 32768, 131072)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def plan(
    model: Annotated[
        str | None, typer.Argument(help="A built-in name, a folder or config.json, or a Hugging Face hub id.")
    ] = None,
    known: Annotated[bool, typer.Option("--list", help="List the built-in models and hardware, and exit.")] = False,
    context: Annotated[
        list[str] | None,
        typer.Option(
            help="Tokens of prompt and output together, such as 8k; repeatable. "
            "\\[default: 2k 8k 32k 128k, as far as the model and the shared prefix allow]"
        ),
    ] = None,
    shared_prefix: Annotated[str, typer.Option(help="Leading tokens that all requests share, such as 2k.")] = "0",
    kv_format: Annotated[
        str, typer.Option(help="fp32, bf16, fp16, fp8_e4m3, fp8_e5m2, int8, int4 or KEYS/VALUES.")
    ] = "bf16",
    weights: Annotated[
        str | None, typer.Option(help="fp32, bf16, fp8, int8, int4 or mxfp4. \\[default: the model's]")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a KV block. \\[default: 16, with keys in int4 32]")
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="dram:512GiB, disk:2TB, object:@1GB; after @ its bytes/s. Repeatable. "
            "\\[default: dram:512GiB disk:4TB object:@1GB]",
        ),
    ] = None,
    users: Annotated[
        int | None, typer.Option(min=1, help="Find hardware for so many at once, at the last context.")
    ] = None,
    min_speed: Annotated[
        float, typer.Option(min=0.01, help="With --users: output tokens/s that each gets at least.")
    ] = 10.0,
    hardware: Annotated[
        str,
        typer.Option("--hardware", "--device", help="A built-in name; see --list.", rich_help_panel=_HARDWARE),
    ] = "h100",
    devices: Annotated[
        int, typer.Option(min=1, help="Devices that hold the model together.", rich_help_panel=_HARDWARE)
    ] = 1,
    memory: Annotated[
        str | None, typer.Option(help="Instead of the table's: of a device.", rich_help_panel=_HARDWARE)
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Of its memory, bytes/s, such as 300GB.", rich_help_panel=_HARDWARE)
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(min=0.001, help="Dense BF16, 10^12 operations/s.", rich_help_panel=_HARDWARE)
    ] = None,
    host_link: Annotated[
        str | None, typer.Option(help="Between host memory and device, bytes/s.", rich_help_panel=_HARDWARE)
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="US$ of a device and hour.", rich_help_panel=_HARDWARE)
    ] = None,
    utilization: Annotated[
        float, typer.Option(help="Share of memory for weights and KV.", rich_help_panel=_HARDWARE)
    ] = 0.9,
    compute_share: Annotated[
        float, typer.Option(help="Share of peak operations/s that prefill reaches.", rich_help_panel=_HARDWARE)
    ] = 0.5,
    bandwidth_share: Annotated[
        float, typer.Option(help="Share of peak bandwidth that decoding reaches.", rich_help_panel=_HARDWARE)
    ] = 0.7,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Size a deployment of MODEL: bytes per token, users, tiers, costs. Nothing is loaded or run."""
    from pagoda.cli.plan_tables import print_known, print_plan
    from pagoda.plan.report import Question, make_plan

    if known or model is None:
        print_known()
        return
    shape = load_shape(model)
    lengths, shared = [parse_tokens(text) for text in context or ()], parse_tokens(shared_prefix)
    if too_long := [f"{length:,}" for length in lengths if length > shape.max_context]:
        Console(stderr=True).print(
            f"{shape.name} has a context of {shape.max_context:,} tokens: figures at {', '.join(too_long)} are of a "
            "model that went so far",
            style="yellow",
            soft_wrap=True,
            highlight=False,
        )
    question = Question(
        contexts=lengths
        or [length for length in _DEFAULT_CONTEXTS if shared < length <= shape.max_context]
        or [shape.max_context],
        shared=shared,
        kv_format=kv_format,
        block_size=block_size,
        weight_format=weights,
        tiers=tier or ("dram:512GiB", "disk:4TB", "object:@1GB"),
        utilization=utilization,
        compute_share=compute_share,
        bandwidth_share=bandwidth_share,
        users=users,
        min_tokens_per_s=min_speed,
    )
    made = make_plan(shape, _device(hardware, devices, memory, bandwidth, tflops, host_link, price), question)
    if as_json:
        print(json.dumps(made.to_json(), indent=1))
    else:
        print_plan(made)


def parse_tokens(text: str) -> int:
    """A number of tokens as people write it: `8192`, `8k` (of 1,024), `1M`.

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"\s*([\d_,]+)\s*([kKmM]?)\s*", text)
    if not found:
        raise ConfigError(f"not a number of tokens: {text!r}; write such as 8192 or 8k")
    return int(re.sub("[_,]", "", found[1])) * {"": 1, "k": 1024, "m": 1024**2}[found[2].lower()]


def load_shape(name: str) -> ModelShape:
    """The shape of a built-in model, of a folder's or file's config, or of a model on the hub.

    Raises:
        PagodaError: there is none, or its config cannot be read.
    """
    from pagoda.plan.catalog import CATALOG, find_shape
    from pagoda.plan.shape import ModelShape

    known = find_shape(name)
    if known is not None:
        return known
    path = Path(name).expanduser()
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        if path.name == "config.json" or not _HUB_ID.fullmatch(name):
            near = get_close_matches(name.lower(), CATALOG, n=1)
            raise ModelNotFound(
                f"{name!r} is no folder with a config.json, no hub id and none of the built-in models"
                f"{f' (is {near[0]} meant?)' if near else ''}: {', '.join(CATALOG)}",
                param="model",
            )
        path = _download(name)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise WeightsError(f"{path} is no model's config.json")
    return ModelShape.from_config(name, config)


def _download(name: str) -> Path:
    """The config of a hub repository, and nothing else of it."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.hf_hub_download(name, "config.json"))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ModelNotFound(
            f"{name!r} is none of the built-in models (`pagoda plan --list`), and its config cannot be got from the "
            f"Hugging Face hub: {error}",
            param="model",
        ) from error


def _device(
    name: str,
    count: int,
    memory: str | None,
    bandwidth: str | None,
    tflops: float | None,
    host_link: str | None,
    price: float | None,
) -> Hardware:
    """A device of the table, with what the user gave in place of its figures."""
    from pagoda.plan.hardware import find_hardware

    device = find_hardware(name, count)
    changed = memory or bandwidth or tflops
    return replace(
        device,
        name=f"{device.name}, changed" if changed else device.name,
        memory=parse_size(memory) if memory else device.memory,
        bandwidth=parse_size(bandwidth.removesuffix("/s")) if bandwidth else device.bandwidth,
        flops=tflops * 1e12 if tflops else device.flops,
        host_link=parse_size(host_link.removesuffix("/s")) if host_link else device.host_link,
        price=device.price if price is None else price,
    )
