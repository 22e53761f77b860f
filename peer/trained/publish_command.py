"""``p2ptrain publish``. Heavy modules are imported only when it runs."""

from __future__ import annotations

import re
from pathlib import Path

import click

from p2ptrain.base import files
from p2ptrain.base.errors import UserError
from p2ptrain.base.imports import command_imports
from p2ptrain.base.text import UserPath, command_line, one_line
from p2ptrain.manifest import JoinLink
from peer.options import FILE, HOME

FOLDER = click.Path(path_type=UserPath)


@click.command(short_help="Publish a peer's model on the Hugging Face hub.")
@HOME
@click.argument("repository", metavar="OWNER/NAME")
@click.option("--license", "licence", metavar="ID", help="Licence of the model, as apache-2.0 or cc-by-4.0.")
@click.option("--language", "languages", multiple=True, metavar="CODE", help="Language of the text, as en; repeatable.")
@click.option("--public", "is_public", is_flag=True, help="Let everybody see it.  [private]")
@click.option("--update", "updates", is_flag=True, help="Add a commit to a repository that exists.")
@click.option("--link", metavar="LINK", help="Join link of the run, for the card.")
@click.option("--dry-run", "dry_run", type=FOLDER, metavar="DIR", help="Write what the hub would get; send nothing.")
@click.option("--upload", "written", type=FOLDER, metavar="DIR", help="Send a folder that was written before.")
@click.option("--tokenizer", type=FILE, metavar="FILE", help="The tokenizer.json, if the run names it by digest.")
def publish(
    home: Path,
    repository: str,
    licence: str | None,
    languages: tuple[str, ...],
    is_public: bool,
    updates: bool,
    link: str | None,
    dry_run: Path | None,
    written: Path | None,
    tokenizer: Path | None,
) -> None:
    """Publish the newest checkpoint in HOME as the model OWNER/NAME of the Hugging Face hub.

    The hub gets the model as p2ptrain export writes it, the run's signed manifest, and a model card that is written
    from the manifest, the checkpoint and the receipts. The login is that of hf auth login.
    """
    from peer.home import Home
    from peer.screen import ActivityLine

    if dry_run is not None and written is not None:
        raise click.UsageError("Give either --dry-run or --upload.")
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

        publication = publishing.Publication(repository, licence, languages, joined, is_public, updates)
        if dry_run is None:
            publishing.check_login()
        if written is None:
            publishing.write_files(Home(home), folder, publication, tokenizer, line.tell)
        else:
            publishing.prepare_folder(Home(home), folder, publication)
        if dry_run is None:
            line.tell("sending the files")
            options = ["--public"] if is_public else []
            again = command_line("p2ptrain", "publish", home, repository, *options, "--upload", folder)
            address = publishing.upload(folder, publication, again)
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
    if licence is not None and re.fullmatch(r"[a-z0-9][a-z0-9.+-]{0,39}", licence) is None:
        raise UserError(
            f"{licence!r} is not the identifier of a licence.",
            "Use one of https://huggingface.co/docs/hub/repositories-licenses, as apache-2.0; or other.",
        )
    for language in languages:
        if re.fullmatch(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*", language) is None:
            raise UserError(f"{language!r} is not the code of a language.", "Use a code of ISO 639, as en or de.")
