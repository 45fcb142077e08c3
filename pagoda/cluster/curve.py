"""Sockets that only holders of the cluster token can talk to: CurveZMQ with keys made from the token.

The server's key pair is derived from the token, so both ends know it. A client that does not know the server's public
key cannot open a connection, and what passes is encrypted. http://curvezmq.org
"""

from __future__ import annotations

import hashlib
from typing import Any

import zmq
from zmq.utils import z85


def guard_server(socket: zmq.Socket[Any], token: str | None) -> None:
    """Let only holders of the token connect, if there is one. Before it is bound."""
    if token is not None:
        socket.curve_server = True
        socket.curve_secretkey = _secret(token)


def guard_client(socket: zmq.Socket[Any], token: str | None) -> None:
    """Be a holder of the token, if there is one. Before it connects."""
    if token is not None:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = zmq.curve_public(_secret(token))


def _secret(token: str) -> bytes:
    return z85.encode(hashlib.blake2b(token.encode(), digest_size=32, person=b"pagoda curve").digest())
