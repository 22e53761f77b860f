"""``p2ptrain identity HOME``: show a home's peer id, or give the home a new one that keeps its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import click

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError
from p2ptrain.base.text import command_line
from p2ptrain.net.identity import Identity
from peer.admission_client import CERTIFICATE_FILE
from peer.home import Home, check_no_other
from peer.options import HOME


@click.command(short_help="Show a peer's id, or give a copied home its own.")
@HOME
@click.option("--new", is_flag=True, help="Replace it, and keep the checkpoint.")
def identity(home: Path, new: bool) -> None:
    """Show the peer id of HOME.

    With --new, give HOME a new one, if it is a copy of another peer's: two processes cannot take part under one id.
    What belongs to the old id, its key, receipts and certificate, moves to a folder in HOME.
    """
    check_no_other(home)
    place = Home(home)
    if place.load_manifest(None) is None:
        raise HomeError(f"There is no peer in {home} yet.", "Name the home of a peer, as with --home.")
    if not new:
        click.echo(Identity.load_or_create(place.identity).peer_id)
        return
    with place.locked():
        old, folder = _set_apart(place)
        made = Identity.load_or_create(place.identity)
    click.echo(f"{home} is now {made.peer_id}, before {old}; what belongs to that one is in {folder}")
    click.echo(f"Start it: {command_line('p2ptrain', 'peer', '--home', home.absolute())}")
    if (folder / CERTIFICATE_FILE).exists():
        click.echo("The run admits peers by invite or by name: the new id needs an invite or its author's admission.")


def _set_apart(home: Home) -> tuple[str, Path]:
    """Move what belongs to the home's identity into a folder, and return its peer id and the folder."""
    old = Identity.load_or_create(home.identity).peer_id
    folder = home.path / f"before-{old[-6:]}"
    tokens = _tokens(home)
    kept = [home.path / CERTIFICATE_FILE, home.contributions]
    try:
        folder.mkdir(exist_ok=True)
        for each in [*kept, home.identity]:  # the key last: what fails before leaves the peer as it was
            if files.exists(each):
                each.replace(folder / each.name)
    except OSError as error:
        raise HomeError(f"{folder} cannot be written: {error.strerror}.", files.remedy(error, "")) from error
    home.save_foreign_tokens(tokens)
    return old, folder


def _tokens(home: Home) -> int:
    """Return the tokens in the newest readable checkpoint, which the old identity has trained."""
    for path in sorted(home.checkpoints.glob("step-*/state.json"), key=lambda path: path.parent.name, reverse=True):
        try:
            return int(json.loads(path.read_text(encoding="utf-8"))["tokens"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return 0
