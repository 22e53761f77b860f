"""Publication of a home's model on the Hugging Face hub: files in a folder, then ``upload_folder`` of the hub's client.

The folder is complete before anything is sent, and stays after an error, so that ``hf upload`` can send it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.base.errors import HomeError, P2pTrainError, UserError
from p2ptrain.base.text import command_line, one_line
from p2ptrain.data.hub import huggingface_hub
from p2ptrain.manifest import SIGNED_FILE
from p2ptrain.receipts import Total
from peer.exporting import Exported, Tell, export
from peer.home import Home
from peer.ledger import proved
from peer.trained.model_card import CardFacts, TextSize, card

CARD_FILE = "README.md"


@dataclass(frozen=True, slots=True)
class Publication:
    """What the owner says about a publication."""

    repository: str
    """Name on the hub, owner/name."""
    licence: str | None
    is_public: bool = False
    updates: bool = False
    """Whether a repository that exists gets a new commit."""
    names_peer: bool = False
    """Whether the card names the publishing peer, by which its addresses can be found."""


def write_files(home: Home, folder: Path, publication: Publication, tell: Tell) -> Exported:
    """Write what the hub gets: the checked export, the signed manifest and the model card. All of it, or nothing.

    Raises UserError.
    """
    receipts = _receipts(home)

    def finish(folder: Path, exported: Exported) -> None:
        signed, text = exported.signed, exported.corpus
        facts = CardFacts(
            signed,
            exported.state,
            exported.held_out_loss,
            None if text is None else TextSize(text.train_tokens, text.held_out_tokens),
            receipts,
            publication.repository,
            publication.licence,
            publication.names_peer,
        )
        (folder / SIGNED_FILE).write_bytes(signed.to_bytes())
        (folder / CARD_FILE).write_text(card(facts), encoding="utf-8")

    return export(home, folder, tell, finish)


def _receipts(home: Home) -> Total | None:
    """Return what the home's receipts prove; None if there are none."""
    try:
        return proved(home)
    except HomeError:
        if home.contributions.exists():
            raise
        return None


def check_login() -> None:
    """Raise UserError unless a token for the hub is here. Asks nobody."""
    if huggingface_hub().get_token() is None:
        raise UserError(
            "There is no token for the Hugging Face hub on this machine.",
            "Log in with a token that may write: hf auth login",
        )


def upload(folder: Path, publication: Publication) -> str:
    """Create the repository, send a folder, remove it, and return the repository's address.

    Raises UserError with the reason; the folder stays.
    """
    api: Any = huggingface_hub().HfApi()
    name = publication.repository
    private = () if publication.is_public else ("--private",)
    with hub_errors(name, command_line("hf", "upload", name, folder, *private)):
        found = api.create_repo(
            name, private=not publication.is_public, exist_ok=publication.updates, repo_type="model"
        )
        api.upload_folder(
            repo_id=name, folder_path=folder, repo_type="model", commit_message="Upload a model trained with p2ptrain"
        )
    shutil.rmtree(folder, ignore_errors=True)
    return str(found)


@contextmanager
def hub_errors(repository: str, again: str) -> Iterator[None]:
    """Turn every error of the hub's client into a UserError.

    Args:
        again: command that sends the files.
    """
    try:
        yield
    except P2pTrainError:
        raise
    except Exception as error:  # also errors of the HTTP library that the hub's client uses
        raise UserError(
            f"{repository} was not published: {one_line(str(error) or type(error).__name__, 300).rstrip('.')}.",
            f"Check the internet connection, the login (hf auth login) and the name. The "
            f"files are kept; then send them: {again}",
        ) from error
