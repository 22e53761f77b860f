"""``p2ptrain publish-tokens``: a mirror of a run's text. Heavy modules are imported only when it runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2ptrain.base import files
from p2ptrain.base.errors import CorpusError, HomeError, UserError
from p2ptrain.base.imports import command_imports
from p2ptrain.base.text import UserPath, command_line
from p2ptrain.manifest import Manifest, read_run
from p2ptrain.manifest.directory import SIGNED_FILE
from p2ptrain.manifest.section import HUB_NAME

if TYPE_CHECKING:
    from p2ptrain.tokens.store import ShardStore

HUB = "hf:"
COMMIT_FILES = 250
"""Shards of one commit on the hub, a gigabyte: what a broken upload loses at most."""


@click.command("publish-tokens", short_help="Make a mirror of a run's text: on the hub, or a folder for a web server.")
@click.argument("run", type=click.Path(file_okay=False, path_type=UserPath))
@click.argument("where", metavar="hf:OWNER/NAME|DIR")
@click.option("--public", "is_public", is_flag=True, help="Let everybody read it, as peers must.  [private]")
def publish_tokens(run: Path, where: str, is_public: bool) -> None:
    """Upload the text of the run in the directory RUN to a data set of the hub, or write it to a folder.

    Peers read it from there if corpus.mirror of the manifest names the place before the run is signed, or if their
    owners name it with --mirror. A repeated call sends what is missing.
    """
    with command_imports():
        from p2ptrain.data.checking import check_run
        from p2ptrain.data.unfinished import SHARDS_FOLDER
        from p2ptrain.tokens.store import ShardStore

    manifest = read_run(run)
    if manifest.corpus.kind != "shards":
        problem = "This run's text ships with p2ptrain, so nobody needs a mirror of it."
        raise CorpusError(problem, "There is nothing to do.")
    check_run(manifest, run)  # what is published was not edited
    content = {each.path: each for each in _content(manifest, run, ShardStore(run / SHARDS_FOLDER))}
    if where.startswith(HUB):
        name = where.removeprefix(HUB)
        if re.fullmatch(HUB_NAME, name) is None:
            raise UserError(f"{where} names no data set of the hub.", "Write hf:OWNER/NAME.")
        _upload(name, manifest.run.name, content, is_public, command_line("p2ptrain", "publish-tokens", run, where))
        mirror = where
    else:
        _write(UserPath(where), content)
        mirror = "https://…"
        click.echo(f"Let a web server serve {where}.", err=True)
    if manifest.corpus.mirror == mirror:
        click.echo("The run's manifest names it to all peers.")
    elif (run / SIGNED_FILE).exists():
        click.echo(f"The run is signed without it: tell the peers' owners to start with --mirror {mirror}")
    else:
        click.echo(
            f'To name it to all peers, set corpus.mirror = "{mirror}" in {run}/manifest.toml before you sign the run.'
        )


class _File:
    """A file of a mirror."""

    def __init__(self, path: str, source: Path) -> None:
        self.path, self.source = path, source


def _content(manifest: Manifest, run: Path, store: ShardStore) -> Iterator[_File]:
    from p2ptrain.data.file_store import stored
    from p2ptrain.tokens.index import ShardIndex

    assert manifest.corpus.kind == "shards"
    root = manifest.corpus.root
    path = stored(run, root)
    assert path is not None  # check_run has read it
    yield _File(f"{root[:2]}/{root}", path)
    for digest in ShardIndex.from_bytes(path.read_bytes()).digests:
        yield _File(f"{digest[:2]}/{digest}", store.path(digest))


def _write(folder: Path, content: dict[str, _File]) -> None:
    """Write what a folder lacks. Raises HomeError."""
    try:
        for each in content.values():
            target, data = folder / each.path, each.source.read_bytes()
            if not (target.is_file() and target.read_bytes() == data):
                target.parent.mkdir(parents=True, exist_ok=True)
                files.replace(target, data)
    except OSError as error:
        raise HomeError(f"{folder} cannot be written: {files.cause(error)}.", files.remedy(error, "")) from error


def _upload(name: str, run: str, content: dict[str, _File], is_public: bool, again: str) -> None:
    """Send what a data set lacks. Raises UserError."""
    with command_imports():
        from p2ptrain.data.hub import huggingface_hub
        from peer.trained.publishing import check_login, hub_errors

    check_login()
    hub = huggingface_hub()
    api: Any = hub.HfApi()
    with hub_errors(name, again):
        api.create_repo(name, repo_type="dataset", private=not is_public, exist_ok=True)
        there = set(api.list_repo_files(name, repo_type="dataset"))
        missing = [each for path, each in content.items() if path not in there]
        for sent in range(0, len(missing), COMMIT_FILES):
            group = missing[sent : sent + COMMIT_FILES]
            api.create_commit(
                name,
                [hub.CommitOperationAdd(each.path, each.source) for each in group],
                commit_message=f"Upload the text of the run {run}, part {sent // COMMIT_FILES + 1}",
                repo_type="dataset",
            )
            click.echo(f"{sent + len(group):,} of {len(missing):,} files sent", err=True)
    if not is_public:
        click.echo(f"{name} is private if it is new: make it public, or peers cannot read it.", err=True)
