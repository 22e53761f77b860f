"""``p2ptrain publish-tokens``: a mirror of a run's text. Heavy modules are imported only when it runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2ptrain.base.errors import CorpusError, UserError
from p2ptrain.base.imports import command_imports
from p2ptrain.base.text import UserPath, command_line
from p2ptrain.manifest import read_run
from p2ptrain.manifest.directory import SIGNED_FILE
from p2ptrain.manifest.section import HUB_NAME

if TYPE_CHECKING:
    from p2ptrain.tokens.store import ShardStore

HUB = "hf:"


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
        from p2ptrain.data.file_store import stored
        from p2ptrain.data.unfinished import SHARDS_FOLDER
        from p2ptrain.tokens.store import ShardStore

    manifest = read_run(run)
    if manifest.corpus.kind != "shards":
        problem = "This run's text ships with p2ptrain, so nobody needs a mirror of it."
        raise CorpusError(problem, "There is nothing to do.")
    check_run(manifest, run)  # what is published was not edited
    root = manifest.corpus.root
    index, store = stored(run, root), ShardStore(run / SHARDS_FOLDER)
    assert index is not None  # check_run has read it
    if where.startswith(HUB):
        name = where.removeprefix(HUB)
        if re.fullmatch(HUB_NAME, name) is None:
            raise UserError(f"{where} names no data set of the hub.", "Write hf:OWNER/NAME.")
        _upload(name, root, index, store, is_public, command_line("p2ptrain", "publish-tokens", run, where))
        mirror = where
    else:
        _write(ShardStore(UserPath(where)), root, index, store)
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


def _write(mirror: ShardStore, root: str, index: Path, store: ShardStore) -> None:
    """Write what a folder lacks, in the form of a store. Raises HomeError."""
    from p2ptrain.tokens.index import ShardIndex

    data = index.read_bytes()
    for digest in ShardIndex.from_bytes(data).digests:
        if not mirror.has(digest):
            mirror.add(digest, store.path(digest).read_bytes())
    mirror.add(root, data)


def _upload(name: str, root: str, index: Path, store: ShardStore, is_public: bool, again: str) -> None:
    """Send what a data set lacks. Raises UserError."""
    with command_imports():
        from p2ptrain.data.hub import huggingface_hub
        from p2ptrain.tokens.index import ShardIndex
        from peer.trained.publishing import check_login, hub_errors

    check_login()
    hub: Any = huggingface_hub()
    api = hub.HfApi()
    digests = ShardIndex.from_bytes(index.read_bytes()).digests
    paths = {digest: store.path(digest) for digest in digests} | {root: index}
    with hub_errors(name, again):
        api.create_repo(name, repo_type="dataset", private=not is_public, exist_ok=True)
        added = [hub.CommitOperationAdd(f"{each[:2]}/{each}", path) for each, path in paths.items()]
        api.create_commit(name, added, repo_type="dataset", commit_message="Add the text of a run")
    if not is_public:
        click.echo(f"{name} is private if it is new: make it public, or peers cannot read it.", err=True)
