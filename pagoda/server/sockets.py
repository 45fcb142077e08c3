"""Listening sockets, bound before anything slow begins."""

from __future__ import annotations

import socket

from pagoda.errors import ConfigError


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
