"""``p2ptrain doctor``: options in, findings out, exit status."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from p2ptrain.base.device_names import DEVICE_WORDS
from p2ptrain.base.errors import P2pTrainError, UserError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.base.text import UserPath
from p2ptrain.manifest import JoinLink, Manifest
from p2ptrain.net.start_options import OptionsFile
from p2ptrain.tokens.opened import user_store
from peer.doctor import findings as show
from peer.doctor import machine
from peer.doctor.findings import Finding, bad, note, skipped
from peer.home import Home, default_home
from peer.options import AT, LINK, TEAM, WEIGHTS
from peer.owner.settings import Settings, SettingsFile, compile_mode
from peer.start_options import StartOptions

DEFAULT_PORT = 31337
"""Default port, equal to the bootstrap's: one forwarded port serves both."""
MATERIAL_CHECKS = ("run", "data", "tokenizer")
NETWORK_CHECKS = ("link", "admission", "clock", "router", "path", "reach", "rates")
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
@TEAM
@AT
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port that the peer will listen on. [the last one, else 31337]"
)
@click.option("--local", is_flag=True, help="Use loopback only: the whole swarm is on this machine.")
@WEIGHTS
@click.option("--mirror", help="Where you have the run's text: a folder, https://… or hf:OWNER/NAME.", metavar="WHERE")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_unheard()
def doctor(
    link: str | None,
    home: Path | None,
    device: str | None,
    devices: str | None,
    stages: int | None,
    team: int | None,
    at: str | None,
    port: int | None,
    local: bool,
    weights: Path | None,
    mirror: str | None,
    as_json: bool,
) -> int:
    """Check this machine, and with a join LINK its network; say how to fix each problem.

    Exits with status 0 if all is well, 1 if something must be fixed.
    """
    found: list[Finding] = []
    parsed: JoinLink | None = None
    manifest: Manifest | None = None
    listens_at: int | None = None
    holders: Mapping[str, PeerId | None] = {}
    text: Finding | None = None
    with _errors_as_findings("link", found):
        parsed = _link(link, home)
    with _errors_as_findings("versions", found):
        found += machine.versions()
    with _errors_as_findings("udp", found):
        found += machine.udp()
    with _errors_as_findings("container", found):
        found += machine.container()
    with _errors_as_findings("proxy", found):
        found += machine.proxies(os.environ)
    place = home or default_home(parsed.run_id if parsed else RunId(""))
    settings = Settings()
    with _errors_as_findings("settings", found):
        settings = SettingsFile(place).load(create=False)
    saved = StartOptions()
    with _errors_as_findings("settings", found):
        saved = OptionsFile(place, StartOptions).load()
    stages = stages or (None if devices or device else saved.stages)
    device = devices or device or saved.device or "auto"
    with _errors_as_findings("device", found):
        found += machine.device(device)
    with _errors_as_findings("compiler", found):
        found += machine.compiler(device, compile_mode(settings.compile, os.environ), os.environ)
    others = 0
    if team or at:
        with _errors_as_findings("team", found):
            others = machine.other_ranks(team, at, device)
            found += machine.team(at)
    with _errors_as_findings("port", found):
        findings, listens_at = _port(Home(place), port, local)
        found += findings
    if parsed is None:
        left = [check for check in NETWORK_CHECKS if check not in {each.check for each in found}]
        found += [skipped(check, "needs other nodes: give a join LINK") for check in left]
    else:
        with _errors_as_findings("network", found):
            from peer.doctor.network import examine

            examined = examine(parsed, Home(place), listens_at, local, mirror)
            found += examined.findings
            manifest = None if examined.signed is None else examined.signed.manifest
            holders, text = examined.holders, examined.text
    found += _material(manifest, Home(place), weights, holders, text)
    with _errors_as_findings("memory", found):
        found += machine.memory(manifest, device, settings.memory_bytes, stages, others)
    found += _speed(manifest, device, settings, found)
    with _errors_as_findings("disk", found):
        found += machine.disk(place, manifest)
    with _errors_as_findings("cache", found):
        found += machine.cache(user_store(), place, manifest)
    if as_json:
        click.echo(json.dumps(show.document(found), indent=1))
    else:
        click.echo("\n".join(show.lines(found)))
    return show.exit_status(found)


def _material(
    manifest: Manifest | None,
    home: Home,
    weights: Path | None,
    holders: Mapping[str, PeerId | None],  # nodes that send files of the run
    text: Finding | None,  # whether others send its text
) -> list[Finding]:
    """Check what the run reads; needs its manifest, which a node of the link hands out."""
    if manifest is None:
        return [skipped(check, "needs the run's manifest: give a join LINK that answers") for check in MATERIAL_CHECKS]
    found: list[Finding] = []
    with _errors_as_findings("run", found):
        from peer.doctor.material import check_run

        found.append(check_run(manifest))
    with _errors_as_findings("data", found):
        from peer.doctor.material import check_data

        found.append(check_data(manifest, home, text))
    with _errors_as_findings("tokenizer", found):
        from peer.doctor.material import check_tokenizer

        found.append(check_tokenizer(manifest, home, holders))
    with _errors_as_findings("weights", found):
        from peer.doctor.material import check_weights

        found += check_weights(manifest, home, weights, holders)
    return found


def _speed(manifest: Manifest | None, device: str, settings: Settings, others: Sequence[Finding]) -> list[Finding]:
    """Time the run's model, if there is one and it fits."""
    if manifest is None:
        return [skipped("speed", "needs the run's manifest: give a join LINK that answers")]
    if "," in device or device == "all":
        return [skipped("speed", "a peer on several devices measures each at its start")]
    if any(each.check in ("device", "memory") and each.state is show.FindingState.BAD for each in others):
        return [skipped("speed", "needs a device that the model fits")]
    found: list[Finding] = []
    with _errors_as_findings("speed", found):
        from peer.doctor.speed import check_speed

        found.append(check_speed(manifest, device, settings.memory_bytes, settings.threads))
    return found


def _link(text: str | None, home: Path | None) -> JoinLink | None:
    """Return the link that was given, else the one by which the peer of the home joined."""
    if text is not None:
        return JoinLink.parse(text)
    if home is None or (signed := Home(home).load_manifest(None)) is None:
        return None
    joined_by = Home(home).load_addresses().joined_by
    return JoinLink(signed.run_id, joined_by) if joined_by else None


def _port(home: Home, named: int | None, local: bool) -> tuple[list[Finding], int | None]:
    """Check that the peer's port is free; return findings and the port for the network checks (0: any, None: none).

    A port that the owner names must be free; otherwise a peer takes another one. The port is not checked while a peer
    runs in the home, which uses it.
    """
    if named is None and home.is_inhabited():
        words = f"a peer runs in {home.path} and uses its port; its terminal says whether others can dial it"
        return [note("port", words)], None
    wanted = named or home.load_addresses().port or DEFAULT_PORT
    found = machine.port("127.0.0.1" if local else "0.0.0.0", wanted, is_named=named is not None)
    is_free = all(each.state is show.FindingState.OK for each in found)
    return found, wanted if is_free else None if named else 0


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
