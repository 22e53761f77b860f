"""A peer's home directory.

::

    HOME/lock                held while a process uses the home
    HOME/identity.key        the peer's Ed25519 key; its public half is the peer's name
    HOME/manifest.signed     the run's signed manifest
    HOME/addresses.json      how others reach this peer, and the addresses it joined by
    HOME/peers.json          last known live peers, to rejoin without any bootstrap
    HOME/events.jsonl        the event log, one JSON line per note
    HOME/checkpoints/        the last two checkpoints
    HOME/trained/            the weights when training ended, before the final gossip
    HOME/summary.json        the figures of the run (peer.session_recorder)
    HOME/settings.toml       what the owner allows (peer.owner.settings)
    HOME/files/              files that the run names by digest (p2ptrain.data.file_store)
    HOME/start.json          options of earlier starts (peer.start_options)
    HOME/traffic.json        bytes sent and received by month (peer.owner.traffic)
    HOME/paused.json         exists while the owner has paused the peer (peer.owner.pause)
    HOME/contributions.jsonl receipts signed by partners (peer.ledger)
    HOME/page.json           contributions and texts that the page shows (p2ptrain.page.memory)
    HOME/foreign-tokens      tokens that an earlier identity trained (peer.identity_command)
    HOME/badge               membership certificate of a run by invite (peer.admission_client)
    HOME/rulings.signed      the author's newest access list (peer.admission_client)
    HOME/control.sock        control socket, while the peer runs (peer.owner.control_socket)
"""

from __future__ import annotations

import errno
import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from p2ptrain.admission.author import LINK_FILE
from p2ptrain.base import files
from p2ptrain.base.errors import HomeError, ManifestError
from p2ptrain.base.ids import RunId
from p2ptrain.base.text import command_line
from p2ptrain.data.file_store import FILES_FOLDER, FileStore
from p2ptrain.manifest import KEY_FILE, SETTINGS_FILE, SIGNED_FILE, JoinLink, SignedManifest, genuine_run

FOREIGN_TOKENS_FILE = "foreign-tokens"


def is_a_run(path: Path) -> bool:
    """Return whether ``path`` is a run directory, with the author's key or without it. Raises OSError.

    A peer's home with the link of a bootstrap that was started in it is not a run directory.
    """
    has_link = files.exists(path / LINK_FILE) and not files.exists(path / SETTINGS_FILE)
    return has_link or files.exists(path / KEY_FILE)


def check_no_other(path: Path) -> None:
    """Raise HomeError if ``path`` belongs to a run or a bootstrap, whose files a peer's would mix with."""
    try:
        run = is_a_run(path)
        is_a_bootstraps = files.exists(path / LINK_FILE.name) and not files.exists(path / SIGNED_FILE)
    except OSError:  # the code that uses the directory reports it
        return
    if run or is_a_bootstraps:
        what = "the directory of a run" if run else "the home of a bootstrap"
        raise HomeError(
            f"{path} is {what}, not of a peer.", "Name the home of a peer; p2ptrain peer --home creates a new one."
        )


