"""Conversion of a checkpoint that several devices saved in parts, by version 0.1, to one that any peer resumes.

python -m peer.old_team HOME [HOME of each p2ptrain rank …]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from safetensors import safe_open

from p2ptrain.base.errors import HomeError
from p2ptrain.checkpoint import Checkpoints, checkpoints_in, explained, plainly
from p2ptrain.checkpoint.store import OLD_TEAM_FORMATS, RESERVED, TORN, checked_document
from p2ptrain.cli import run_command
from peer.home import Home

VECTOR = "slow"
"""A flat vector that each rank's file has a part of; other tensors are parts of vectors if they are as long."""


def convert(homes: Sequence[Home]) -> Path:
    """Write the newest checkpoint that these homes have in common as an ordinary one of the first; return its folder.

    Raises HomeError.
    """
    folders = [home.checkpoints for home in homes]
    with explained(lambda: folders[0]):
        there = [checkpoints_in(each) for each in folders]
        steps = set.intersection(*map(set, there))
        if not steps:
            raise HomeError(
                f"There is no checkpoint that is in each of {', '.join(map(str, folders))}.",
                "Name the homes of one peer and of all computers that trained with it.",
            )
        parts = [each[max(steps)] for each in there]
        documents = [_checked(part) for part in parts]
    found = {name: part / name for part, document in zip(parts, documents, strict=True) for name in document["files"]}
    names = sorted(found)
    ranks = int(names[0].removesuffix(".safetensors").rpartition("-")[2])
    if len(names) != ranks or names[0] not in documents[0]["files"]:
        raise HomeError(
            f"Of the {ranks} files of this checkpoint {len(names)} are there, in {', '.join(map(str, parts))}.",
            "Name the home of the peer first, and then that of p2ptrain rank on each other computer.",
        )
    if len({document["run"] for document in documents}) > 1:
        raise HomeError("These checkpoints are of different runs.", "Name the homes of one peer.")
    files = [safe_open(found[name], framework="pt") for name in names]
    tensors: dict[str, list[torch.Tensor] | torch.Tensor] = {}
    for name in files[0].keys():  # noqa: SIM118 (not a mapping)
        own = files[0].get_tensor(name)
        is_part = own.shape == files[0].get_tensor(VECTOR).shape
        tensors[name] = [each.get_tensor(name) for each in files] if is_part else own
    state = {name: value for name, value in documents[0].items() if name not in RESERVED}
    return Checkpoints(folders[0]).save(tensors, state)


def _checked(part: Path) -> dict[str, Any]:
    try:
        return checked_document(part, OLD_TEAM_FORMATS)
    except TORN as error:
        raise HomeError(f"The checkpoint {part} is damaged: {plainly(error)}.", "Move it away.") from error


@click.command()
@click.argument("homes", nargs=-1, required=True, type=click.Path(path_type=Path))
def main(homes: Sequence[Path]) -> None:
    """Convert the newest checkpoint of HOMES, the peer's first, in place."""
    first = Home(homes[0])
    first.check_trained()
    with first.locked():
        click.echo(f"{convert([Home(each) for each in homes])} can be resumed and exported")


if __name__ == "__main__":
    run_command(main, name="python -m peer.old_team")
