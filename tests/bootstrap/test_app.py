"""The bootstrap program on a fake node: its neighbours, and how much bandwidth its services may use."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import math
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner

from bootstrap import app, cli, run_files
from p2ptrain.admission.author import LINK_FILE
from p2ptrain.base.errors import JoinLinkError, UserError
from p2ptrain.data import weight_files
from p2ptrain.data.file_store import FileStore
from p2ptrain.manifest import JoinLink, SignedManifest, create_run, sign_run
from p2ptrain.net.address import with_peer
from p2ptrain.net.identity import Identity
from p2ptrain.net.relay.relay import FOR_A_SERVER, NO_RELAY, RelayLimits
from p2ptrain.net.shard_service import ShardServer
from p2ptrain.net.throttle import MBIT, Throttles
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.writing import ShardWriter

HERE = "/ip4/8.8.8.8/tcp/31337"


def place(folder: Path, **chosen: Any) -> app.BootstrapOptions:
    return app.BootstrapOptions(folder / "run", folder / "home", listen=(HERE,), **chosen)


def test_a_swarm_on_one_machine_listens_where_it_did_if_nobody_else_does(tmp_path: Path) -> None:
    """Check that a bootstrap keeps its port if it is free, so that links that were passed on stay valid."""
    me = Identity.load_or_create(tmp_path / "identity.key").peer_id
    here = app.BootstrapOptions(tmp_path, tmp_path, local=True)
    assert app.as_before(here, me) == here.addresses
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        before = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        (tmp_path / LINK_FILE.name).write_text(f"{JoinLink('a' * 64, (with_peer(before, me),))}\n")
        assert app.as_before(here, me) == here.addresses
    assert app.as_before(here, me) == (before,)
    for public in ("/ip4/192.168.1.5/tcp/31337", "/dns4/swarm.example.org/tcp/31337"):
        (tmp_path / LINK_FILE.name).write_text(f"{JoinLink('a' * 64, (with_peer(public, me),))}\n")
        assert app.as_before(here, me) == here.addresses
    (tmp_path / LINK_FILE.name).write_text(f"{JoinLink('a' * 64, (with_peer(before, me),))}\n")
    assert app.as_before(replace(here, local=False), me) == app.PUBLIC_LISTEN
    chosen = replace(here, listen=("/ip4/127.0.0.1/tcp/4001",))
    assert app.as_before(chosen, me) == chosen.addresses
    (tmp_path / LINK_FILE.name).write_text("no link")
    assert app.as_before(here, me) == here.addresses


def test_a_copy_of_the_first_one_is_refused_before_it_prints_a_link(
    signed: SignedManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    identity = Identity.load_or_create(tmp_path / "home" / "identity.key")
    closed: list[bool] = []

    async def close() -> None:
        closed.append(True)

    async def start(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(addresses=(HERE,), close=close)

    monkeypatch.setattr(app.Node, "start", start)
    first = JoinLink(signed.run_id, (f"/ip4/9.9.9.9/tcp/31337/p2p/{identity.peer_id}",))
    bootstrap = app.EntryPoint(place(tmp_path, beside=str(first)), signed, identity, lambda tag, text: None)
    with pytest.raises(JoinLinkError, match="names this one itself"):
        asyncio.run(bootstrap.run())
    assert closed == [True]
    assert not (tmp_path / "home" / "join-link.txt").exists()


def test_caps_are_for_all_services_together(
    signed: SignedManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: dict[str, Throttles] = {}
    limits: list[RelayLimits] = []
    ends: list[float] = []

    def service(name: str, at: int) -> Callable[..., Any]:
        async def start(*arguments: Any) -> Any:
            got[name] = arguments[at]
            limits.extend(each for each in arguments if isinstance(each, RelayLimits))
            return SimpleNamespace(close=nothing)

        return start

    async def nothing(*_: Any) -> Any:
        return SimpleNamespace(close=nothing)

    monkeypatch.setattr(app, "serve_manifest", service("manifest", 2))
    monkeypatch.setattr(app, "serve_reach", nothing)
    monkeypatch.setattr(app, "Relay", SimpleNamespace(start=service("relay", 2)))
    monkeypatch.setattr(app.EntryPoint, "_serve", nothing)
    identity = Identity.load_or_create(tmp_path / "identity.key")

    class Admission:
        async def serve(self, node: object, rates: Throttles) -> Any:
            got["admission"] = rates
            return SimpleNamespace(close=nothing)

    def equipped(where: app.BootstrapOptions) -> None:
        got.clear()
        bootstrap = app.EntryPoint(where, signed, identity, print)
        bootstrap._link = JoinLink(signed.run_id, (f"{HERE}/p2p/{identity.peer_id}",))
        bootstrap._admission = cast(Any, Admission())
        asyncio.run(bootstrap._equip(cast(Any, SimpleNamespace(end_at=ends.append))))

    equipped(place(tmp_path, upload_mbit=8.0))
    assert (got["relay"].up.rate, got["relay"].down.rate) == (1e6, math.inf)
    assert got["manifest"] is got["relay"] is got["admission"]
    equipped(place(tmp_path, download_mbit=0.25))
    assert (got["relay"].up.rate, got["relay"].down.rate) == (math.inf, 31_250.0)
    assert limits.pop() == FOR_A_SERVER
    equipped(place(tmp_path, relay=False))  # without a service of ours, p2pd would be a relay on its own
    assert limits.pop() is NO_RELAY
    assert set(ends) == {signed.manifest.run.tokens}


def test_the_directory_is_under_its_caps_too(
    signed: SignedManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []

    async def start(*_: Any, **arguments: Any) -> None:
        started.append(arguments)

    monkeypatch.setattr(app.Node, "start", start)
    identity = Identity.load_or_create(tmp_path / "identity.key")
    bootstrap = app.EntryPoint(place(tmp_path), signed, identity, print)
    asyncio.run(bootstrap._start_node())
    assert [each["rates"] for each in started] == [bootstrap._rates]


def test_the_command_line_takes_the_caps_of_a_peers_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[app.BootstrapOptions] = []
    monkeypatch.setattr(app, "run", lambda where, say: ran.append(where))
    create_run(tmp_path / "run", "demo")
    sign_run(tmp_path / "run")

    def called(*options: str) -> str:
        return CliRunner().invoke(cli.bootstrap, [str(tmp_path / "run"), *options]).output

    assert called() == ""
    assert ran[-1].rates().up.rate == ran[-1].rates().down.rate == math.inf
    assert called("--upload-mbit", "20", "--download-mbit", "0.25") == ""
    assert (ran[-1].upload_mbit, ran[-1].download_mbit) == (20.0, 0.25)
    for wrong in ("0.1", "-1", "nan", "inf", "1e7"):
        assert "0 (no cap), or a number from 0.25 to 1,000,000" in called("--upload-mbit", wrong)
    assert len(ran) == 2


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def test_the_text_of_the_run_folder_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, said = tmp_path / "run", list[str]()
    writer = ShardWriter(ShardStore(run / "shards"), 2)
    for is_training in (True, False):
        writer.add(np.arange(5000 + is_training) % 256, is_training)
    index = writer.finish(32)
    tokens = {"training_tokens": index.training_tokens, "held_out_tokens": index.held_out_tokens}
    create_run(tmp_path / "made", "demo", {"corpus": {"kind": "shards", "root": index.root, **tokens}})
    signed = sign_run(tmp_path / "made").signed
    options = replace(place(tmp_path), run=run)

    def served() -> dict[str, Path]:
        return run_files.files_to_serve(options, signed, lambda tag, text: said.append(text))

    def server() -> ShardServer | None:
        return run_files.shards_to_serve(run, signed, served(), Throttles(), lambda tag, text: said.append(text))

    assert server() is None
    [line] = said
    assert line.startswith(f"{run / 'files'} lacks the run's index")
    said.clear()
    FileStore(run / "files").add(index.root, index.to_bytes())
    assert server() is not None
    assert said == []
    ShardStore(run / "shards").path(index.digests[0]).unlink()
    assert server() is not None
    assert said[0].startswith("1 of the text's 2 shards are in")
    said.clear()
    ShardStore(run / "shards").path(index.digests[1]).write_bytes(b"damaged")
    serving = server()
    assert serving is not None
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        asyncio.run(run_files.check_shards(serving, lambda tag, text: said.append(text)))
    assert said[-1].endswith("cannot be read: Too many open files.")
    assert asyncio.run(serving.piece(index.digests[1], 0)) == (7, b"damaged")
    asyncio.run(run_files.check_shards(serving, lambda tag, text: said.append(text)))
    assert f"{ShardStore(run / 'shards').path(index.digests[1])} is damaged" in said[-1]
    assert asyncio.run(serving.piece(index.digests[1], 0)) == (0, b"")
    (run / "files" / index.root).write_bytes(b"edited")
    assert served() == {}


def test_initial_weights_are_served_if_all_together_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shards = [b"one", b"two"]
    for name, content in zip("ab", shards, strict=True):
        (folder / f"{name}.safetensors").write_bytes(content)
    digests = [hashlib.sha256(content).hexdigest() for content in shards]
    create_run(tmp_path / "run", "demo", {"model.init": {"kind": "file", "sha256": list(digests)}})
    signed, said = sign_run(tmp_path / "run").signed, list[str]()

    def served(**given: Path) -> dict[str, Path]:
        options = replace(place(tmp_path, **given), run=tmp_path / "run")
        return run_files.files_to_serve(options, signed, lambda tag, text: said.append(text))

    assert served() == {}
    assert "the run's weights are not here; start with --weights PATH once, and peers get them" in said
    with monkeypatch.context() as patch:
        patch.setattr(weight_files, "MOST_STORED_BYTES", 5)
        assert served(weights=folder) == {}
        assert any("each peer needs --weights PATH" in each for each in said)
    assert served(weights=folder).keys() == set(digests)
    assert served().keys() == set(digests)


def test_a_bootstrap_started_again_has_the_options_of_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that options are remembered once they led to a link, and not before."""
    create_run(tmp_path / "run", "demo")
    other = with_peer("/ip4/9.9.9.9/tcp/1", Identity.load_or_create(tmp_path / "other.key").peer_id)
    link = str(JoinLink(sign_run(tmp_path / "run").signed.run_id, (other,)))
    seen: list[app.BootstrapOptions] = []

    async def start(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(addresses=(HERE,), close=close)

    async def close() -> None:
        pass

    async def equip(self: app.EntryPoint, node: Any) -> None:
        seen.append(self._options)
        self._publish_link(node)
        raise UserError("Enough.", "Stop.")

    monkeypatch.setattr(app.Node, "start", start)
    monkeypatch.setattr(app.EntryPoint, "_equip", equip)

    def started(*words: str) -> str:
        done = CliRunner().invoke(cli.bootstrap, [str(tmp_path / "run"), *words])
        assert isinstance(done.exception, UserError), done.output + str(done.exception)
        return done.output

    assert "earlier starts" not in started("--announce", "/ip4/127.0.0.1/tcp/1")  # reaches nobody: not remembered
    assert "earlier starts" not in started(
        "--announce",
        HERE,
        "--beside",
        link,
        "--no-relay",
        "--upload-mbit",
        "20",
        "--page",
        "0",
        "--page-token",
        "secret",
    )
    said = started()
    assert f"--no-relay --page 0 --beside {link} --upload-mbit 20.0 (--forget" in said
    assert "secret" not in said
    assert (seen[-1].announce, seen[-1].relay, seen[-1].beside, seen[-1].page_token) == ((HERE,), False, link, "secret")
    assert seen[-1].rates().up.rate == 20 * MBIT
    started("--relay", "--upload-mbit", "0")
    started("--forget")
    assert (seen[-2].relay, seen[-2].upload_mbit, seen[-1].announce) == (True, 0.0, None)


def test_without_a_page_nothing_can_be_public(tmp_path: Path) -> None:
    """Check that the option alone is refused before an identity is made, and that it is remembered like others."""
    create_run(tmp_path / "run", "demo")
    sign_run(tmp_path / "run")
    with pytest.raises(UserError, match="no page that could be public") as raised:
        app.run(place(tmp_path, page_public=True), lambda tag, text: None)
    assert "--page PORT" in raised.value.remedy
    assert not (tmp_path / "home" / "identity.key").exists()
    assert "--no-page-public" in place(tmp_path, page="8080", page_public=False).words()
    words = place(tmp_path, page="8080", page_hide=("two words", "b")).words()
    assert [words[at + 1] for at, word in enumerate(words) if word == "--page-hide"] == ["two words", "b"]