class Home:
    """Paths of a home, and access to its small files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity = path / "identity.key"
        self.manifest = path / "manifest.signed"
        self.events = path / "events.jsonl"
        self.peers = path / "peers.json"
        self.checkpoints = path / "checkpoints"
        self.trained = path / "trained"
        self.summary = path / "summary.json"
        self.contributions = path / "contributions.jsonl"
        self.files = FileStore(path / FILES_FOLDER)

    @property
    def export_command(self) -> str:
        """Command with which the owner gets the model."""
        place = self.path.absolute()
        return command_line("p2ptrain", "export", place, f"model-of-{place.name}")

    def locked(self) -> AbstractContextManager[None]:
        """Create the home if necessary and lock it. Raises HomeError if that fails or another process holds it."""
        return files.locked(self.path)

    def is_inhabited(self) -> bool:
        """Return whether a process holds the home. Creates nothing. Raises HomeError if the home is not readable."""
        try:
            if not files.exists(self.path / "lock"):
                return False
        except OSError as error:
            raise files.unusable(self.path, error) from error
        lock = FileLock(self.path / "lock")
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError) as error:
            return not (isinstance(error, OSError) and error.errno == errno.EROFS)  # no peer can write its home
        lock.release()
        return False

    def load_manifest(self, expected: RunId | None) -> SignedManifest | None:
        """Return the run that this home belongs to, None for a new home. Raises HomeError if it is not ``expected``."""
        try:
            raw = self.manifest.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise HomeError(f"{self.manifest} cannot be read: {error.strerror}.", files.remedy(error, "")) from error
        try:
            signed = SignedManifest.from_bytes(raw)
        except ManifestError as error:
            is_damaged = genuine_run(raw) is None
            remedy = "Move it away and join again by the run's link." if is_damaged else error.remedy
            raise HomeError(f"{self.manifest} cannot be used. {error.problem}", remedy) from error
        if expected is not None and signed.run_id != expected:
            raise HomeError(
                f"{self.path} belongs to run {signed.run_id[:12]}…, but the link is to run {expected[:12]}….",
                "Use a separate home for each run, with --home.",
            )
        return signed

    def save_manifest(self, signed: SignedManifest) -> None:
        self.write(self.manifest, signed.to_bytes())

    def check_trained(self) -> None:
        """Raise HomeError unless a peer has saved here. Looks into no checkpoint."""
        try:
            is_saved = files.is_dir(self.checkpoints) and any(self.checkpoints.iterdir())
        except OSError as error:
            raise files.unusable(self.path, error) from error
        if not is_saved:
            check_no_other(self.path)
            raise self.untrained()

    def untrained(self) -> HomeError:
        """Return the error of a home without a checkpoint."""
        if not self.path.is_dir():
            return HomeError(f"There is no directory {self.path}.", "Name the home of a peer that has trained.")
        return HomeError(
            f"There is no checkpoint in {self.path}.",
            "Name the home of a peer that has trained; a running peer saves every two minutes (a large model less "
            "often) and when it stops.",
        )

    def load_addresses(self) -> Addresses:
        """Return the saved addresses; empty if there are none or the file is damaged."""
        try:
            entry = json.loads((self.path / "addresses.json").read_text())
            own, joined_by = (tuple(map(str, entry[name])) for name in ("own", "joined_by"))
            return Addresses(own, joined_by, int(entry.get("port", 0)), entry.get("unreachable") is True)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return Addresses((), ())

    def save_addresses(self, addresses: Addresses, lasting: bool = True) -> None:
        """Write addresses.json. ``lasting`` waits for the disk: not on the event loop. Raises HomeError."""
        document = {"own": addresses.own, "joined_by": addresses.joined_by, "port": addresses.port}
        document["unreachable"] = addresses.unreachable
        self.write(self.path / "addresses.json", json.dumps(document, indent=1).encode(), lasting)

    def foreign_tokens(self) -> int:
        """Return the tokens of the checkpoint that another identity trained (``p2ptrain identity --new``)."""
        try:
            return max(int((self.path / FOREIGN_TOKENS_FILE).read_text()), 0)
        except (OSError, ValueError):
            return 0

    def save_foreign_tokens(self, tokens: int) -> None:
        """Keep ``foreign_tokens``. Raises HomeError."""
        self.write(self.path / FOREIGN_TOKENS_FILE, f"{tokens}\n".encode())

    def save_summary(self, summary: dict[str, Any]) -> None:
        self.write(self.summary, json.dumps(summary, indent=1).encode() + b"\n")

    def write(self, path: Path, data: bytes, lasting: bool = True) -> None:
        """Replace a file atomically. Raises HomeError if it cannot be written."""
        try:
            files.replace(path, data, lasting=lasting)
        except OSError as error:
            raise HomeError(f"{path} cannot be written: {error.strerror}.", files.remedy(error, "")) from error


@dataclass(frozen=True, slots=True)
class Addresses:
    """A peer's own multiaddresses and those it joined by, each with ``/p2p/``."""

    own: tuple[str, ...]
    joined_by: tuple[str, ...]
    port: int = 0
    """Port of the last session, 0 if there was none; kept so that a forwarded port stays right."""
    unreachable: bool = False
    """Whether nobody could dial the peer; p2pd then punches holes from its start."""

    def link_addresses(self, most: int = 16) -> tuple[str, ...]:
        """Return at most ``most`` addresses for a join link: this peer's own, then those it joined by."""
        return tuple(dict.fromkeys([*self.own, *self.joined_by]))[:most]


def home_for(link: JoinLink | None, path: Path | None) -> Home:
    """Return the home of the peer that a command names by a link, a path or both. Raises HomeError if there is none."""
    if path is not None:
        home = Home(path)
    elif link is not None:
        home = Home(default_home(link.run_id))
    else:
        raise HomeError("Neither a join link nor a home is given.", "Give the link, or the home of a peer with --home.")
    check_no_other(home.path)
    if link is None and home.load_manifest(None) is None:
        raise HomeError(f"There is no peer in {home.path} yet.", "Give a join link.")
    return home


def default_home(run: RunId) -> Path:
    """Return the home of a peer that names none. Raises HomeError if the user has no home directory."""
    return files.user_home() / ".p2ptrain" / run[:12]
