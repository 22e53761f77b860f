"""``p2ptrain status``, ``pause``, ``resume``, ``finish``: commands to the peer that runs in HOME."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError
from p2ptrain.base.text import command_line, printable
from peer.home import Home, check_no_other
from peer.options import HOME
from peer.owner import status as reports
from peer.owner.control_socket import NotRunningError, ask
from peer.owner.pause import span_s


@click.command(short_help="Show what the peer in a home is doing.")
@HOME
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(home: Path, as_json: bool) -> None:
    """Show what the peer in HOME is doing: progress, loss, exchanges, rates, this month's traffic.

    If no peer runs there or it does not answer, shows what is on disk and exits with status 2, or 0 if it has finished.
    """
    _check(home)
    check_no_other(home)
    fault: HomeError | None = None
    try:
        found = ask(home, command="status")["status"]
    except HomeError as error:
        fault, found = error, reports.last_known(Home(home), is_running=not isinstance(error, NotRunningError))
    click.echo(json.dumps(found, indent=1) if as_json else reports.screen(found))
    if fault is not None and found["state"] != reports.FINISHED:
        raise fault


@click.command(short_help="Pause the peer in a home.")
@HOME
@click.option("--for", "duration", metavar="TIME", help="Resume after this time: 30m, 2h, 1d.")
def pause(home: Path, duration: str | None) -> None:
    """Pause the peer in HOME until `p2ptrain resume`, or for the given time.

    The peer finishes the current inner step, saves, leaves the swarm and keeps its weights in memory. It stays paused
    if it is restarted.
    """
    _order(home, "pause", in_s=span_s(duration))


@click.command(short_help="Resume a paused peer.")
@HOME
def resume(home: Path) -> None:
    """Resume the peer in HOME: it rejoins the swarm and continues training."""
    _order(home, "resume")


@click.command(short_help="Make the peer in a home finish its step, save and leave.")
@HOME
def finish(home: Path) -> None:
    """Stop the peer in HOME after its current outer step: it saves, leaves the swarm and exits with status 0."""
    training = _order(home, "finish").get("status", {}).get("training")
    if training is None or not training["step"]:
        return
    loss = f"training loss {training['loss']:.3f}; " if training["loss"] is not None else ""
    click.echo(f"{loss}once it has ended, the held-out loss: {command_line('p2ptrain', 'status', home.absolute())}")
    click.echo(f"to use the model with transformers: {Home(home).export_command}")


def _order(home: Path, command: str, **details: Any) -> dict[str, Any]:
    _check(home)
    try:
        answer: dict[str, Any] = ask(home, command=command, **details)
    except NotRunningError:
        if reports.last_known(Home(home), is_running=False)["state"] != reports.FINISHED:
            raise
        raise HomeError(
            f"The peer in {home} has finished its run.", f"Show how: {command_line('p2ptrain', 'status', home)}"
        ) from None
    click.echo(printable(str(answer.get("told", answer.get("error")))))
    return answer


def _check(home: Path) -> None:
    try:
        is_there = files.is_dir(home)
    except OSError as error:
        raise HomeError(
            f"The home {home} cannot be used: {error.strerror}.",
            "Name the peer's home directory, and run this command as the user who started the peer.",
        ) from None
    if not is_there:
        raise HomeError(f"There is no peer in {home} yet.", "Name the peer's home directory, as with --home.")
