"""The operator's routes for what the model is: LoRA adapters that come and go, as vLLM has them, and new weights.

    POST /load_lora_adapter      {"lora_name": NAME, "lora_path": FOLDER}    on the server's file system
    POST /unload_lora_adapter    {"lora_name": NAME}
    POST /reload_weights         {"path": FOLDER}                            the same model's, trained further

With the admin key only, as the paths are the server's own.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from pagoda.errors import ConfigError, InvalidRequest, ModelError, ModelNotFound
from pagoda.server.body import parse_object, read_body
from pagoda.server.errors import HttpError
from pagoda.server.faults import typed
from pagoda.server.openai.respond import Served


class LoadRequest(BaseModel):
    """Which adapter to load, and from where."""

    model_config = ConfigDict(strict=True)
    lora_name: str
    lora_path: str


class UnloadRequest(BaseModel):
    """Which adapter to forget."""

    model_config = ConfigDict(strict=True)
    lora_name: str


class ReloadRequest(BaseModel):
    """Where the new weights are."""

    model_config = ConfigDict(strict=True)
    path: str


def weights_router(served: Served, max_body_bytes: int) -> APIRouter:
    """The routes, without their prefix; whoever includes them checks the admin key."""
    router = APIRouter()
    engine = served.engine

    @router.post("/load_lora_adapter")
    async def load(request: Request) -> Response:
        wanted = typed(LoadRequest, parse_object(await read_body(request, max_body_bytes)))
        if wanted.lora_name in served.model_names:
            raise InvalidRequest(f"{wanted.lora_name!r} is the model's name", param="lora_name")
        try:
            await engine.load_adapter(wanted.lora_name, wanted.lora_path)
        except (ModelError, ConfigError) as error:
            raise HttpError(400, "adapter_refused", str(error), param="lora_path") from None
        return JSONResponse({"id": wanted.lora_name, "loaded": True})

    @router.post("/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        wanted = typed(UnloadRequest, parse_object(await read_body(request, max_body_bytes)))
        await engine.unload_adapter(wanted.lora_name)
        return JSONResponse({"id": wanted.lora_name, "loaded": False})

    @router.post("/reload_weights")
    async def reload(request: Request) -> Response:
        wanted = typed(ReloadRequest, parse_object(await read_body(request, max_body_bytes)))
        try:
            identity = await engine.reload_weights(wanted.path)
        except (ModelError, ModelNotFound, ConfigError) as error:
            raise HttpError(400, "weights_refused", str(error), param="path") from None
        return JSONResponse({"weights": identity})

    return router
