"""``p2ptrain publish``. Heavy modules are imported only when it runs."""

from __future__ import annotations

import re
from pathlib import Path

import click

from p2ptrain.base import files
from p2ptrain.base.errors import UserError
from p2ptrain.base.imports import command_imports
from p2ptrain.base.text import UserPath, command_line, one_line
from p2ptrain.manifest.section import HUB_NAME
from peer.options import HOME


@click.command(short_help="Publish a peer's model on the Hugging Face hub.")
@HOME
@click.argument("repository", metavar="OWNER/NAME")
@click.option("--license", "licence", metavar="ID", help="Licence of the model, as apache-2.0 or cc-by-4.0.")
@click.option("--public", "is_public", is_flag=True, help="Let everybody see it.  [private]")
@click.option("--update", "updates", is_flag=True, help="Add a commit to a repository that exists.")
@click.option(
    "--peer-id", "names_peer", is_flag=True, help="Name this peer in the card: it links your account to its addresses."
)
@click.option(
    "--dry-run",
    "dry_run",
    type=click.Path(path_type=UserPath),
    metavar="DIR",
    help="Write what the hub would get; send nothing.",
)
def publish(
    home: Path,
    repository: str,
    licence: str | None,
    is_public: bool,
    updates: bool,
    names_peer: bool,
    dry_run: Path | None,
) -> None:
    """Publish the newest checkpoint in HOME as the model OWNER/NAME of the Hugging Face hub.

    The hub gets the model as p2ptrain export writes it, the run's signed manifest, and a model card that is written
    from the manifest, the checkpoint and the receipts. The login is that of hf auth login.
    """
    from peer.home import Home
    from peer.screen import ActivityLine

    if re.fullmatch(HUB_NAME, repository) is None:
        raise UserError(
            f"{one_line(repository)!r} is not the name of a repository.",
            "Give OWNER/NAME, with your user name or organization.",
        )
    if licence is None and dry_run is None:
        raise UserError(
            "A published model needs a licence, and only you can choose it.",
            "Give --license ID of https://huggingface.co/docs/hub/repositories-licenses, as apache-2.0, other or "
            "unknown. To see the card without one: --dry-run DIR",
        )
    Home(home).check_trained()  # before the import of large libraries
    folder = dry_run or UserPath(f"published-{repository.rpartition('/')[2]}")
    files.check_vacant(folder)
    with ActivityLine() as line:
        line.tell("loading torch and transformers")
        with command_imports():
            from peer.trained import publishing

        publication = publishing.Publication(repository, licence, is_public, updates, names_peer)
        if dry_run is None:
            publishing.check_login()
        publishing.write_files(Home(home), folder, publication, line.tell)
        if dry_run is None:
            line.tell("sending the files")
            address = publishing.upload(folder, publication)
    if dry_run is None:
        click.echo(f"{address}: published.")
        return
    click.echo(f"{folder}: what the hub would get. Nothing was sent. Read and complete README.md, the model card.")
    click.echo(f"Then: {command_line('hf', 'upload', repository, folder, '--private')}")
