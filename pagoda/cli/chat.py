"""`pagoda chat`: a conversation in the terminal, with what the cache did for each turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pagoda.cli import options
from pagoda.cli.remote import with_scheme
from pagoda.engine.outputs import Usage
from pagoda.engine.params import SamplingParams
from pagoda.errors import PagodaError, RequestError

if TYPE_CHECKING:
    from pagoda.cli.chat_sources import ChatSource

HELP = "/reset forgets the conversation, /quit ends it; Ctrl-C stops an answer."
_CONVERSATIONS = 2  # that the KV memory has room for: this one, and the one before a /reset


def chat(
    model: options.Model = options.DEFAULT_MODEL,
    url: Annotated[
        str | None, typer.Option(help="Talk to a running server, such as http://127.0.0.1:8000, and not load MODEL.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="PAGODA_API_KEY", show_envvar=True, help="Key for --url.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 0.95,
    seed: options.Seed = None,
    kv_memory: options.KvMemory = None,
    max_model_len: options.MaxModelLen = None,
    dtype: options.Dtype = "auto",
    kv_format: options.KvFormat = "auto",
    weights: options.WeightsFormat = "full",
) -> None:
    """Chat with MODEL, seeing for each turn how much came from the KV cache."""
    from pagoda.cli.chat_sources import LocalChat, RemoteChat

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    source: ChatSource
    if url is not None:
        source = RemoteChat(with_scheme(url), api_key)
    else:
        engine = options.load_engine(
            model,
            kv_memory=kv_memory,
            max_model_len=max_model_len,
            max_num_seqs=_CONVERSATIONS,
            dtype=dtype,
            kv_format=kv_format,
            weights_format=weights,
        )
        source = LocalChat(options.as_async(engine))
    # One event loop that runs only while an answer comes: input() stays on the main thread, with its line editing.
    with asyncio.Runner() as runner:
        runner.run(source.start())
        try:
            _converse(runner, source, params, [{"role": "system", "content": system}] if system else [])
        finally:
            runner.run(source.stop())


def _converse(
    runner: asyncio.Runner, source: ChatSource, params: SamplingParams, opening: Sequence[dict[str, Any]]
) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"Chatting with {source.model_name}. {HELP}", style="dim", markup=False)
    messages = list(opening)
    while True:
        try:
            line = console.input("[bold]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        match line:
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/reset":
                messages = list(opening)
                console.print("Forgotten.", style="dim")
                continue
            case _ if line.startswith("/"):
                console.print(HELP, style="dim", markup=False)
                continue
        answer: list[str] = []
        messages.append({"role": "user", "content": line})
        try:
            runner.run(_answer(console, source, messages, params, answer))
        except KeyboardInterrupt:
            console.print(" [dim](stopped)[/]")
        except RequestError as error:
            _print_error(console, error)
            answer = []
        if answer:
            messages.append({"role": "assistant", "content": "".join(answer)})
        else:
            messages.pop()


async def _answer(
    console: Console, source: ChatSource, messages: list[dict[str, Any]], params: SamplingParams, answer: list[str]
) -> None:
    """Print an answer as it comes, and append its pieces to `answer`."""
    start = time.perf_counter()
    first: float | None = None
    usage: Usage | None = None
    async with aclosing(source.reply(messages, params)) as pieces:
        async for piece in pieces:
            if piece.text and first is None:
                first = time.perf_counter()
            answer.append(piece.text)
            usage = piece.usage or usage
            console.print(piece.text, end="", markup=False)
            console.file.flush()
    console.print()
    if usage is not None:
        console.print(_figures(usage, start, first, time.perf_counter()), style="dim", markup=False)


def _figures(usage: Usage, start: float, first: float | None, end: float) -> str:
    num_computed = usage.num_prompt_tokens - usage.num_hit_tokens
    figures = [f"{usage.num_prompt_tokens} prompt tokens: {usage.num_hit_tokens} cached, {num_computed} computed"]
    if first is not None:
        figures.append(f"first token after {(first - start) * 1000:.0f} ms")
        if usage.num_output_tokens > 1 and end > first:
            figures.append(f"{usage.num_output_tokens} tokens at {(usage.num_output_tokens - 1) / (end - first):.1f}/s")
    return "(" + "; ".join(figures) + ")"


def _print_error(console: Console, error: PagodaError) -> None:
    console.print("error: ", style="bold red", end="")
    console.print(str(error), markup=False)
