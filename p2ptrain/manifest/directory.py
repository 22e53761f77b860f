"""The author's directory of a run: written by ``init``, signed by ``sign``, read by the bootstrap.

::

    RUN/manifest.toml     commented, for people to edit
    RUN/run.key           the author's Ed25519 key, PKCS #8 PEM, mode 0600; never leaves the machine
    RUN/manifest.signed   canonical JSON, as served to the network
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from p2ptrain.base import files
from p2ptrain.base.errors import ManifestError
from p2ptrain.base.ids import RunId
from p2ptrain.base.text import command_line, printable
from p2ptrain.manifest.document import differences, parse_toml, render_toml, with_changes
from p2ptrain.manifest.presets import preset
from p2ptrain.manifest.schema import Manifest
from p2ptrain.manifest.section import TITLE
from p2ptrain.manifest.signing import SignedManifest, public_key_of, sign

MANIFEST_FILE = "manifest.toml"
KEY_FILE = "run.key"
SIGNED_FILE = "manifest.signed"
SETTINGS_FILE = "settings.toml"
"""File in a peer's home but never in a run's directory; both may hold a signed manifest."""


@dataclass(frozen=True, slots=True)
class Signing:
    """The result of ``sign_run``."""

    signed: SignedManifest
    previous: RunId | None
    """The run that was signed before in this directory, equal to the new one if nothing changed; None if none was."""


def check_free(directory: Path) -> None:
    """Raise ManifestError if a directory holds a run already, has an unusable name, or cannot be looked at."""
    if not str(directory).isprintable():
        raise ManifestError(f"The name {printable(directory)} has invisible characters.", "Choose another name.")
    try:
        taken = [directory / name for name in (MANIFEST_FILE, KEY_FILE, SIGNED_FILE) if files.exists(directory / name)]
    except OSError as error:
        raise _unwritable(directory, error) from error
    if taken:
        raise ManifestError(
            f"{directory} already holds a run: {taken[0]} exists.",
            "Choose another directory; to change this run, edit its manifest.toml and sign it.",
        )


def name_change(directory: Path, wanted: str | None) -> dict[str, Any]:
    """Return the change that names a run as wanted, or after its directory if the manifest allows that name."""
    if wanted is not None:
        return {"run.name": wanted}
    own = directory.resolve().name
    return {"run.name": own} if TITLE.fullmatch(own) else {}


def create_run(
    directory: Path,
    preset_name: str,
    changes: Mapping[str, Any] | None = None,
    note: str = "",
    store_files: Callable[[], None] = lambda: None,
) -> Manifest:
    """Write ``manifest.toml`` and a new ``run.key`` into a directory without a run: all, or nothing at all.

    Args:
        directory: created if it does not exist.
        preset_name: one of ``PRESETS``.
        changes: new values of the preset's fields, by dotted path.
        note: text for a comment at the top of ``manifest.toml``.
        store_files: called before ``manifest.toml`` is written; if it raises, there is no run. In a directory that
            existed before, it removes what it wrote.

    Raises ManifestError.
    """
    check_free(directory)
    key = Ed25519PrivateKey.generate()
    manifest = with_changes(preset(preset_name, public_key_of(key)), changes or {})
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        missing = [each for each in (directory, *directory.parents) if not files.exists(each)]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            files.write_new(directory / KEY_FILE, pem, mode=0o600)
            try:
                store_files()
                files.write_new(directory / MANIFEST_FILE, render_toml(manifest, note).encode(), mode=0o644)
            except BaseException:  # a key without a manifest would block the next attempt
                (directory / KEY_FILE).unlink(missing_ok=True)
                raise
        except BaseException:  # Ctrl+C, too
            if missing:
                shutil.rmtree(missing[-1], ignore_errors=True)
            raise
    except OSError as error:
        raise _unwritable(directory, error) from error
    return manifest


def sign_run(directory: Path) -> Signing:
    """Sign ``manifest.toml`` into ``manifest.signed``; repeated signing changes nothing. Raises ManifestError."""
    manifest = _parsed(directory)
    signed = sign(manifest, read_key(directory))
    path = directory / SIGNED_FILE
    previous = _previous_run(path)
    if previous != signed.run_id:
        try:
            files.replace(path, signed.to_bytes())
        except OSError as error:
            raise _unwritable(directory, error) from error
    return Signing(signed, previous)


def read_run(place: Path) -> Manifest:
    """Read a run's manifest, signed or not, from its directory or a ``manifest.toml``. Raises ManifestError."""
    try:
        if files.is_dir(place):
            is_edited = files.exists(place / MANIFEST_FILE) or not files.exists(place / SIGNED_FILE)
            return _parsed(place) if is_edited else load_run(place).manifest
        return parse_toml(place.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError) and place.suffix != ".toml":
            raise _absent(place) from None
        raise ManifestError(
            f"Cannot read {place}: {files.cause(error)}.", "Name a manifest.toml or a run's directory."
        ) from error


