"""A running server, as commands ask it: JSON out and in, and its refusals as errors."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from pagoda.errors import ConfigError, PagodaError

_SERVER = "Server"


def with_scheme(url: str) -> str:
    """An address as people write it, `127.0.0.1:8000`, as a URL."""
    return url if "://" in url else f"http://{url}"


Url = Annotated[
    str,
    typer.Option(
        envvar="PAGODA_URL",
        show_envvar=True,
        callback=with_scheme,
        help="The running server.",
        rich_help_panel=_SERVER,
    ),
]
AdminKey = Annotated[
    str | None,
    typer.Option(envvar="PAGODA_ADMIN_KEY", show_envvar=True, help="The server's admin key.", rich_help_panel=_SERVER),
]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="PAGODA_API_KEY", show_envvar=True, help="A tenant's own key.", rich_help_panel=_SERVER),
]
Replica = Annotated[
    int | None,
    typer.Option(min=0, help="Behind a router: which replica to ask, by number.", rich_help_panel=_SERVER),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print what the server answers.")]

_REPLICA = "x-pagoda-replica"
DEFAULT_URL = "http://127.0.0.1:8000"


class RefusedError(PagodaError):
    """The server did not do it; the message is its own."""


def ask(
    method: str,
    path: str,
    *,
    url: str,
    admin_key: str | None,
    api_key: str | None = None,
    replica: int | None = None,
    **content: Any,
) -> dict[str, Any]:
    """The JSON that the server answers. If a router chose one of its replicas for that, standard error says which.

    Args:
        replica: the one to ask, where a router has several.
        content: `params` or `json`, as httpx takes them.

    Raises:
        ConfigError: the server cannot be reached.
        RefusedError: it answered with an error.
    """
    import httpx

    given = {"x-admin-key": admin_key, "x-api-key": api_key, _REPLICA: None if replica is None else str(replica)}
    headers = {name: value for name, value in given.items() if value is not None}
    try:
        answer = httpx.request(method, url.rstrip("/") + path, headers=headers, timeout=60, **content)
        body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"no server answers at {url} (--url or PAGODA_URL says where it is): {error}") from None
    except ValueError:
        raise ConfigError(f"{url} is no Pagoda server: {path} answered {answer.status_code}") from None
    if answer.is_error or not isinstance(body, dict):
        fault = body.get("error") if isinstance(body, dict) else None
        message = fault["message"] if isinstance(fault, dict) else f"{path} answered {answer.status_code}"
        if answer.status_code == 404 and isinstance(fault, dict) and not fault["code"]:  # there is no such route
            message += "; the operator's routes exist where the server was started with --admin-key (PAGODA_ADMIN_KEY)"
        if answer.status_code in (401, 403):
            wrong = "the server does not know this key" if headers else "the server wants a key"
            message = f"{wrong}: give --admin-key (PAGODA_ADMIN_KEY), or where it takes them --api-key (PAGODA_API_KEY)"
        raise RefusedError(message)
    if replica is None and (number := answer.headers.get(_REPLICA)) is not None:
        who = f"replicas {number} together" if "," in number else f"replica {number}"
        print(f"{who} answered; --replica N asks one", file=sys.stderr)
    return body


def print_json(answer: dict[str, Any]) -> None:
    """An answer as it came, for other programs."""
    print(json.dumps(answer, indent=2, ensure_ascii=False))
