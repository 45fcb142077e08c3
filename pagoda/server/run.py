"""Running the application under uvicorn: draining on a signal."""

from __future__ import annotations

import logging
import socket

import uvicorn
from fastapi import FastAPI

from pagoda.server.app import Lifecycle


class _Probes(logging.Filter):
    """Leaves out of the access log what monitors and routers ask every second."""

    def filter(self, record: logging.LogRecord) -> bool:
        path = record.args[2] if isinstance(record.args, tuple) and len(record.args) > 2 else ""
        return path not in ("/health", "/metrics")


class DrainingServer(uvicorn.Server):
    """Begins to drain the engine when told to stop; uvicorn itself waits for open streams for ever."""

    def __init__(self, app: FastAPI, *, log_level: str = "info") -> None:
        # h11 rather than what happens to be installed: one parser, one behaviour.
        super().__init__(uvicorn.Config(app, log_level=log_level, log_config=None, http="h11", lifespan="on"))
        logging.getLogger("uvicorn.access").addFilter(_Probes())
        self._lifecycle: Lifecycle = app.state.lifecycle

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop admitting, let streams finish within the drain time or abort them, then close."""
        self._lifecycle.begin_stop()
        await super().shutdown(sockets)
