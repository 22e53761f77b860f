"""``p2ptrain status``, ``pause``, ``resume``, ``finish``: commands to the peer that runs in HOME."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from p2ptrain.base.errors import HomeError
from p2ptrain.base.logging_setup import printable
from peer.home import Home, check_no_other
from peer.owner import status as reports
from peer.owner.control_socket import NotRunningError, ask

HOME = click.argument("home", type=click.Path(file_okay=False, path_type=Path))


@click.command(short_help="Show what the peer in a home is doing.")
@HOME
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
def status(home: Path, as_json: bool) -> None:
    """Show what the peer in HOME is doing: progress, loss, exchanges, rates, this month's traffic.

    Exits with 2 when none runs there, or answers; what it left on the disk is shown all the same.
    """
    _check(home)
    check_no_other(home)
    fault: HomeError | None = None
    try:
        found = ask(home, command="status")["status"]
    except HomeError as error:
        fault, found = error, reports.last_known(Home(home), is_there=not isinstance(error, NotRunningError))
    click.echo(json.dumps(found, indent=1) if as_json else reports.screen(found))
    if fault is not None:
        raise fault


@click.command(short_help="Let the peer in a home rest.")
@HOME
def pause(home: Path) -> None:
    """Let the peer in HOME rest, until `p2ptrain resume`.

    It stops after the inner step under way, saves, leaves the swarm and keeps its weights in memory. A peer that is
    started anew meanwhile stays paused.
    """
    _order(home, "pause")


@click.command(short_help="Let a peer that was paused go on.")
@HOME
def resume(home: Path) -> None:
    """Let the peer in HOME join the swarm again and go on training."""
    _order(home, "resume")


@click.command(short_help="Let the peer in a home end its step, save and leave.")
@HOME
def finish(home: Path) -> None:
    """Let the peer in HOME end the outer step under way, save and leave; its process then ends with status 0."""
    _order(home, "finish")


def _order(home: Path, command: str) -> None:
    _check(home)
    answer: dict[str, Any] = ask(home, command=command)
    click.echo(printable(str(answer.get("told", answer.get("error")))))


def _check(home: Path) -> None:
    try:
        is_there = home.is_dir()
    except OSError as error:
        raise HomeError(
            f"The home {home} cannot be used: {error.strerror}.",
            "Name the directory that the peer lives in, and give this command as the user who started it.",
        ) from None
    if not is_there:
        raise HomeError(f"No peer lives in {home} yet.", "Name the directory that the peer lives in, as --home did.")
