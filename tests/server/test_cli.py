"""The command line: what it says without a model, and the terminal chat over a fake one."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.text import Text

from pagoda import cli
from pagoda.cli import options
from pagoda.cli.banner import print_banner
from pagoda.cli.chat import _converse
from pagoda.cli.chat_sources import LocalChat, RemoteChat
from pagoda.engine.params import SamplingParams
from pagoda.errors import ConfigError, ContextTooLong, InvalidRequest, WeightsError
from pagoda.kv.eviction import POLICIES
from pagoda.server.auth import ApiKeys
from pagoda.server.sockets import bind

from .conftest import run_server
from .fake_backend import FakeBackend

HELLO = [{"role": "user", "content": "Hello there"}]
PARAMS = SamplingParams(max_tokens=9)
STATE_FILES = ("--caches-file", "--public-file", "--usage-file")


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["pagoda", *args])
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def test_help_needs_neither_torch_nor_a_web_server() -> None:
    code = (
        "import sys\nsys.argv = ['pagoda', '--help']\n"
        "from pagoda.cli import main\ntry: main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'httpx'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("serve", "chat", "generate", "--version"))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("serve", ["--kv-memory", "--kv-format", "--queue-policy", "lpm", "PAGODA_API_KEY", "--served-model-name"]),
        ("chat", ["--url", "--system"]),
        ("generate", ["--json", "PROMPT"]),
    ],
)
def test_command_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, words: list[str]
) -> None:
    status, out, _ = run(monkeypatch, capsys, command, "--help")
    assert status == 0
    assert all(word in out for word in words), out


def test_help_shows_the_defaults_that_are_told_in_words() -> None:
    """Rich takes `[default: x]` for markup, and shows nothing of it."""
    commands = [typer.main.get_command(cli.app)]
    told = 0
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        for param in command.params:
            words = getattr(param, "help", None) or ""
            assert Text.from_markup(words).plain == words.replace("\\[", "["), param.name
            told += "[default: " in words
    assert told > 10


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(monkeypatch, capsys, "--version")
    assert status == 0
    assert out.startswith("pagoda ")


def test_errors_are_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(model: str, **settings: Any) -> None:
        raise WeightsError(f"no model at {model} [red]")

    monkeypatch.setattr(options, "load_engine", fail)
    monkeypatch.delenv("PAGODA_API_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = [
            (["serve", "/no/such", "--port", "0"], "no model at /no/such [red]"),
            (["generate", "Hi", "--model", "/no/such"], "no model at /no/such"),
            (["serve", "--kv-format", "int3"], "--kv-format: no KV format is called 'int3'"),
            (["serve", "--blend-auto", "--kv-format", "fp16/int4"], "--blend-auto does not go with --kv-format fp16/"),
            (["serve", "--kv-skip-layers", "0,x"], "--kv-skip-layers: not a list of layers: '0,x'"),
            (["serve", "--eviction", "mru"], "--eviction: no eviction policy is called 'mru'; there are reuse, lru,"),
            (["serve", "--adapter", "foo"], "--adapter takes NAME=FOLDER"),
            (["serve", "--adapter", f"a={tmp_path}"], f"{tmp_path} is not an adapter"),
            (["generate", "Hi", "--temperature", "-1"], "temperature must be between"),
            (["serve", "--port", port], f"cannot serve on 127.0.0.1:{port}: Address already in use"),
            (["serve", "--host", "203.0.113.1"], "cannot serve on 203.0.113.1:8000: Cannot assign"),
            (["serve", "--api-keys-file", str(tmp_path / "none")], "cannot read API keys"),
            (["serve", "--api-keys-file", str(tmp_path), "--api-key", "x"], "not both"),
            *((["serve", option, "/no/where/f"], "cannot write /no/where/f: No such file") for option in STATE_FILES),
            (["chat", "--url", f"http://127.0.0.1:{_free_port()}"], "cannot chat with"),
            (["chat", "--url", f"127.0.0.1:{_free_port()}"], "cannot chat with http://127.0.0.1:"),
            (["chat", "--url", "ftp://nowhere"], "cannot chat with"),
        ]
        for args, words in cases:
            status, _, err = run(monkeypatch, capsys, *args)
            assert status == 2, (args, err)
            assert err.startswith("error: ")
            assert words in err
            assert err.count("\n") == 1


def test_help_names_every_eviction_policy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(monkeypatch, capsys, "serve", "--help")
    words = set(out.replace(",", " ").replace(".", " ").split())
    assert set(POLICIES) <= words


def test_memory_is_taken_for_no_more_than_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def load(model: str, **settings: Any) -> None:
        asked.append(settings["max_num_seqs"])
        raise WeightsError("enough")

    monkeypatch.setattr(options, "load_engine", load)
    for args in (
        ["generate", "a"],
        ["generate", "a", "b", "--n", "3"],
        ["generate", *["a"] * 99],
        ["chat"],
        ["serve", "--port", "0"],
    ):
        run(monkeypatch, capsys, *args)
    assert asked == [1, 6, 64, 2, 64]


def test_usage_mistakes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["serve", "--queue-policy", "lifo"], ["serve", "--block-size", "0"], ["generate"], ["nonsense"]):
        status, _, err = run(monkeypatch, capsys, *args)
        assert status == 2
        assert "Error" in err


async def test_remote_chat_tells_what_was_cached() -> None:
    async with run_server(FakeBackend(), api_keys=ApiKeys.single("sk-1")) as live:
        source = RemoteChat(live.url + "/v1/", "sk-1")
        await source.start()
        assert source.model_name == "fake"
        for turn in range(2):
            async with aclosing(source.reply(HELLO, PARAMS)) as reply:
                pieces = [piece async for piece in reply]
            assert "".join(piece.text for piece in pieces) == "once upon"
            usage = pieces[-1].usage
            assert usage.num_output_tokens == 9
            assert (usage.num_hit_tokens > 0) == (turn > 0)
        with pytest.raises(InvalidRequest, match="exceed the context"):
            await anext(source.reply([{"role": "user", "content": "x" * 5000}], PARAMS))
        await source.stop()
        with pytest.raises(ConfigError, match="not known"):
            await RemoteChat(live.url, "wrong").start()


async def test_local_chat_tells_what_was_cached_and_frees() -> None:
    backend = FakeBackend()
    source = LocalChat(backend)
    await source.start()
    async with aclosing(source.reply(HELLO, PARAMS)) as reply:
        pieces = [piece async for piece in reply]
    assert "".join(piece.text for piece in pieces) == "once upon"
    assert pieces[-1].usage.num_output_tokens == 9
    async with aclosing(source.reply(HELLO, PARAMS)) as reply:
        piece = await anext(reply)
        assert piece.usage.num_hit_tokens > 0
    assert backend.live == {}
    with pytest.raises(ContextTooLong):
        await anext(source.reply([{"role": "user", "content": "x" * 5000}], PARAMS))
    await source.stop()
    assert not backend.is_healthy


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    lines: list[str] = []

    def read(prompt: object = "") -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", read)
    yield lines
    assert lines == []


def test_conversation_in_the_terminal(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    backend = FakeBackend()
    typed += ["Hi [b]", "", "And then?", "/help", "x" * 5000, "Still there?", "/reset", "Hi [b]"]
    with asyncio.Runner() as runner:
        _converse(runner, LocalChat(backend), PARAMS, [{"role": "system", "content": "Be brief."}])
    out = capsys.readouterr().out
    texts = [backend.tokenizer.decode(r["prompt"]) for r in backend.seen]
    assert texts[0] == "system\nBe brief.\nuser\nHi [b]\nassistant\n"
    assert texts[1] == texts[0] + "once upon\nuser\nAnd then?\nassistant\n"
    # The message that did not fit is not part of the conversation.
    assert texts[2] == texts[1] + "once upon\nuser\nStill there?\nassistant\n"
    assert texts[3] == texts[0]
    num_first = len(backend.seen[0]["prompt"])
    assert f"{num_first} prompt tokens: 0 cached, {num_first} computed; first token after" in out
    assert f"{num_first} prompt tokens: {num_first - 1} cached, 1 computed" in out
    assert "exceed the context" in out
    assert "Forgotten" in out


def test_quit(typed: list[str]) -> None:
    typed += ["/quit"]
    with asyncio.Runner() as runner:
        _converse(runner, LocalChat(FakeBackend()), PARAMS, [])


def test_bind_takes_a_free_port_and_names() -> None:
    with bind("localhost", 0) as sock:
        assert sock.getsockname()[1] > 0
    with pytest.raises(ConfigError, match=r"cannot serve on no\.such\.host\.invalid:1"):
        bind("no.such.host.invalid", 1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def test_a_banner_says_where_and_how(capsys: pytest.CaptureFixture[str]) -> None:
    print_banner({"Model": "tiny", "Replicas": "2"}, "tiny", "0.0.0.0", 81, has_keys=False)
    told = capsys.readouterr().err
    for text in ("Model     tiny", "Replicas  2", "http://0.0.0.0:81/v1, no API key", "Anyone who can reach 0.0.0.0"):
        assert text in told
    print_banner({}, "tiny", "::1", 81, has_keys=True)
    told = capsys.readouterr().err
    assert "curl http://[::1]:81/v1/chat/completions" in told.splitlines()[-1]
    assert "Bearer $PAGODA_API_KEY" in told
    assert "Anyone" not in told


def test_logs_have_one_style_and_say_whose_they_are() -> None:
    program = """
import logging
from pagoda.cli.banner import log_to_stderr
log_to_stderr("info", "replica 1: ")
logging.getLogger("pagoda.kv").info("a tier is slow")
logging.getLogger("pagoda.kv").debug("not told")
logging.getLogger("another").info("not told")
logging.getLogger("another").warning("told")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["replica 1: INFO     a tier is slow", "replica 1: WARNING  told"]
