"""Running the application under uvicorn: binding first, draining on a signal."""

from __future__ import annotations

import socket

import uvicorn
from fastapi import FastAPI

from pagoda.errors import ConfigError
from pagoda.server.app import Lifecycle


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket, not yet listening. Port 0 takes any free one. Binding before a model loads fails early.

    Raises:
        ConfigError: the address is in use, not ours, or does not resolve.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot serve on {host}:{port}: {why}") from None
    return sock


class DrainingServer(uvicorn.Server):
    """Begins to drain the engine when told to stop; uvicorn itself waits for open streams for ever."""

    def __init__(self, app: FastAPI, *, log_level: str = "info") -> None:
        # h11 rather than what happens to be installed: one parser, one behaviour.
        super().__init__(uvicorn.Config(app, log_level=log_level, http="h11", lifespan="on"))
        self._lifecycle: Lifecycle = app.state.lifecycle

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop admitting, let streams finish within the drain time or abort them, then close."""
        self._lifecycle.begin_stop()
        await super().shutdown(sockets)
