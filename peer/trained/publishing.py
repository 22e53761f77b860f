"""Publication of a home's model on the Hugging Face hub: files in a folder, then one commit.

The folder is complete before anything is sent, and the hub shows a commit only when it has every file, so an error
loses nothing: the folder stays, and ``upload`` can be repeated.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError, P2pTrainError, UserError
from p2ptrain.base.text import one_line
from p2ptrain.data.hub import huggingface_hub
from p2ptrain.data.published_settings import GENERATION, TEMPLATE, TOKENIZER_CONFIG
from p2ptrain.data.shards import SHARD, SINGLE
from p2ptrain.manifest import SIGNED_FILE, JoinLink, SignedManifest
from p2ptrain.receipts import Total
from peer.exporting import CODE, CODE_FILE, Exported, Tell, export
from peer.home import Home
from peer.ledger import proved
from peer.options import CONFIG_FILE
from peer.trained.loss_curve import read_curve
from peer.trained.model_card import CardFacts, TextSize, card, with_link
from peer.trained.model_folder import INDEX_FILE, TOKENIZER_FILE, weight_files

CARD_FILE = "README.md"
MOST_MANIFEST_BYTES = 1 << 20
"""More than any signed manifest has."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What the owner says about a publication."""

    repository: str
    """Name on the hub, owner/name."""
    licence: str | None
    languages: Sequence[str] = ()
    link: JoinLink | None = None
    is_public: bool = False
    updates: bool = False
    """Whether a repository that exists gets a new commit."""
    names_peer: bool = False
    """Whether the card names the publishing peer, by which its addresses can be found."""


