"""Where a terminal chat gets its answers: an engine in this process, or a server."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from pagoda.engine.outputs import Usage
from pagoda.engine.params import SamplingParams
from pagoda.errors import ConfigError, InvalidRequest, RequestAborted
from pagoda.server.backend import Backend


@dataclass(frozen=True)
class Piece:
    """Some text of an answer, and the request's figures where they are known."""

    text: str
    usage: Usage | None = None


class ChatSource(Protocol):
    """Answers conversations. `start` comes first, and `model_name` is known after it."""

    model_name: str

    async def start(self) -> None:
        """Get ready."""

    async def stop(self) -> None:
        """Let go of everything."""

    def reply(self, messages: Sequence[dict[str, Any]], params: SamplingParams) -> AsyncGenerator[Piece, None]:
        """The next answer; closing it stops the work.

        Raises:
            RequestError: the conversation is refused, or the answer broke off.
        """


class LocalChat:
    """An engine in this process."""

    def __init__(self, engine: Backend) -> None:
        self._engine = engine
        self.model_name = engine.model_name

    async def start(self) -> None:
        """Start the engine's thread."""
        await self._engine.start()

    async def stop(self) -> None:
        """Stop the engine's thread."""
        await self._engine.stop(drain_s=0)

    async def reply(self, messages: Sequence[dict[str, Any]], params: SamplingParams) -> AsyncGenerator[Piece, None]:
        """See ChatSource."""
        tokenizer = self._engine.tokenizer
        prompt = tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
        async with aclosing(self._engine.stream(prompt, params)) as outputs:
            async for output in outputs:
                yield Piece("".join(delta.text for delta in output.deltas), output.usage)


class RemoteChat:
    """A server with OpenAI's API, at `url` with or without its /v1."""

    def __init__(self, url: str, api_key: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        base_url = url.rstrip("/").removesuffix("/v1") + "/v1"
        # A long prompt may take minutes before its first token.
        self._http = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=httpx.Timeout(10, read=None))
        self.model_name = ""

    async def start(self) -> None:
        """Ask which model is served.

        Raises:
            ConfigError: nobody answers there, or not as OpenAI's API does.
        """
        try:
            response = await self._http.get("/models")
            if response.is_success:
                self.model_name = response.json()["data"][0]["id"]
                return
            why = _message(response.content, response.status_code)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
        except (ValueError, LookupError, TypeError):
            why = "it does not answer as OpenAI's API does"
        await self._http.aclose()
        raise ConfigError(f"cannot chat with {self._http.base_url}: {why}")

    async def stop(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def reply(self, messages: Sequence[dict[str, Any]], params: SamplingParams) -> AsyncGenerator[Piece, None]:
        """See ChatSource."""
        body = {
            "model": self.model_name,
            "messages": messages,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._http.stream("POST", "/chat/completions", json=body) as response:
                if not response.is_success:
                    raise InvalidRequest(_message(await response.aread(), response.status_code))
                async for line in response.aiter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        yield _piece(json.loads(data))
        except httpx.HTTPError as error:
            raise RequestAborted(f"the server broke off: {error or type(error).__name__}") from error


def _piece(chunk: dict[str, Any]) -> Piece:
    if "error" in chunk:
        raise RequestAborted(chunk["error"]["message"])
    text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    usage = chunk.get("usage")
    if usage is None:
        return Piece(text)
    details = usage.get("prompt_tokens_details") or {}
    return Piece(text, Usage(usage["prompt_tokens"], details.get("cached_tokens", 0), usage["completion_tokens"]))


def _message(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {status}"
