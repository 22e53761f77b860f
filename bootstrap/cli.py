"""``p2ptrain bootstrap``: the command line of the bootstrap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from p2ptrain.base.imports import command_imports
from p2ptrain.base.text import UserPath
from p2ptrain.manifest import JoinLink, load_run
from p2ptrain.net import address
from p2ptrain.net.throttle import MBIT, MIN_RATE

MIN_MBIT, MAX_MBIT = MIN_RATE / MBIT, 1e6
"""Bounds of a cap in Mbit/s, equal to those of a peer's settings."""


def _cap(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is None or value == 0 or MIN_MBIT <= value <= MAX_MBIT:  # NaN is neither
        return value
    raise click.BadParameter(f"0 (no cap), or a number from {MIN_MBIT:g} to {MAX_MBIT:,.0f}.")


@click.command(short_help="Run a swarm's entry point and print its join link.")
@click.argument("run", type=click.Path(file_okay=False, path_type=UserPath))
@click.option(
    "--listen", multiple=True, metavar="MULTIADDR", help="Address to listen on; default port 31337 everywhere."
)
@click.option(
    "--announce",
    multiple=True,
    metavar="MULTIADDR",
    help="Address to announce instead, such as a forwarded port: /ip4/PUBLIC_IP/tcp/PORT.",
)
@click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=UserPath),
    help="Directory for identity and link; else RUN/bootstrap.",
)
@click.option("--local/--no-local", default=None, help="Run a swarm on this machine only, on a free loopback port.")
@click.option("--relay/--no-relay", default=None, help="Relay traffic of peers that nobody can dial.  [relay]")
@click.option("--upload-mbit", type=float, callback=_cap, help="Upload cap, relayed bytes included. 0: no cap.")
@click.option("--download-mbit", type=float, callback=_cap, help="Download cap, relayed bytes included. 0: no cap.")
@click.option(
    "--weights",
    type=click.Path(exists=True, path_type=UserPath),
    metavar="PATH",
    help="The model to begin from, file or folder, which the run names by digest.",
)
@click.option("--beside", metavar="LINK", help="Join link of another bootstrap of the same swarm.")
@click.option("--page", metavar="[HOST:]PORT", help="Serve a web page about the swarm on this port.")
@click.option("--page-token", envvar="P2PTRAIN_PAGE_TOKEN", help="Token that a page beyond this machine requires.")
@click.option("--page-hosts", envvar="P2PTRAIN_PAGE_HOSTS", metavar="NAME,…", help="Host names of the page.")
@click.option("--page-public/--no-page-public", default=None, help="Let everybody read a part of it at /run.")
@click.option(
    "--page-hide",
    multiple=True,
    metavar="WORDS|PEER",
    help="Hide texts with these words, or of this peer, at /run.",
)
@click.option("--forget", is_flag=True, help="Use only the options of this start, none that the home remembers.")
def bootstrap(run: Path, home: Path | None, forget: bool, **given: Any) -> None:
    """Serve as the entry point of the signed run in the directory RUN, until Ctrl+C.

    Prints the command that others join with, then a line whenever a peer joins or leaves. With --beside the command
    names both bootstraps, and one of them is enough to join. The home remembers the options of earlier starts.
    """
    if given["beside"] is not None:
        JoinLink.parse(given["beside"])
    address.check(given["listen"], given["announce"], ())  # before the import of large libraries
    load_run(run)
    with command_imports():
        from bootstrap import app

    named = {name: None if value == () else value for name, value in given.items()}
    options = app.BootstrapOptions(run, home or run / "bootstrap", forget, **named)
    options.page_address  # noqa: B018 -- raises UserError before anything is written
    app.run(options, _say)


def _say(tag: str, text: str) -> None:
    click.echo(f"[{tag}] {text}")
