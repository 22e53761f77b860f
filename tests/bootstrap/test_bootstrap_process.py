"""The bootstrap as a process, with its own p2pd on loopback."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import uvloop

from bootstrap import app
from p2ptrain.base.errors import UserError
from p2ptrain.base.ids import RunId
from p2ptrain.manifest import MANIFEST_FILE, SIGNED_FILE, JoinLink, create_run, load_run, sign_run
from p2ptrain.net.address import split_peer
from p2ptrain.net.directory import DhtDirectory
from p2ptrain.net.identity import Identity
from p2ptrain.net.manifest_service import fetch_manifest
from p2ptrain.net.node import Node
from p2ptrain.swarm.messages import PeerState, Presence

pytestmark = pytest.mark.net

PATIENCE_S = 60.0


@dataclass
class Running:
    """A bootstrap process and its output so far."""

    process: subprocess.Popen[bytes]
    log: Path
    home: Path

    @property
    def printed(self) -> str:
        return self.log.read_text()

    def until(self, said: str) -> str:
        wait_for(lambda: said in self.printed or self.process.poll() is not None)
        assert said in self.printed, self.printed
        return self.printed

    @property
    def link(self) -> JoinLink:
        return JoinLink.parse((self.home / "join-link.txt").read_text())


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition on real processes holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def signed_run(directory: Path) -> Path:
    create_run(directory, "demo")
    sign_run(directory)
    return directory


def started(run: Path, *arguments: str) -> Running:
    log = run.parent / f"{run.name}-{len(list(run.parent.glob('*.log')))}.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "bootstrap", str(run), *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ)
    home = Path(arguments[arguments.index("--home") + 1]) if "--home" in arguments else run / "bootstrap"
    return Running(process, log, home)


def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bootstrap", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Start one bootstrap for the whole file: each start costs seconds of imports."""
    running = started(signed_run(tmp_path_factory.mktemp("bootstrap") / "run"), "--local")
    try:
        running.until("[peers]")
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def test_it_prints_a_join_link_that_parses(bootstrap: Running) -> None:
    link = bootstrap.link
    assert link.run_id == load_run(bootstrap.home.parent).run_id
    assert f"[join] p2ptrain peer '{link}' --local" in bootstrap.printed
    assert all(address.startswith("/ip4/127.0.0.1/tcp/") for address in link.addresses)


def test_it_serves_the_manifest_and_tells_of_peers(bootstrap: Running, tmp_path: Path) -> None:
    link = bootstrap.link
    place, keeper = split_peer(link.addresses[0])
    identity = Identity.load_or_create(tmp_path / "identity.key")

    async def visit() -> bytes:
        listen = ["/ip4/127.0.0.1/tcp/0"]
        node = await Node.start(identity, link.run_id, listen=listen, bootstraps=link.addresses, local=True)
        try:
            async with asyncio.timeout(PATIENCE_S):
                manifest = await fetch_manifest(node, keeper, [place], link.run_id)
                while not node.has_company:
                    await asyncio.sleep(0.05)
                directory = DhtDirectory(node.dht, link.run_id)
                for state, step in ((PeerState.TRAINING, 12), (PeerState.LEAVING, 13)):
                    await directory.announce(identity.sign(presence(identity, link.run_id, node, state, step)))
                    said = "fox" if state is PeerState.TRAINING else "left"
                    await asyncio.to_thread(bootstrap.until, said)
                return manifest
        finally:
            await node.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        manifest = runner.run(visit())
    assert manifest == (bootstrap.home.parent / SIGNED_FILE).read_bytes()
    assert f"[peers] fox ({identity.peer_id[-6:]}) came: training, step 12, " in bootstrap.printed
    assert f"[peers] fox ({identity.peer_id[-6:]}) left" in bootstrap.printed


def presence(identity: Identity, run: RunId, node: Node, state: PeerState, step: int) -> Presence:
    return Presence(identity.peer_id, run, node.addresses, state, step, 1000.0, True, "fox", time.time(), 60.0)


def test_a_second_one_beside_it_names_both_and_meets_its_peers(bootstrap: Running, tmp_path: Path) -> None:
    link = bootstrap.link
    second = started(bootstrap.home.parent, "--local", "--home", str(tmp_path), "--beside", str(link))
    try:
        second.until("[join]")
        own, *others = JoinLink.parse((tmp_path / "join-link.txt").read_text()).addresses
        assert own not in link.addresses
        assert tuple(others) == link.addresses
        identity = Identity.load_or_create(tmp_path / "peer.key")

        async def announce() -> None:
            """Announce a record through the first bootstrap alone."""
            node = await Node.start(
                identity, link.run_id, listen=["/ip4/127.0.0.1/tcp/0"], bootstraps=link.addresses, local=True
            )
            try:
                async with asyncio.timeout(PATIENCE_S):
                    while not node.has_company:
                        await asyncio.sleep(0.05)
                    directory = DhtDirectory(node.dht, link.run_id)
                    await directory.announce(
                        identity.sign(presence(identity, link.run_id, node, PeerState.TRAINING, 1))
                    )
                    await asyncio.to_thread(second.until, f"fox ({identity.peer_id[-6:]}) came")
            finally:
                await node.close()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(announce())
    finally:
        second.process.kill()
        second.process.wait()


