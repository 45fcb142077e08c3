"""`pagoda kv`: what a running server's cache holds for whom; pins, purges. Needs the admin key, or shows one's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pagoda.cli.remote import DEFAULT_URL, AdminKey, ApiKey, AsJson, RefusedError, Replica, Url, ask, print_json
from pagoda.cli.tables import counted, print_tables
from pagoda.errors import ConfigError

Tenant = Annotated[str, typer.Option(help="Whose. Empty where the server has no API keys.")]
Salt = Annotated[str, typer.Option("--cache-salt", help="The salt of the requests it belongs to.")]
Prompt = Annotated[str | None, typer.Option(help="A prefix as raw text.")]
Messages = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="A prefix as messages: a JSON file.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

app = typer.Typer(name="kv", help="Look into a running server's KV cache, pin and purge.", no_args_is_help=True)


@app.command(name="ls")
def ls(url: Url = DEFAULT_URL, admin_key: AdminKey = None, replica: Replica = None, as_json: AsJson = False) -> None:
    """Blocks by state and tenant, and what is leased."""
    usage = ask("GET", "/v1/kv", url=url, admin_key=admin_key, replica=replica)
    leases = ask("GET", "/v1/kv/leases", url=url, admin_key=admin_key, replica=replica)["data"]
    if as_json:
        return print_json({**usage, "leases": leases})
    console = Console(highlight=False)
    blocks = usage["blocks"]
    console.print(
        f"{blocks['total']:,} blocks: {blocks['free']:,} free, {blocks['held']:,} held, {blocks['cached']:,} cached; "
        f"{blocks['leased']:,} of at most {blocks['lease_limit']:,} leased"
    )
    table = _table("tenant", "blocks", "leased")
    for each in usage["tenants"]:
        table.add_row(_name(each["tenant"]), f"{each['num_blocks']:,}", f"{each['num_leased_blocks']:,}")
    print_tables(console, table)
    if leases:
        table = _table("lease", "tokens", "blocks", "ends in", texts=("held in", "tenant", "name"))
        for each in leases:
            left = "never" if each["remaining_s"] is None else f"{each['remaining_s']:,.0f} s"
            figures = each["id"], f"{each['num_tokens']:,}", f"{each['num_blocks']:,}", left
            table.add_row(*figures, each["held_in"], _name(each["tenant"]), escape(each["name"]))
        print_tables(console, table)


@app.command()
def tree(
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    replica: Replica = None,
    api_key: ApiKey = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most prefixes to show.")] = 200,
    as_json: AsJson = False,
) -> None:
    """The cached prefixes as a tree, the last used first."""
    params = {"limit": limit} | ({} if tenant is None else {"tenant": tenant})
    answer = ask("GET", "/v1/kv/tree", url=url, admin_key=admin_key, replica=replica, api_key=api_key, params=params)
    if as_json:
        return print_json(answer)
    console = Console(highlight=False)
    scope: tuple[str, ...] = ()
    for each in answer["data"]:
        if scope != (scope := (each["tenant"], each.get("cache_salt", ""), each["adapter"])):
            salt = f", salt {escape(scope[1])}" if scope[1] else ""
            adapter = f", adapter {escape(each['adapter'])}" if each["adapter"] else ""
            console.print(f"[bold]{_name(each['tenant'])}[/]{salt}{adapter}")
        notes = [counted(each["num_tokens"], "token"), counted(each["num_hits"], "hit")]
        notes += [f"{counted(each['num_held'], 'block')} held"] if each["num_held"] else []
        text = escape(json.dumps(each["preview"], ensure_ascii=False)) if "preview" in each else ""
        indent = "  " * (each["level"] + 1)
        console.print(f"{indent}[dim]{', '.join(notes)}[/] {text}", no_wrap=True, overflow="ellipsis")
    if any("preview" not in each for each in answer["data"]):
        console.print("[dim]Where there are no API keys, texts and salts are shown with the admin key only.[/]")
    if answer["has_more"]:
        console.print(f"[dim]... more than {limit} prefixes: see --limit[/]")


@app.command()
def pin(
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    replica: Replica = None,
    tenant: Tenant = "",
    cache_salt: Salt = "",
    prompt: Prompt = None,
    messages: Messages = None,
    as_json: AsJson = False,
) -> None:
    """Keep a cached prefix until it is unpinned."""
    body = {"tenant": tenant, "cache_salt": cache_salt, **_prefix(prompt, messages)}
    try:
        answer = ask("POST", "/v1/kv/pin", url=url, admin_key=admin_key, replica=replica, json=body)
    except RefusedError as error:
        if tenant:
            raise
        raise RefusedError(f"{error} Where there are API keys, --tenant says whose prefix it is.") from None
    if as_json:
        return print_json(answer)
    pinned = f"{counted(answer['num_tokens'], 'token')} in {counted(answer['num_blocks'], 'block')}"
    print(f"pinned {pinned}: lease {answer['id']}")


@app.command()
def unpin(
    lease: Annotated[str, typer.Argument(help="Its id, as `pagoda kv ls` shows it.")],
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    replica: Replica = None,
    api_key: ApiKey = None,
) -> None:
    """End a pin, or a lease before its time."""
    ask("DELETE", f"/v1/kv/leases/{lease}", url=url, admin_key=admin_key, replica=replica, api_key=api_key)
    print(f"lease {lease} is ended")


@app.command()
def purge(
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    replica: Replica = None,
    tenant: Annotated[str | None, typer.Option(help="Whose.")] = None,
    cache_salt: Salt = "",
    prompt: Prompt = None,
    messages: Messages = None,
    request: Annotated[str | None, typer.Option(help="A recent request's id: what begins with its prompt.")] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Forget a tenant's cache, what begins with a prefix, or what a request left; pinned and leased or not.

    Of a whole tenant, all that tiers have goes too. Tiers that did not do it within 10 s are named, and status is 2:
    the server goes on to try while it runs. So are replicas behind a router that did not do it.
    """
    has_prefix = prompt is not None or messages is not None
    if request is not None and (has_prefix or tenant is not None):
        raise ConfigError("--request says all: give no tenant and no prefix with it")
    if cache_salt and not has_prefix:
        raise ConfigError("--cache-salt needs --prompt or --messages: which prefix to purge under it")
    body: dict[str, Any] = {"request_id": request} if request is not None else {"tenant": tenant}
    of = _whose(tenant or "")
    what = f"what request {request} left" if request is not None else f"all of {of}"
    if has_prefix:
        body |= {"tenant": tenant or "", "cache_salt": cache_salt, **_prefix(prompt, messages)}
        what = f"what begins with that prefix, of {of}"
    elif request is None and tenant is None:
        raise ConfigError("say what to purge: --tenant, --prompt, --messages or --request")
    _confirm(f"Purge {what}, from {url}?", yes=yes, url=url, admin_key=admin_key, replica=replica)
    answer = ask("POST", "/v1/kv/purge", url=url, admin_key=admin_key, replica=replica, json=body)
    if as_json:
        return print_json(answer)
    print(f"{counted(answer['purged_blocks'], 'block')} purged")
    for tier, count in answer.get("purged_records", {}).items():
        print(f"{tier}: {counted(count, 'record')} purged")
    late = [*answer.get("waiting_tiers", ()), *(f"replica {number}" for number in answer.get("waiting_replicas", ()))]
    if late:
        raise RefusedError(f"not yet purged from: {', '.join(late)}. Purge again once they answer.")


