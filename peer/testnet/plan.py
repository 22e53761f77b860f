"""The layout of a testnet's directory, and its creation.

::

    OUT/run/         the swarm's run: manifest.toml, run.key, manifest.signed, files, a link to the author's shards
    OUT/solo-run/    one peer's share of that run with recipe ``local``
    OUT/bootstrap/   the bootstrap's home
    OUT/peer-1/ …    the peers' homes, each with the process's output.log
    OUT/solo/        the home of the peer that trains alone
    OUT/summary.json
    OUT/.p2ptrain-testnet    marks OUT as replaceable; locked while a testnet runs
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError, ManifestError
from p2ptrain.base.ids import PeerId
from p2ptrain.data.file_store import FILES_FOLDER, WEIGHTS_OPTION, FileStore, named_files, stored
from p2ptrain.data.unfinished import SHARDS_FOLDER
from p2ptrain.manifest import (
    MANIFEST_FILE,
    SIGNED_FILE,
    Manifest,
    SignedManifest,
    create_run,
    load_run,
    preset,
    read_run,
    render_toml,
    sign_run,
    with_changes,
)
from p2ptrain.net.identity import Identity
from p2ptrain.recipes import RECIPES
from peer.home import Home

MARKER = ".p2ptrain-testnet"
OPEN = {"admission.policy": "open"}
"""Admission of a testnet, whatever the manifest says: all its peers are on this machine and need no invite."""

_NO_AUTHOR = "00" * 32


@dataclass(frozen=True, slots=True)
class TrainerProcess:
    """One process that trains, a peer or the solo run."""

    name: str
    home: Home
    peer_id: PeerId

    @property
    def log(self) -> Path:
        """The process's output."""
        return self.home.path / "output.log"


@dataclass(frozen=True, slots=True)
class Plan:
    """A testnet that is laid out on disk and ready to start."""

    out: Path
    signed: SignedManifest
    peers: tuple[TrainerProcess, ...]
    solo: TrainerProcess | None

    @property
    def run(self) -> Path:
        return self.out / "run"

    @property
    def shards(self) -> Path:
        """Link to the author's shards; there is none if the run's text ships with the package."""
        return self.run / SHARDS_FOLDER

    @property
    def bootstrap(self) -> Path:
        return self.out / "bootstrap"

    @property
    def summary(self) -> Path:
        return self.out / "summary.json"

    @property
    def trainers(self) -> tuple[TrainerProcess, ...]:
        return (*self.peers, self.solo) if self.solo else self.peers


def chosen_manifest(preset_name: str, source: Path | None) -> Manifest:
    """Return the manifest to train: a preset's, a file's or a run directory's. Raises ManifestError."""
    manifest = preset(preset_name, _NO_AUTHOR) if source is None else read_run(source)
    recipe = RECIPES[manifest.outer.recipe]
    if not recipe.exchanges:
        raise ManifestError(
            f"outer.recipe: {recipe.name} makes no exchanges, so a testnet of it would not be a swarm.",
            "Choose a manifest whose recipe makes exchanges; the testnet adds the solo run by itself.",
        )
    return manifest


