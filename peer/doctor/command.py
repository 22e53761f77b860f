"""``p2ptrain doctor``: options in, findings out, exit status."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from p2ptrain.base.device_names import DEVICE_WORDS
from p2ptrain.base.errors import P2pTrainError, UserError
from p2ptrain.base.ids import RunId
from p2ptrain.base.text import UserPath
from p2ptrain.manifest import JoinLink, Manifest
from p2ptrain.net.start_options import OptionsFile
from p2ptrain.tokens.opened import user_store
from peer.doctor import findings as show
from peer.doctor import machine
from peer.doctor.findings import Finding, FindingState, bad, note, skipped
from peer.home import Home, default_home
from peer.options import LINK
from peer.owner.settings import SettingsFile
from peer.start_options import StartOptions

DEFAULT_PORT = 31337
"""Default port, equal to the bootstrap's: one forwarded port serves both."""
NETWORK_CHECKS = ("link", "clock", "router", "reach")
REPORT = "If that does not help, please report it with this message."


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@click.command(short_help="Diagnose this machine and its network.")
@LINK
@click.option(
    "--home", type=click.Path(file_okay=False, path_type=UserPath), help="Home of the peer; need not exist yet."
)
@click.option("--device", help=f"{DEVICE_WORDS}. [as the peer of --home; auto]")
@click.option("--devices", help="Several devices of one peer, as cuda:0,cuda:1, or all cards: all.", metavar="DEVICE,…")
@click.option("--stages", type=click.IntRange(1, 64), help="Of several devices: cut the model into so many parts.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port that the peer will listen on. [the last one, else 31337]"
)
@click.option("--local", is_flag=True, help="Use loopback only: the whole swarm is on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_unheard()
def doctor(
    link: str | None,
    home: Path | None,
    device: str | None,
    devices: str | None,
    stages: int | None,
    port: int | None,
    local: bool,
    as_json: bool,
) -> int:
    """Check this machine, and with a join LINK its network; say how to fix each problem.

    Exits with status 0 if all is well, 1 if something must be fixed.
    """
    parsed = _link(link, home)
    place = Home(home or default_home(parsed.run_id if parsed else RunId("")))
    settings = SettingsFile(place.path).load(create=False)
    saved = OptionsFile(place.path, StartOptions).load()
    stages = stages or (None if devices or device else saved.stages)
    device = devices or device or saved.device or "auto"
    found = [_checked("device", lambda: machine.device(device))]
    finding, listens_at = _port(place, port, local)
    found.append(finding)
    manifest: Manifest | None = None
    if parsed is None:
        found += [skipped(check, "needs other nodes: give a join LINK") for check in NETWORK_CHECKS]
    else:
        with _errors_as_findings("network", found):
            from peer.doctor.network import examine

            examined = examine(parsed, listens_at, local)
            found += examined.findings
            manifest = None if examined.signed is None else examined.signed.manifest
    found.append(_checked("memory", lambda: machine.memory(manifest, device, settings.memory_bytes, stages)))
    found.append(_speed(manifest, device, settings.memory_bytes, settings.threads, found))
    found.append(_checked("disk", lambda: machine.disk(place.path, user_store(), manifest)))
    click.echo(json.dumps(show.document(found), indent=1) if as_json else "\n".join(show.lines(found)))
    return int(any(each.state is FindingState.BAD for each in found))


def _speed(manifest: Manifest | None, device: str, memory_bytes: float, threads: int, others: list[Finding]) -> Finding:
    """Time the run's model, if there is one and it fits."""
    if manifest is None:
        return skipped("speed", "needs the run's manifest: give a join LINK that answers")
    if "," in device or device == "all":
        return skipped("speed", "a peer on several devices measures each at its start")
    if any(each.check in ("device", "memory") and each.state is FindingState.BAD for each in others):
        return skipped("speed", "needs a device that the model fits")

    def check() -> Finding:
        from peer.doctor.speed import check_speed

        return check_speed(manifest, device, memory_bytes, threads)

    return _checked("speed", check)


def _link(text: str | None, home: Path | None) -> JoinLink | None:
    """Return the link that was given, else the one by which the peer of the home joined."""
    if text is not None:
        return JoinLink.parse(text)
    if home is None or (signed := Home(home).load_manifest(None)) is None:
        return None
    joined_by = Home(home).load_addresses().joined_by
    return JoinLink(signed.run_id, joined_by) if joined_by else None


def _port(home: Home, named: int | None, local: bool) -> tuple[Finding, int | None]:
    """Check that the peer's port is free; return the port for the network checks, too (0: any, None: none).

    A port that the owner names must be free; otherwise a peer takes another one. The port is not checked while a peer
    runs in the home, which uses it.
    """
    if named is None and home.is_inhabited():
        words = f"a peer runs in {home.path} and uses its port; its terminal says whether others can dial it"
        return note("port", words), None
    wanted = named or home.load_addresses().port or DEFAULT_PORT
    found = machine.port("127.0.0.1" if local else "0.0.0.0", wanted, is_named=named is not None)
    return found, wanted if found.state is FindingState.OK else None if named else 0


def _checked(check: str, run: Callable[[], Finding]) -> Finding:
    """Return the finding of a check, or what it raised as one."""
    found: list[Finding] = []
    with _errors_as_findings(check, found):
        found.append(run())
    return found[0]


@contextlib.contextmanager
def _errors_as_findings(check: str, found: list[Finding]) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        found.append(bad(check, error.problem, error.remedy))
    except P2pTrainError as error:
        found.append(bad(check, str(error), f"Try again. {REPORT}"))
    except Exception as error:  # a broken installation, which this command must explain, may raise anything
        words = f"{type(error).__name__}: {error}"
        found.append(bad(check, words, f"Reinstall p2ptrain with pip in a new environment. {REPORT}"))