def write_files(home: Home, folder: Path, publication: Publication, tell: Tell) -> Exported:
    """Write what the hub gets: the checked export, the signed manifest and the model card. All of it, or nothing.

    Raises UserError.
    """
    home.load_manifest(None if publication.link is None else publication.link.run_id)
    receipts, curve = _receipts(home), read_curve(home.events)

    def finish(folder: Path, exported: Exported) -> None:
        signed, text = exported.signed, exported.corpus
        facts = CardFacts(
            signed,
            exported.state,
            exported.held_out_loss,
            None if text is None else TextSize(text.train_tokens, text.held_out_tokens),
            receipts,
            curve,
            publication.repository,
            publication.licence,
            publication.languages,
            None if publication.link is None else str(publication.link),
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


def prepare_folder(home: Home, folder: Path, publication: Publication) -> None:
    """Write what the owner now says into the card of a folder that was written before.

    Raises UserError unless the folder then has everything that ``write_files`` writes, for the run of this home.
    """
    signed = home.load_manifest(None if publication.link is None else publication.link.run_id)
    try:
        raw = (folder / SIGNED_FILE).read_bytes()[:MOST_MANIFEST_BYTES]
        missing = [name for name in (CARD_FILE, CONFIG_FILE) if not (folder / name).is_file()]
    except OSError as error:
        raise UserError(
            f"{folder} was not written by p2ptrain publish: its {SIGNED_FILE} cannot be read ({files.cause(error)}).",
            "Name a folder that --dry-run or an earlier p2ptrain publish wrote.",
        ) from None
    if missing:
        raise UserError(f"{folder} lacks {' and '.join(missing)}.", "Write it again with --dry-run.")
    weight_files(folder)
    if signed is None or SignedManifest.from_bytes(raw).run_id != signed.run_id:
        raise UserError(f"{folder} holds a model of another run than {home.path}.", "Name the folder of this run.")
    if not _revised(folder / CARD_FILE, publication):
        raise UserError(
            f"{folder / CARD_FILE} names no licence, and only you can choose it.", "Give --license ID, as apache-2.0."
        )


def _revised(path: Path, publication: Publication) -> bool:
    """Put licence, languages and link into a card, where the owner names them; return whether it has a licence.

    What else the owner has written there stays. Raises UserError.
    """
    try:
        found = huggingface_hub().RepoCard(path.read_text(encoding="utf-8"))
        if publication.licence is not None:
            found.data["license"] = publication.licence
        if publication.languages:
            found.data["language"] = list(publication.languages)
        if publication.link is not None:
            found.text = with_link(found.text, str(publication.link))
        if publication.licence is not None or publication.languages or publication.link is not None:
            files.replace(path, str(found).encode())
        return bool(found.data.get("license"))
    except OSError as error:
        raise UserError(f"{path} cannot be revised: {files.cause(error)}.", files.remedy(error, "")) from error
    except Exception as error:  # of the hub's client or its YAML parser
        raise UserError(
            f"{path} is not a model card: {one_line(str(error), 120).rstrip('.')}.",
            "Correct its first part, between the lines ---, or write the folder again with --dry-run.",
        ) from error


def check_login() -> None:
    """Raise UserError unless a token for the hub is here. Asks nobody."""
    if huggingface_hub().get_token() is None:
        raise _not_logged_in("There is no token for the Hugging Face hub on this machine")


def upload(folder: Path, publication: Publication, again: str) -> tuple[str, list[str]]:
    """Create the repository and send a folder as one commit; return its address, and what was left out of the folder.

    Only what ``write_files`` writes is sent: a folder that waited for its upload may hold other files by now.

    Args:
        folder: with everything that the hub gets.
        again: command that repeats the upload, without --update.

    Raises UserError with the reason; the folder stays.
    """
    hub = huggingface_hub()
    api: Any = hub.HfApi()
    ours = own_files(folder)
    with hub_errors(publication.repository, f"{again}{' --update' if publication.updates else ''}"):
        found = api.create_repo(
            publication.repository, private=not publication.is_public, exist_ok=publication.updates, repo_type="model"
        )
    with hub_errors(publication.repository, f"{again} --update"):  # the repository exists now
        api.upload_folder(
            repo_id=publication.repository,
            folder_path=folder,
            repo_type="model",
            allow_patterns=ours,
            commit_message="Upload a model trained with p2ptrain",
        )
    return str(found), sorted(path.name for path in folder.iterdir() if path.name not in ours)


def own_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder that ``write_files`` writes. Raises UserError without weights."""
    names = [CARD_FILE, SIGNED_FILE, CONFIG_FILE, GENERATION, TOKENIZER_FILE, TOKENIZER_CONFIG, TEMPLATE]
    weights = [path.name for path in weight_files(folder)]
    if any(SHARD.fullmatch(name) is None for name in weights):
        raise UserError(f"{folder} has weights of other names than export gives.", "Write it again with --dry-run.")
    with contextlib.suppress(OSError):
        names += [CODE_FILE] if (folder / CODE_FILE).read_text(encoding="utf-8") == CODE else []
    names += [INDEX_FILE] if weights != [SINGLE] else []
    return [name for name in [*names, *weights] if (folder / name).is_file()]


def discard(folder: Path) -> None:
    """Remove a folder whose content the hub has."""
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def hub_errors(repository: str, again: str) -> Iterator[None]:
    """Turn every error of the hub's client into a UserError, one sentence for the reason and one for the remedy."""
    try:
        yield
    except P2pTrainError:
        raise
    except Exception as error:  # also errors of the HTTP library that the hub's client uses
        status = getattr(getattr(error, "response", None), "status_code", None)
        why, remedy = _reason(status, error, repository)
        raise UserError(
            f"{repository} was not published: {why}.", f"{remedy} The files are kept; then send them: {again}"
        ) from error


def _reason(status: int | None, error: Exception, repository: str) -> tuple[str, str]:
    """Return why the hub refused, without a full stop, and what the owner can do."""
    owner = repository.partition("/")[0]
    match status:
        case 401:
            return "the hub does not accept the token (401)", "Log in with a token that may write: hf auth login."
        case 403:
            return "your token may not write there (403)", f"Use a token that may write to {owner}: hf auth login."
        case 404:
            return "the hub knows no such owner (404)", f"Check that {owner} is you or your organization."
        case 409:
            return "the repository exists already, or changed meanwhile (409)", (
                "Choose another name, or add --update for a new commit."
            )
        case 413:
            return "a file is larger than the hub takes (413)", "Ask the hub for more room, or choose another owner."
        case 429:
            return "the hub asks for fewer requests (429)", "Wait some minutes."
        case int() if status >= 500:
            return f"the hub has a problem of its own ({status})", "Wait some minutes."
        case int():
            return f"the hub refused it ({status}: {one_line(str(error), 160)})", "Do what it says."
    reason = one_line(str(error) or type(error).__name__, 160).rstrip(".")
    return (
        f"the connection to the hub failed ({reason})",
        "Check the internet connection, and HF_ENDPOINT and HF_HUB_OFFLINE if set.",
    )


def _not_logged_in(problem: str) -> UserError:
    return UserError(
        f"{problem}.", "Log in with a token that may write (hf auth login), or write the files alone: --dry-run DIR"
    )