@app.command()
def clear(url: Url = DEFAULT_URL, admin_key: AdminKey = None, replica: Replica = None, yes: Yes = False) -> None:
    """Evict all that no request and no lease holds."""
    _confirm(f"Clear the cache of {url}?", yes=yes, url=url, admin_key=admin_key, replica=replica)
    freed = ask("POST", "/v1/kv/clear", url=url, admin_key=admin_key, replica=replica)["freed_blocks"]
    print(f"{counted(freed, 'block')} freed")


def _confirm(question: str, *, yes: bool, url: str, admin_key: str | None, replica: int | None) -> None:
    """Ask, unless told not to; not before it is known that the server would do it."""
    if yes:
        return
    ask("GET", "/v1/kv", url=url, admin_key=admin_key, replica=replica)
    if not typer.confirm(question):
        raise typer.Exit(1)


def _whose(tenant: str) -> str:
    return f"tenant {tenant}" if tenant else "requests without a tenant"


def _prefix(prompt: str | None, messages: Path | None) -> dict[str, Any]:
    if (prompt is None) == (messages is None):
        raise ConfigError("give --prompt or --messages")
    if messages is None:
        return {"prompt": prompt}
    try:
        return {"messages": json.loads(messages.read_text(encoding="utf-8"))}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{messages} is no JSON: {error}") from None


def _table(first: str, *figures: str, texts: Sequence[str] = ()) -> Table:
    """A table of a text, figures and more texts."""
    table = Table(first, box=None, pad_edge=False)
    for name in figures:
        table.add_column(name, justify="right")
    for name in texts:
        table.add_column(name)
    return table


def _name(tenant: str) -> str:
    return escape(tenant) or "(all requests)"
