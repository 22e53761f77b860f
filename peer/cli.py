"""Commands that concern one peer. Heavy modules are imported only when a command runs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from p2ptrain.base import files
from p2ptrain.base.device_names import DEVICE_WORDS
from p2ptrain.base.errors import AdmissionError, HomeError, UserError
from p2ptrain.base.imports import command_imports
from p2ptrain.base.text import UserPath
from p2ptrain.manifest import JoinLink
from peer.options import AT, FILE, HOME, LINK, MIN_TEXT_GB, TEAM, WEIGHTS, FiniteRange, Utf8

if TYPE_CHECKING:
    from p2ptrain.admission import AccessList
    from p2ptrain.manifest import SignedManifest


OF_A_TRAINER = ("device", "stages", "team", "at")
"""Options of a peer that trains."""


@click.command(short_help="Join a run by its link and train.")
@LINK
@click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=UserPath),
    help="Home directory of this peer. [~/.p2ptrain/RUN]",
)
@click.option("--device", help=f"{DEVICE_WORDS}. [auto]")
@click.option("--devices", help="Train on several, as cuda:0,cuda:1, or on all cards: all.", metavar="DEVICE,…")
@click.option("--stages", type=click.IntRange(1, 64), help="Of several devices: cut the model into so many parts.")
@TEAM
@AT
@click.option(
    "--keep", help="Do not train: hold these fragments of the model for others, as 0-3, or all.", metavar="FRAGMENTS"
)
@WEIGHTS
@click.option("--mirror", help="Where you have the run's text: a folder, https://… or hf:OWNER/NAME.", metavar="WHERE")
@click.option(
    "--text-gb", type=FiniteRange(MIN_TEXT_GB, 1e6), help="Disk cap of the text of all your runs. [8]", metavar="GB"
)
@click.option("--listen", multiple=True, help="Listen on this address instead of any free port.", metavar="MULTIADDR")
@click.option(
    "--announce", multiple=True, help="Announce this address to others, for a forwarded port.", metavar="MULTIADDR"
)
@click.option("--nickname", help="Shown to people; at most 32 characters.")
@click.option("--local/--no-local", default=None, help="Use loopback only: the whole swarm is on this machine.")
@click.option("--relay/--no-relay", default=None, help="Relay for peers that nobody can dial, within limits.")
@click.option("--page", metavar="[HOST:]PORT", help="Serve a page about this peer at this port of this computer.")
@click.option("--page-token", envvar="P2PTRAIN_PAGE_TOKEN", help="Token that the page requires outside loopback.")
@click.option(
    "--page-hosts", envvar="P2PTRAIN_PAGE_HOSTS", metavar="NAME,…", help="Host names by which the page may be opened."
)
@click.option("--share/--no-share", default=None, help="Let bootstraps show this peer's figures.")
@click.option("--track", metavar="tensorboard:DIR", help="Write figures for TensorBoard.")
@click.option("-v", "--verbose", is_flag=True, help="Print every exchange, not only news.")
@click.option("--forget", is_flag=True, help="Use only the options of this start, none that the home remembers.")
def peer(link: str | None, home: Path | None, devices: str | None, verbose: bool, forget: bool, **given: Any) -> None:
    """Join the run that LINK names and train until it ends.

    Without LINK, continue the run of --home. Ctrl+C saves and leaves the swarm; the next start resumes from there. The
    home remembers the options: `p2ptrain peer --home HOME` starts the peer with them again.
    """
    from p2ptrain.net import address
    from peer.home import home_for

    if devices is not None:
        if given["device"] is not None:
            raise click.UsageError("Give either --device or --devices.")
        given["device"] = devices
    if (keep := given["keep"]) is not None and any(given[name] is not None for name in OF_A_TRAINER):
        raise click.UsageError(
            "A peer with --keep does not train: omit --device, --devices, --stages, --team and --at."
        )
    link_given = JoinLink.parse(link) if link is not None else None
    address.check(given["listen"], given["announce"], ())  # before the import of large libraries
    home_for(link_given, home)
    with command_imports():
        from p2ptrain.net.shard_mirror import Mirror
        from p2ptrain.wire import MAX_NICKNAME_CHARS, is_nickname
        from peer.app import run
        from peer.keeper import ALL, parsed
        from peer.start_options import PeerOptions
        from peer.trackers import PREFIX, folder_of

    if (nickname := given["nickname"]) is not None and not is_nickname(nickname):
        raise UserError(
            f"--nickname takes at most {MAX_NICKNAME_CHARS} printable characters.", "Choose another one, or omit it."
        )
    if keep is not None and keep != ALL:
        parsed(keep)  # raises UserError
    if (folder := folder_of(given["track"])) is not None:
        given["track"] = f"{PREFIX}{folder}"  # the same directory at a start elsewhere
    if (mirror := given["mirror"]) is not None:
        if "://" not in mirror and not mirror.startswith("hf:"):
            mirror = given["mirror"] = str(UserPath(mirror).absolute())  # the same one at a start elsewhere
            if not Path(mirror).is_dir():
                raise UserError(f"--mirror {mirror} is not a folder.", "Name one that `p2ptrain publish-tokens` wrote.")
        Mirror(mirror, is_own=True)  # raises UserError before anything is written
    given |= {name: given[name] or None for name in ("listen", "announce")}
    options = PeerOptions(link_given, home, forget, verbose, **given)
    options.page_address  # noqa: B018 -- likewise
    run(options)


@click.command(short_help="Print a join link, or invite peers to your run.")
@click.argument("place", type=click.Path(file_okay=False, path_type=UserPath))
@click.option("--expires", default="7d", show_default=True, help="How long the invite is valid: 30m, 12h, 7d.")
@click.option("--uses", default=1, show_default=True, type=int, help="How many peers the invite admits.")
@click.option(
    "--link",
    metavar="LINK",
    help="Join link of the bootstrap that admits peers. [the one that the bootstrap in PLACE printed]",
)
def invite(place: Path, expires: str, uses: int, link: str | None) -> None:
    """Print a link by which others join.

    PLACE is the home of a peer, whose link works while that peer runs, or the directory of your run. For an open run,
    the link of its bootstrap is printed. For a run by invite, the link admits --uses peers until it expires.
    """
    from peer.home import is_a_run

    has_terms = any(
        click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT
        for name in ("expires", "uses")
    )
    try:
        run = is_a_run(place)
    except OSError as error:
        raise HomeError(f"{place} cannot be read: {error.strerror}.", files.remedy(error, "")) from None
    if run:
        _invite_guests(place, expires, uses, link, has_terms)
    else:
        _print_link(place, has_terms)


def _termless(why: str) -> AdmissionError:
    return AdmissionError(f"{why}: its link does not expire and has no limit of uses.", "Omit --expires and --uses.")


def _print_link(home: Path, has_terms: bool) -> None:
    from p2ptrain.net.address import is_public, relay_of
    from peer.home import Home

    where = Home(home)
    signed = where.load_manifest(None)
    known = where.load_addresses()
    addresses = known.link_addresses()
    if signed is None:
        raise HomeError(f"There is no peer in {home} yet.", "Name the home of a peer that has joined a run.")
    if (
        not addresses and not where.identity.exists()
    ):  # not a peer's home: a run directory without its key, as on a rented server
        raise _run_without_key(home, signed)
    if not addresses:
        raise HomeError(f"{home} contains no address of its peer.", "Start that peer again; it saves its addresses.")
    if has_terms:
        raise _termless(f"{home} is a peer's home, which cannot make invites")
    if not _warn_if_local(addresses) and not any(is_public(each) or relay_of(each) for each in known.own):
        click.echo(
            "Nobody outside your network can dial this peer: the link works only while a bootstrap named in it runs.",
            err=True,
        )
    if signed.manifest.admission.policy != "open":
        click.echo("This link alone admits nobody: the run's author invites or admits peers.", err=True)
    if not where.is_inhabited():
        click.echo(f"No peer is running in {home} now.", err=True)
    click.echo(str(JoinLink(signed.run_id, addresses)))


def _warn_if_local(addresses: Sequence[str]) -> bool:
    from p2ptrain.net.address import is_loopback

    is_local = all(map(is_loopback, addresses))
    if is_local:
        click.echo("This link works on this machine only.", err=True)
    return is_local


def _run_without_key(run: Path, signed: SignedManifest) -> HomeError:
    from p2ptrain.admission.author import ACCESS_LIST_FILE
    from p2ptrain.manifest import KEY_FILE

    match signed.manifest.admission.policy:
        case "open":
            remedy = "Pass on the link that its bootstrap printed; the run is open."
        case "invite":
            remedy = f"Invite on the machine that has {KEY_FILE}: p2ptrain invite RUN --link LINK_OF_THE_BOOTSTRAP"
        case _:
            order = f"p2ptrain admit RUN PEER_ID; then copy RUN/{ACCESS_LIST_FILE} to {run}"
            remedy = f"Admit peers on the machine that has {KEY_FILE}: {order}"
    return HomeError(f"{run} contains a run without its {KEY_FILE}.", remedy)


def _invite_guests(run: Path, expires: str, uses: int, link: str | None, has_terms: bool) -> None:
    from p2ptrain.admission import author
    from p2ptrain.manifest import load_run

    signed = load_run(run)
    is_open = signed.manifest.admission.policy == "open"
    if is_open and has_terms:
        raise _termless(f"The run in {run} is open and needs no invites")
    to = JoinLink.parse(link) if link is not None else author.printed_link(run)
    if is_open:
        author.check_link(run, signed, to)
        click.echo("This run is open: its link admits everybody, for as long as the run lasts.", err=True)
        _warn_if_local(to.addresses)
        click.echo(str(to))
        return
    made, issued = author.invite(run, to, author.seconds(expires), uses, time.time())
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(issued.expires_at))
    _warn_if_local(to.addresses)
    click.echo(f"Invite {issued.id}: admits {uses} peer{'s' if uses != 1 else ''} until {until}.", err=True)
    click.echo(str(made))


RUN = click.argument("run", type=click.Path(file_okay=False, path_type=UserPath))
NAMES = click.argument("names", nargs=-1, metavar="[NAME]...")


@click.command(short_help="Admit peers to your run.")
@RUN
@NAMES
def admit(run: Path, names: tuple[str, ...]) -> None:
    """Admit peers, by peer id, to the run in the directory RUN, and lift their bans.

    Without a NAME, show the access list.
    """
    from p2ptrain.admission import author

    _print_access_list(run, author.admit(run, names, time.time()))


@click.command(short_help="Ban peers from your run, or revoke an invite.")
@RUN
@NAMES
def revoke(run: Path, names: tuple[str, ...]) -> None:
    """Ban peers, by peer id, from the run in the directory RUN, or revoke invites, by their 16 digits.

    Revoking an invite also excludes the peers that joined with it, unless you admit them by peer id.
    """
    from p2ptrain.admission import author

    _print_access_list(run, author.revoke(run, names, time.time()))


def _print_access_list(run: Path, access_list: AccessList) -> None:
    from p2ptrain.admission import author

    for word, names in (
        ("admitted", access_list.admitted),
        ("banned", access_list.banned),
        ("revoked invite", access_list.revoked),
    ):
        for name in names:
            click.echo(f"{word}: {name}")
    if not (access_list.admitted or access_list.banned or access_list.revoked):
        click.echo("The access list is empty.")
    click.echo(f"A bootstrap that runs on {run} publishes this within seconds; peers follow within a minute.")
    if (run / author.ACCESS_LIST_FILE).exists():
        click.echo(f"If your bootstrap runs elsewhere, copy {run / author.ACCESS_LIST_FILE} there.")


@click.command(short_help="Write a peer's model in Hugging Face format.")
@HOME
@click.argument("out", type=click.Path(path_type=UserPath))
def export(home: Path, out: Path) -> None:
    """Write the newest checkpoint in HOME to the directory OUT, for AutoModelForCausalLM.from_pretrained(OUT)."""
    from peer.home import Home
    from peer.screen import ActivityLine

    Home(home).check_trained()  # before the import of large libraries
    files.check_vacant(out)
    with ActivityLine() as line:
        line.tell("loading torch and transformers")
        with command_imports():
            from peer import exporting

        exported = exporting.export(Home(home), out, line.tell)
    if exported.held_out_loss is None:
        click.echo(f"held-out loss not measured: {exported.why_not}")
    else:
        loss = exported.held_out_loss
        click.echo(f"held-out loss {loss.value:.4f}, from {loss.tokens:,} tokens")
    click.echo(f"{out}: load it with transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})")


@click.command(short_help="Continue a text with a model.")
@HOME
@click.argument("text", type=Utf8())
@click.option("--tokens", default=200, show_default=True, type=click.IntRange(1, 100_000), help="How many to add.")
@click.option(
    "--temperature", default=0.8, show_default=True, type=FiniteRange(0), help="0: always the most likely token."
)
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same text.")
def generate(home: Path, text: str, tokens: int, temperature: float, seed: int) -> None:
    """Continue TEXT with the newest checkpoint in HOME."""
    from peer.home import Home

    Home(home).check_trained()  # before the import of large libraries
    with command_imports():
        from p2ptrain.train.generate import Sampling, generate_text
        from peer.trained.language_model import load

    loaded = load(home, "cpu")
    sampling = Sampling(temperature=temperature, seed=seed)
    click.echo(generate_text(loaded.module, loaded.tokenizer, text, tokens, sampling, loaded.ends))


@click.command(short_help="Show a peer's contributions, signed by its partners.")
@HOME
@click.option("--file", type=FILE, help="Check another peer's contributions.jsonl of the same run.", metavar="FILE")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def contributions(home: Path, file: Path | None, as_json: bool) -> None:
    """Check the receipts in HOME and add up those whose signatures hold."""
    from peer.home import Home
    from peer.ledger import proved, table

    result = proved(Home(home), file)
    if as_json:
        click.echo(json.dumps(asdict(result)))
        return
    click.echo("\n".join(table(result)))