def test_a_bootstrap_of_another_run_is_no_company(bootstrap: Running, tmp_path: Path) -> None:
    run = signed_run(tmp_path / "run")
    place = app.BootstrapOptions(run, tmp_path / "home", local=True, beside=str(bootstrap.link))
    with pytest.raises(UserError) as caught:
        app.run(place, lambda tag, text: None)
    assert "The link of the other bootstrap is of run" in caught.value.problem


def test_its_home_is_its_own(bootstrap: Running) -> None:
    assert f"Another process uses {bootstrap.home}." in refused(bootstrap.home.parent).problem


def test_it_restarts_p2pd_on_the_same_port(bootstrap: Running) -> None:
    link = bootstrap.link
    children = psutil.Process(bootstrap.process.pid).children()
    assert len(children) == 1
    children[0].kill()
    bootstrap.until("back; the join link is the same")
    port = int(link.addresses[0].split("/")[4])
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S):
        pass
    assert bootstrap.link == link


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.lab)])
def test_a_signal_ends_it_and_nothing_is_left(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="p2pt-", dir="/tmp", ignore_cleanup_errors=True) as sockets:
        monkeypatch.setenv("TMPDIR", sockets)
        # Under nohup, the tests ignore the signal, and a child would inherit that.
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        running = started(signed_run(tmp_path / "run"), "--local")
        signal.signal(signal.SIGHUP, before)
        running.until("[peers]")
        children = psutil.Process(running.process.pid).children(recursive=True)
        assert children
        assert list(Path(sockets).glob("p2ptrain.*"))
        running.process.send_signal(number)
        assert running.process.wait(PATIENCE_S) == 0
        assert "[bootstrap] stopped" in running.printed
        assert not psutil.wait_procs(children, timeout=PATIENCE_S)[1]
        assert list(Path(sockets).glob("p2ptrain.*")) == []


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = ended(str(signed_run(tmp_path / "run")), "--local", "--listen", f"/ip4/127.0.0.1/tcp/{port}")
    assert done.returncode == 2
    assert f"127.0.0.1:{port} is in use by another program" in done.stderr
    assert "--listen" in done.stderr


def refused(run: Path, *, local: bool = True) -> UserError:
    """Return the error that ends a bootstrap started in this process."""
    place = app.BootstrapOptions(run, run / "bootstrap", listen=("/ip4/127.0.0.1/tcp/0",), local=local)
    with pytest.raises(UserError) as caught:
        app.run(place, lambda tag, text: None)
    return caught.value


def test_loopback_alone_is_refused_without_local(tmp_path: Path) -> None:
    error = refused(signed_run(tmp_path / "run"), local=False)
    assert "No other machine can reach this one" in error.problem
    assert not (tmp_path / "run" / "bootstrap" / "join-link.txt").exists()


def test_an_unsigned_or_edited_run_is_refused(tmp_path: Path) -> None:
    create_run(tmp_path / "run", "demo")
    assert f"p2ptrain sign {tmp_path / 'run'}" in refused(tmp_path / "run").remedy
    sign_run(tmp_path / "run")
    path = tmp_path / "run" / MANIFEST_FILE
    path.write_text(path.read_text().replace("weight_decay = 0.1", "weight_decay = 0.2"))
    assert "training.weight_decay: 0.1 -> 0.2" in refused(tmp_path / "run").problem


def test_a_peers_home_is_left_as_it_is(tmp_path: Path) -> None:
    home = signed_run(tmp_path / "home")
    (home / "run.key").unlink()
    (home / "settings.toml").write_text("")
    before = sorted(home.iterdir())
    assert f"{home} is a peer's home, which a bootstrap cannot use" in refused(home).problem
    place = app.BootstrapOptions(signed_run(tmp_path / "run"), home, local=True)
    with pytest.raises(UserError, match="is a peer's home"):
        app.run(place, lambda tag, text: None)
    assert sorted(home.iterdir()) == before


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = signed_run(tmp_path / "run")
    (run / "bootstrap").write_text("a file where the home belongs")
    error = refused(run)
    assert str(run / "bootstrap") in error.problem
    assert "--home" in error.remedy
