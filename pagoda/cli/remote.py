"""A running server, as commands ask it: JSON out and in, and its refusals as errors."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from pagoda.errors import ConfigError, PagodaError

_SERVER = "Server"

Url = Annotated[
    str, typer.Option(envvar="PAGODA_URL", show_envvar=True, help="The running server.", rich_help_panel=_SERVER)
]
AdminKey = Annotated[
    str | None,
    typer.Option(envvar="PAGODA_ADMIN_KEY", show_envvar=True, help="The server's admin key.", rich_help_panel=_SERVER),
]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="PAGODA_API_KEY", show_envvar=True, help="A tenant's own key.", rich_help_panel=_SERVER),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print what the server answers.")]

DEFAULT_URL = "http://127.0.0.1:8000"


class RefusedError(PagodaError):
    """The server did not do it; the message is its own."""


def ask(
    method: str, path: str, *, url: str, admin_key: str | None, api_key: str | None = None, **content: Any
) -> dict[str, Any]:
    """The JSON that the server answers.

    Args:
        content: `params` or `json`, as httpx takes them.

    Raises:
        ConfigError: the server cannot be reached.
        RefusedError: it answered with an error.
    """
    import httpx

    keys = {"x-admin-key": admin_key, "x-api-key": api_key}
    headers = {name: key for name, key in keys.items() if key is not None}
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
        raise RefusedError(message)
    return body


def print_json(answer: dict[str, Any]) -> None:
    """An answer as it came, for other programs."""
    print(json.dumps(answer, indent=2, ensure_ascii=False))