@contextlib.contextmanager
def claimed(out: Path, before: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Lock OUT and empty it of an earlier testnet. Raises HomeError if it holds anything but a testnet.

    Args:
        before: called after locking and before emptying, to end processes of that testnet that still write there.
    """
    marker = out / MARKER
    try:
        if files.exists(out) and not files.exists(marker) and (not out.is_dir() or any(out.iterdir())):
            raise HomeError(
                f"{out} exists and is not the output of a testnet.",
                "Choose another directory with --out; only an earlier testnet is replaced.",
            )
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(marker, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unwritable(out, error) from error
    try:
        _lock(lock, out)
        before()
        _empty(out, marker)
        yield
    finally:
        os.close(lock)


def _empty(out: Path, marker: Path) -> None:
    try:
        for entry in out.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != marker:
                entry.unlink()
    except OSError as error:
        raise _unwritable(out, error) from error


def _lock(handle: int, out: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HomeError(
            f"Another testnet is running in {out}.", "Wait for it, stop it, or choose another directory with --out."
        ) from None


def lay_out(
    out: Path,
    manifest: Manifest,
    peers: int | Sequence[str],
    solo: bool,
    seed: int | None,
    is_gated: bool = False,
    source: Path | None = None,
) -> Plan:
    """Create a run with its own key, its solo twin, and a home with an identity for each trainer. Raises UserError.

    Args:
        peers: number of peers, or their names.
        is_gated: whether the manifest's admission policy applies; otherwise admission is open.
        source: the author's directory of the run, with the files and the shards that the manifest names; None: it
            names none.
    """
    changes: dict[str, Any] = {} if seed is None else {"run.seed": seed}
    changes |= {} if is_gated else OPEN
    signed = _write_run(out / "run", manifest, changes)
    names = [f"peer-{number}" for number in range(1, peers + 1)] if isinstance(peers, int) else peers
    alone = None
    if solo:
        twin = _write_run(out / "solo-run", signed.manifest, _solo_changes(signed.manifest, len(names)))
        alone = _trainer(out, "solo")
        alone.home.write(alone.home.path / SIGNED_FILE, twin.to_bytes())
    plan = Plan(out, signed, tuple(_trainer(out, name) for name in names), alone)
    if source is not None:
        _carry_files(source, plan)
    elif signed.manifest.corpus.kind == "shards":
        raise ManifestError(
            "The manifest names a text by its root, and there is no folder of its shards beside it.",
            "Name the run's directory, which `p2ptrain init` made: --manifest RUN",
        )
    return plan


def _carry_files(source: Path, plan: Plan) -> None:
    """Put the files of a run where bootstrap and trainers look for them. Raises UserError if one is missing."""
    for file in named_files(plan.signed.manifest):
        if file.option == WEIGHTS_OPTION:
            continue
        path = stored(source, file.sha256)
        if path is None:
            raise ManifestError(
                f"The run's {file.what} is not in {source / FILES_FOLDER / file.sha256}.",
                "Name the run's directory, which `p2ptrain init` made, or restore that file.",
            )
        for place in (plan.run, *(each.home.path for each in plan.trainers)):
            FileStore(place / FILES_FOLDER).adopt(file, path)
    if plan.signed.manifest.corpus.kind == "shards":
        plan.shards.symlink_to((source / SHARDS_FOLDER).absolute())


def _solo_changes(manifest: Manifest, peers: int) -> dict[str, Any]:
    """Return the changes that turn a run into its solo twin: the inner optimizer alone, on one peer's share of the
    tokens; same data, shape of the schedule, and initial weights."""
    return {
        "outer.recipe": "local",
        "outer.exchanges_per_step": 0,
        "run.tokens": -(-manifest.run.tokens // peers),
        "training.warmup_tokens": manifest.training.warmup_tokens // peers,
    }


def laid_out(out: Path, names: Sequence[str]) -> Plan:
    """Return the plan that ``lay_out`` created there for peers of these names, without a solo run."""
    return Plan(out, load_run(out / "run"), tuple(_trainer(out, name) for name in names), None)


def _write_run(directory: Path, manifest: Manifest, changes: Mapping[str, Any]) -> SignedManifest:
    created = create_run(directory, "demo")  # for its key; the manifest is the chosen one
    own = with_changes(manifest, {"run.public_key": created.run.public_key, **changes})
    try:
        (directory / MANIFEST_FILE).write_text(render_toml(own), encoding="utf-8")
    except OSError as error:
        raise _unwritable(directory, error) from error
    return sign_run(directory).signed


def _trainer(out: Path, name: str) -> TrainerProcess:
    """Return a trainer; creates its identity, so that the display can show names instead of ids."""
    home = Home(out / name)
    return TrainerProcess(name, home, Identity.load_or_create(home.identity).peer_id)


def _unwritable(place: Path, error: OSError) -> HomeError:
    remedy = files.remedy(error, "choose another directory with --out")
    return HomeError(f"{place} cannot be written: {files.cause(error)}.", remedy)
