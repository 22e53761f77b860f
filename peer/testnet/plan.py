"""The layout of a testnet's directory, and its creation.

::

    OUT/run/         the swarm's run: manifest.toml, run.key, manifest.signed, files, a link to the author's shards
    OUT/solo-run/    one peer's share of that run with recipe ``local``
    OUT/bootstrap/   the bootstrap's home
    OUT/peer-1/ …    the peers' homes, each with the process's output.log
    OUT/solo/        the home of the peer that trains alone
    OUT/summary.json
    OUT/.p2ptrain-testnet    marks OUT as replaceable
    OUT/lock                 held while a testnet runs
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.base import files
from p2ptrain.base.errors import ManifestError
from p2ptrain.base.ids import PeerId
from p2ptrain.data.file_store import FILES_FOLDER, WEIGHTS_OPTION, FileStore, named_files, stored
from p2ptrain.data.unfinished import SHARDS_FOLDER
from p2ptrain.manifest import (
    MANIFEST_FILE,
    SIGNED_FILE,
    Manifest,
    SignedManifest,
    create_run,
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
    solo: TrainerProcess | None = None

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
    def trainers(self) -> tuple[TrainerProcess, ...]:
        return (*self.peers, self.solo) if self.solo else self.peers


def chosen_manifest(preset_name: str, source: Path | None, seed: int | None = None) -> Manifest:
    """Return the manifest to train: a preset's, a file's or a run directory's. Raises ManifestError.

    Admission is open: all peers are on this machine and need no invite.
    """
    manifest = preset(preset_name) if source is None else read_run(source)
    recipe = RECIPES[manifest.outer.recipe]
    if not recipe.exchanges:
        raise ManifestError(
            f"outer.recipe: {recipe.name} makes no exchanges, so a testnet of it would not be a swarm.",
            "Choose a manifest whose recipe makes exchanges; the testnet adds the solo run by itself.",
        )
    return with_changes(manifest, {"admission.policy": "open"} | ({} if seed is None else {"run.seed": seed}))


@contextlib.contextmanager
def claimed(out: Path, before: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold OUT, emptied of an earlier testnet. Raises UserError if it holds anything else, or another testnet runs.

    Args:
        before: called after locking and before emptying, to end processes of that testnet that still write there.
    """
    if not os.access(out / MARKER, os.F_OK):
        files.check_vacant(out)
    with files.locked(out, "--out"):
        try:
            (out / MARKER).touch()
            before()
            for entry in out.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name not in (MARKER, files.LOCK):
                    entry.unlink()
        except OSError as error:
            raise files.unusable(out, error, "--out") from error
        yield


def lay_out(
    out: Path,
    manifest: Manifest,
    names: Sequence[str],
    solo: bool = False,
    source: Path | None = None,
) -> Plan:
    """Create a run with its own key, its solo twin, and a home with an identity for each trainer. Raises UserError.

    Args:
        names: of the peers.
        source: the author's directory of the run, with the files and the shards that the manifest names; None: it
            names none.
    """
    signed = _write_run(out / "run", manifest, {})
    alone = None
    if solo:
        twin = _write_run(out / "solo-run", signed.manifest, _solo_changes(signed.manifest, len(names)))
        alone = trainer(out, "solo")
        alone.home.write(alone.home.path / SIGNED_FILE, twin.to_bytes())
    plan = Plan(out, signed, tuple(trainer(out, name) for name in names), alone)
    _carry_files(source, plan)
    return plan


def trainer(out: Path, name: str) -> TrainerProcess:
    """Return a trainer; creates its identity, so that its peer id is known before it starts."""
    home = Home(out / name)
    return TrainerProcess(name, home, Identity.load_or_create(home.identity).peer_id)


def _carry_files(source: Path | None, plan: Plan) -> None:
    """Put the files of a run where bootstrap and trainers look for them. Raises ManifestError if one is missing."""
    for file in named_files(plan.signed.manifest):
        path = stored(source, file.sha256) if source is not None else None
        if path is not None:
            for place in (plan.run, *(each.home.path for each in plan.trainers)):
                FileStore(place / FILES_FOLDER).adopt(file, path)
        elif file.option != WEIGHTS_OPTION:  # large weights are not stored; the owner names them
            raise ManifestError(
                f"The run's {file.what}, {FILES_FOLDER}/{file.sha256}, is not beside its manifest.",
                "Name the run's directory, which `p2ptrain init` made: --manifest RUN",
            )
    if source is not None and plan.signed.manifest.corpus.kind == "shards":
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


def _write_run(directory: Path, manifest: Manifest, changes: Mapping[str, Any]) -> SignedManifest:
    created = create_run(directory, "demo")  # for its key; the manifest is the chosen one
    own = with_changes(manifest, {"run.public_key": created.run.public_key, **changes})
    files.replace(directory / MANIFEST_FILE, render_toml(own).encode())
    return sign_run(directory).signed
