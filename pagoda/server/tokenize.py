"""/tokenize: the tokens of a prompt or of messages, in vLLM's form, for routers that compare prompts themselves."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from pagoda.errors import InvalidRequest
from pagoda.server.body import parse_object, read_body
from pagoda.server.faults import typed
from pagoda.server.openai.chat import normalize_messages
from pagoda.server.openai.respond import Served
from pagoda.server.passages import Passages


class TokenizeRequest(BaseModel):
    """What to tokenize: a prompt, or messages. Other fields of vLLM's are ignored."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


def tokenize_router(served: Served, max_body_bytes: int) -> APIRouter:
    """The route, which is below no prefix."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, max_body_bytes)
        return JSONResponse(await asyncio.to_thread(_tokenize, served, body))

    return router


def _tokenize(served: Served, body: bytes) -> dict[str, Any]:
    asked = typed(TokenizeRequest, parse_object(body))
    served.resolve(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequest("give a prompt or messages", param="prompt")
    tokenizer = served.engine.tokenizer
    if asked.messages is None:
        tokens = tokenizer.encode(asked.prompt or "", add_special_tokens=asked.add_special_tokens is not False)
    else:
        passages = Passages()
        tools = passages.hide_tools(asked.tools, "tools") if asked.tools else None
        said = normalize_messages(asked.messages, passages)
        text = tokenizer.render_chat(said, tools, asked.add_generation_prompt)
        special = tokenizer.encode("") if asked.add_special_tokens else ()  # a chat template writes them itself
        tokens, _ = passages.encode(text, tokenizer, special)
    return {
        "count": len(tokens),
        "max_model_len": served.engine.max_model_len,
        "tokens": tokens,
        "token_strs": [tokenizer.token_text(token) for token in tokens] if asked.return_token_strs else None,
    }
