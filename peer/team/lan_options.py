"""Options of a team on several computers, and its key in the leader's home."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence

import torch

from p2ptrain.base import files
from p2ptrain.base.errors import DeviceError, HomeError
from p2ptrain.checkpoint import checkpoints_in, explained, part_of
from p2ptrain.manifest import SignedManifest
from p2ptrain.ports import Notebook
from p2ptrain.team.handshake import KEY_BYTES
from p2ptrain.team.lan_address import LanAddress, interface_of
from peer.home import Home
from peer.team.lan_leader import LanListener

KEY_FILE = "team.key"


def team_key(home: Home) -> bytes:
    """Return the key of a home's team, made at its first use and readable by its owner alone. Raises HomeError."""
    path = home.path / KEY_FILE
    try:
        if not path.exists():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(KEY_BYTES) + "\n")
        return parse_key(path.read_text())
    except OSError as error:
        raise HomeError(
            f"{path} cannot be used: {error.strerror}.", files.remedy(error, "use another --home")
        ) from error
    except ValueError:
        raise HomeError(f"{path} is damaged.", "Delete it; the peer makes a new key.") from None


def check_no_rank(home: Home) -> None:
    """Raise HomeError if ``p2ptrain rank`` keeps its part of a team's model in this home, where a peer's files would
    keep it from starting again.
    """
    with explained(lambda: home.checkpoints):
        records = [part_of(each) for each in checkpoints_in(home.checkpoints).values()]
    if any(record is not None and record["begin"] > 0 for record in records):
        raise HomeError(
            f"{home.path} is the home of p2ptrain rank, with its part of a team's model.",
            "Use another --home, or p2ptrain rank to join the team again.",
        )


def parse_key(text: str) -> bytes:
    """Return the key that people copied. Raises ValueError."""
    key = bytes.fromhex(text.strip())
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes instead of {KEY_BYTES}")
    return key


def other_ranks(team: int | None, at: str | None, devices: Sequence[torch.device]) -> range:
    """Return the numbers of the ranks on other computers. Raises UserError if the options are wrong."""
    if team is None and at is None:
        return range(0)
    if team is None or at is None:
        raise DeviceError(
            "--team and --at belong together: how many devices, and where other computers reach this one.",
            "Give both, as --team 2 --at 192.168.1.5, or neither.",
        )
    if team <= len(devices):
        raise DeviceError(
            f"--team {team} leaves no place for another computer, since this one has {len(devices)} devices.",
            f"Give --team {len(devices) + 1} for one more, or omit --team and --at.",
        )
    interface_of(LanAddress.parse(at).host)
    return range(len(devices), team)


def listener_for(
    at: str | None,
    ranks: range,
    home: Home,
    signed: SignedManifest,
    notebook: Notebook,
    is_stopping: Callable[[], bool],
    show: Callable[[str], None],
) -> LanListener | None:
    """Return the listener of a team on several computers; None: all ranks are on this one. Raises UserError.

    Args:
        show: shows the owner a line with the key, which no log may hold, when it is made.
    """
    if at is None or not ranks:
        return None
    address, is_new = LanAddress.parse(at), not (home.path / KEY_FILE).exists()
    key = team_key(home)
    listener = LanListener(address, key, home.path / KEY_FILE, signed, ranks, notebook, is_stopping)
    if is_new:
        show(f"key of this team, for p2ptrain rank on the other computers: {key.hex()}")
    return listener