def load_run(directory: Path) -> SignedManifest:
    """Read the directory's signed manifest. Raises ManifestError if it is missing or differs from ``manifest.toml``.

    ``manifest.toml`` may be missing: a bootstrap on another machine needs only the signed file.
    """
    path = directory / SIGNED_FILE
    try:
        signed = SignedManifest.from_bytes(path.read_bytes())
    except FileNotFoundError:
        if not directory.is_dir():
            raise _absent(directory) from None
        raise ManifestError(
            f"{directory} holds no {SIGNED_FILE}.",
            f"Sign the manifest with `{_command('sign', directory)}`.",
        ) from None
    except ManifestError as error:
        raise _unusable(path, error) from None
    except OSError as error:
        raise _unreadable(path, error) from error
    if (directory / MANIFEST_FILE).exists():
        changed = differences(signed.manifest, _parsed(directory))
        if changed:
            raise ManifestError(
                "\n".join([f"{directory / MANIFEST_FILE} was edited after signing (signed -> now):", *changed]),
                f"Undo the edit to continue this run, or create another run with `{_command('sign', directory)}`.",
            )
    return signed


def _previous_run(path: Path) -> RunId | None:
    try:
        return SignedManifest.from_bytes(path.read_bytes()).run_id
    except (FileNotFoundError, ManifestError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def _parsed(directory: Path) -> Manifest:
    try:
        return parse_toml(_read_manifest(directory))
    except ManifestError as error:
        raise _unusable(directory / MANIFEST_FILE, error) from None


def _unusable(path: Path, error: ManifestError) -> ManifestError:
    return ManifestError(f"{path} cannot be used:\n{error.problem}", error.remedy)


def _read_manifest(directory: Path) -> str:
    path = directory / MANIFEST_FILE
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ManifestError(
            f"{directory} holds no {MANIFEST_FILE}.",
            f"Create a run with `{_command('init', directory)}`.",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def read_key(directory: Path) -> Ed25519PrivateKey:
    """Read the author's key. Raises ManifestError if it is missing or invalid."""
    path = directory / KEY_FILE
    bring_back = "Restore the key that `p2ptrain init` made for this run; only that key can sign."
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError:
        raise ManifestError(f"{directory} holds no {KEY_FILE}.", bring_back) from None
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: the key is encrypted.
        raise ManifestError(f"{path} is not an unencrypted PEM private key.", bring_back) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ManifestError(f"{path} holds a key that is not Ed25519.", bring_back)
    return key


def _absent(place: Path) -> ManifestError:
    return ManifestError(
        f"There is no directory {place}.",
        f"Name a run's directory, or create a run with `{_command('init', place)}`.",
    )


def _unreadable(path: Path, error: OSError | ValueError) -> ManifestError:
    remedy = files.remedy(error, "") if isinstance(error, OSError) else "Check that it is the right file."
    return ManifestError(f"Cannot read {path}: {files.cause(error)}.", remedy)


def _unwritable(directory: Path, error: OSError) -> ManifestError:
    return ManifestError(f"Cannot write into {directory}: {files.cause(error)}.", files.remedy(error))


def _command(verb: str, directory: Path) -> str:
    return command_line("p2ptrain", verb, directory)
