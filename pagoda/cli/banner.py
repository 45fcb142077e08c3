"""What a server says when it starts: where it is and how to try it; and in which style it logs from then on."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape

from pagoda.cli.listening import address, is_loopback


def print_banner(about: Mapping[str, str], name: str, host: str, port: int, *, has_keys: bool) -> None:
    """Say what is served, where, and how to try it.

    Args:
        about: lines of what is served, by their labels.
        name: what clients may call the model.
        has_keys: whether they need a key.
    """
    url = address(host, port)
    lines = {
        **about,
        "API": f"{url}/v1, {'API key required' if has_keys else 'no API key'}",
        "Look": f"{url}/dashboard, {url}/metrics",
    }
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for label, text in lines.items():
        console.print(f"[bold]{label:<10}[/]{escape(text)}")
    if not has_keys and not is_loopback(host):
        console.print(f"[yellow]Anyone who can reach {host} may use this server: set --api-key.[/]")
    messages = [{"role": "user", "content": "What is a pagoda?"}]
    body = json.dumps({"model": name, "messages": messages, "temperature": 0.2, "max_tokens": 64})
    key_header = ' -H "Authorization: Bearer $PAGODA_API_KEY"' if has_keys else ""
    console.print("Try it:", style="bold")
    console.print(
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key_header} -d '{body}'", markup=False
    )


def log_to_stderr(level: str, who: str = "") -> None:
    """Log Pagoda's messages and the web server's in one style, behind the name of whose they are."""
    logging.basicConfig(format=f"{who}%(levelname)-8s %(message)s")
    logging.getLogger("pagoda").setLevel(level.upper())
