"""The `pagoda` command: serve a model, chat with it, plan a deployment, replay traces, look into tiers, and more.

Commands import the engine only once they run, so that `--help` and mistakes answer at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from pagoda import __version__
from pagoda.cli.chat import chat
from pagoda.cli.cluster import cluster
from pagoda.cli.generate import generate
from pagoda.cli.kv import app as kv
from pagoda.cli.plan import plan
from pagoda.cli.replay import replay
from pagoda.cli.route import route
from pagoda.cli.serve import serve
from pagoda.cli.tier import app as tier
from pagoda.cli.top import top
from pagoda.cli.usage import usage
from pagoda.errors import PagodaError

app = typer.Typer(
    name="pagoda",
    help="Serve language models from a paged, prefix-shared KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command()(route)
app.command()(cluster)
app.command()(chat)
app.command()(generate)
app.command()(plan)
app.command()(replay)
app.command()(usage)
app.command()(top)
app.add_typer(tier)
app.add_typer(kv)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pagoda {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. A PagodaError is one line on stderr and exit status 2."""
    try:
        app()
    except PagodaError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
