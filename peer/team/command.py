"""Command of a computer that trains for the peer of another one. Heavy modules are imported only when it runs."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import closing
from pathlib import Path

import click

from p2ptrain.base import files
from p2ptrain.base.device_names import DEVICE_NAME, DEVICE_WORDS
from p2ptrain.base.errors import DeviceError, HomeError, UserError
from p2ptrain.base.imports import command_imports
from p2ptrain.base.text import UserPath
from peer.options import FILE

KEY_VARIABLE = "P2PTRAIN_TEAM_KEY"


@click.command(short_help="Lend this computer to a peer on the same private network.")
@click.option("--leader", required=True, help="Where the peer listens, as it prints.", metavar="HOST[:PORT]")
@click.option("--key-file", type=FILE, help="Copy of the leader's team.key.", metavar="FILE")
@click.option(
    "--key", envvar=KEY_VARIABLE, help="The team's key; others on this computer may see it here.", metavar="KEY"
)
@click.option(
    "--home", type=click.Path(file_okay=False, path_type=UserPath), help="Home of this rank. [~/.p2ptrain/rank]"
)
@click.option("--device", default="auto", show_default=True, help=f"{DEVICE_WORDS}.")
@click.option("--data", type=FILE, help="The corpus, if the run names it by digest.", metavar="FILE")
@click.option("--tokenizer", type=FILE, help="The tokenizer.json, if the run names it by digest.", metavar="FILE")
@click.option("--template", type=FILE, help="The chat template, if the run names it by digest.", metavar="FILE")
def rank(
    leader: str,
    key_file: Path | None,
    key: str | None,
    home: Path | None,
    device: str,
    data: Path | None,
    tokenizer: Path | None,
    template: Path | None,
) -> None:
    """Train as a part of the peer at --leader, which runs with --team and --at, until its run ends.

    Without --key-file, --key and P2PTRAIN_TEAM_KEY, the key is asked for. The command waits for the leader and returns
    to it after an interruption. It keeps its part of the checkpoints in --home. Ctrl+C ends it.
    """
    from p2ptrain.base.telemetry import EventLog, lossy_output
    from peer.home import Home, check_no_other
    from peer.screen import Screen

    if DEVICE_NAME.fullmatch(device) is None:
        raise DeviceError(f"There is no device {device!r}.", f"Name one as follows: {DEVICE_WORDS}.")
    secret = _key(key, key_file)
    place = Home(home if home is not None else files.user_home() / ".p2ptrain" / "rank")
    check_no_other(place.path)
    if place.identity.exists():
        raise HomeError(f"{place.path} is the home of a peer.", "Name another folder with --home.")
    with command_imports():
        from p2ptrain.team.lan_address import LanAddress
        from peer.team.devices import choose_devices
        from peer.team.lan_rank import RankOptions, run_rank

    choose_devices(device)  # the leader's peer would end with the error
    options = RankOptions(LanAddress.parse(leader), secret, place.path, device, data, tokenizer, template)
    stop = threading.Event()
    with place.locked(), lossy_output(), closing(EventLog(place.events)) as log, Screen() as screen:
        log.listen(screen.show)
        before = {each: signal.signal(each, lambda *_: stop.set()) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            run_rank(options, log, stop)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _key(key: str | None, file: Path | None) -> bytes:
    """Return the team's key from where the owner gave it. Raises UserError."""
    remedy = "Copy the leader's team.key, which has 64 digits and letters, exactly."
    if file is not None:
        try:
            key = file.read_text(encoding="ascii")
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read as a key: {error}.", remedy) from error
    if not key:
        if not sys.stdin.isatty():
            raise UserError("The team's key is missing.", f"Give it with --key-file or in {KEY_VARIABLE}.")
        key = click.prompt("Key of the team", hide_input=True)
    try:
        found = bytes.fromhex(key.strip())
    except ValueError:
        found = b""
    if len(found) != 32:
        raise UserError("The team's key is not complete.", remedy)
    return found
