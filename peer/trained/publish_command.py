"""``p2ptrain publish``. Heavy modules are imported only when it runs."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import click

from p2ptrain.base import files
from p2ptrain.base.errors import UserError
from p2ptrain.base.imports import command_imports
from p2ptrain.base.text import UserPath, command_line, one_line, printable
from p2ptrain.manifest import JoinLink
from peer.options import HOME

FOLDER = click.Path(path_type=UserPath)

_HUB_LICENCES = """
apache-2.0 mit openrail openrail++ bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0
bigcode-openrail-m afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0
cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0
cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl
lgpl-2.1 lgpl-3.0 lgpl-lr isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
openmdw-1.0 osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl deepfloyd-if-license fair-noncommercial-research-license
llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma unknown other
"""
LICENCES = frozenset(_HUB_LICENCES.split())
"""Identifiers that the hub accepts (huggingface.co/docs/hub/repositories-licenses)."""


@click.command(short_help="Publish a peer's model on the Hugging Face hub.")
@HOME
@click.argument("repository", metavar="OWNER/NAME")
@click.option("--license", "licence", metavar="ID", help="Licence of the model, as apache-2.0 or cc-by-4.0.")
@click.option("--language", "languages", multiple=True, metavar="CODE", help="Language of the text, as en; repeatable.")
@click.option("--public", "is_public", is_flag=True, help="Let everybody see it.  [private]")
@click.option("--update", "updates", is_flag=True, help="Add a commit to a repository that exists.")
@click.option("--link", metavar="LINK", help="Join link of the run, for the card.")
@click.option(
    "--peer-id", "names_peer", is_flag=True, help="Name this peer in the card: it links your account to its addresses."
)
@click.option("--dry-run", "dry_run", type=FOLDER, metavar="DIR", help="Write what the hub would get; send nothing.")
@click.option("--upload", "written", type=FOLDER, metavar="DIR", help="Send a folder that was written before.")
def publish(
    home: Path,
    repository: str,
    licence: str | None,
    languages: tuple[str, ...],
    is_public: bool,
    updates: bool,
    link: str | None,
    names_peer: bool,
    dry_run: Path | None,
    written: Path | None,
) -> None:
    """Publish the newest checkpoint in HOME as the model OWNER/NAME of the Hugging Face hub.

    The hub gets the model as p2ptrain export writes it, the run's signed manifest, and a model card that is written
    from the manifest, the checkpoint and the receipts. The login is that of hf auth login.
    """
    from peer.home import Home
    from peer.screen import ActivityLine

    if dry_run is not None and written is not None:
        raise click.UsageError("Give either --dry-run or --upload.")
    if names_peer and written is not None:
        raise click.UsageError("--peer-id is for a card that is written now: give it with --dry-run.")
    _check_words(repository, licence, languages)
    joined = None if link is None else _without_secret(JoinLink.parse(link))
    if licence is None and dry_run is None and written is None:
        raise UserError(
            "A published model needs a licence, and only you can choose it.",
            "Give --license ID, as apache-2.0, other or unknown. To see the card without one: --dry-run DIR",
        )
    if written is None:
        Home(home).check_trained()  # before the import of large libraries
        folder = dry_run or UserPath(f"published-{repository.rpartition('/')[2]}")
        files.check_vacant(folder)
    else:
        folder = written
    with ActivityLine() as line:
        line.tell("loading torch and transformers")
        with command_imports():
            from peer.trained import publishing

        publication = publishing.Publication(repository, licence, languages, joined, is_public, updates, names_peer)
        if dry_run is None:
            publishing.check_login()
        if written is None:
            publishing.write_files(Home(home), folder, publication, line.tell)
        else:
            publishing.prepare_folder(Home(home), folder, publication)
        if dry_run is None:
            line.tell("sending the files")
            options = ["--public"] if is_public else []
            again = command_line("p2ptrain", "publish", home, repository, *options, "--upload", folder)
            address, left_out = publishing.upload(folder, publication, again)
    if dry_run is not None:
        click.echo(f"{folder}: what the hub would get; read README.md, the model card. Nothing was sent.")
        missing = "" if licence is not None else " --license ID"
        if missing:
            click.echo("The card names no licence: p2ptrain publish requires --license.", err=True)
        click.echo(f"Next: {command_line('p2ptrain', 'publish', home, repository, '--upload', folder)}{missing}")
        return
    if written is None:
        publishing.discard(folder)
    click.echo(f"{address}: published.")
    if left_out:
        click.echo(printable(f"Not sent, as publish did not write them: {', '.join(left_out)}."), err=True)


def _without_secret(link: JoinLink) -> JoinLink:
    """Return the link. Raises UserError if everybody who reads the card could use its invite."""
    if link.invite:
        raise UserError(
            "The join link contains an invite, which is secret, and the model card is public.",
            "Give the link up to the #, without the invite.",
        )
    return link


def _check_words(repository: str, licence: str | None, languages: tuple[str, ...]) -> None:
    """Raise UserError unless repository, licence and languages have the form of the hub's identifiers."""
    word = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
    if re.fullmatch(f"{word}/{word}", repository) is None or ".." in repository or "--" in repository:
        raise UserError(
            f"{one_line(repository)!r} is not the name of a repository.",
            "Give OWNER/NAME, with your user name or organization.",
        )
    if licence is not None and licence not in LICENCES:
        near = difflib.get_close_matches(licence.lower(), LICENCES, 3) or ["apache-2.0", "mit"]
        raise UserError(
            f"{one_line(licence)!r} is not the identifier of a licence of the hub.",
            f"Use one of https://huggingface.co/docs/hub/repositories-licenses, as {' or '.join(near)}; if yours is "
            "not there: other.",
        )
    for language in languages:
        if re.fullmatch(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*", language) is None:
            raise UserError(f"{language!r} is not the code of a language.", "Use a code of ISO 639, as en or de.")
