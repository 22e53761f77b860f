"""Mistakes of a machine's owner: one clear line, one remedy, exit status 2, no traceback.

In this process and mostly without a network: recipe ``local`` uses the same path through the peer.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import click
import numpy as np
import pytest
import torch
from small_corpus import stored_text

from p2ptrain import checkpoint
from p2ptrain.base.errors import DeviceError
from p2ptrain.checkpoint import store
from p2ptrain.cli import run_command
from p2ptrain.manifest import JoinLink, SignedManifest, create_run, load_run, preset, sign_run
from p2ptrain.recipes import RECIPES
from p2ptrain.train.accelerator import explained
from p2ptrain.train.memory import activation_bytes, host_bytes
from peer.cli import admit, contributions, export, generate, invite, peer, revoke
from peer.doctor import doctor
from peer.home import Home, check_no_other
from peer.owner.commands import status
from peer.training import language_trainer

SignedRun = Callable[..., SignedManifest]
STRANGER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
ADDRESS = f"/ip4/127.0.0.1/tcp/31337/p2p/{STRANGER}"


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must be refused, and return its message as one line."""

    def run(*arguments: object, command: object = peer) -> str:
        with pytest.raises(SystemExit) as caught:
            run_command(command, [str(each) for each in arguments], name="p2ptrain peer")
        said = capfd.readouterr().err
        assert caught.value.code == 2, said
        assert "Traceback" not in said
        assert said.startswith("error: ")
        problem, remedy = said.removeprefix("error: ").rstrip("\n").split("\n")
        assert problem
        assert remedy.startswith("  ")
        return f"{problem} |{remedy}"

    return run


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Return a new home without a run."""
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")


def train(home: Home, *arguments: str) -> None:
    """Run the peer of this home to the end, in this process."""
    with pytest.raises(SystemExit) as caught:
        run_command(peer, ["--home", str(home.path), *arguments], name="p2ptrain peer")
    assert caught.value.code == 0


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("http://example.org", "begins with p2ptrain://"),
        ("p2ptrain://abc", "3 of 64 digits"),
        (f"p2ptrain://{'a' * 64}", "cut off"),
        (f"p2ptrain://{'a' * 64}@/ip4/1.2.3.4/tcp/31337", "is cut off or damaged"),
        (f"p2ptrain://{'a' * 64}@{ADDRESS[:-9]}", "is not a peer id"),
        (f"p2ptrain://{'A' * 64}@{ADDRESS}", "64 digits 0-9 a-f"),
    ],
)
def test_a_malformed_link(link: str, why: str, home: Home, refused: Callable[..., str]) -> None:
    assert why in refused(link, "--home", home.path)


def test_a_link_to_another_run(home: Home, signed_run: SignedRun, refused: Callable[..., str]) -> None:
    home.save_manifest(signed_run())
    said = refused(JoinLink("a" * 64, (ADDRESS,)), "--home", home.path)
    assert "the link is to run aaaaaaaaaaaa" in said
    assert "separate home" in said


def test_neither_link_nor_home(refused: Callable[..., str]) -> None:
    assert "Neither a join link nor a home" in refused()


def test_a_home_without_a_run_and_no_link(home: Home, refused: Callable[..., str]) -> None:
    assert "Give a join link" in refused("--home", home.path)
    assert "There is no peer in" in refused(home.path, command=invite)
    assert "There is no peer in" in refused(home.path, "--uses", "2", command=invite)
    assert "no checkpoint" in refused(home.path, home.path / "out", command=export)
    assert "no checkpoint" in refused(home.path, "Once", command=generate)


def test_a_home_whose_checkpoints_are_all_torn(home: Home, refused: Callable[..., str]) -> None:
    (home.checkpoints / "step-00000003").mkdir(parents=True)
    (home.checkpoints / "step-00000003" / "state.json").write_text("{}")
    said = refused(home.path, home.path / "out", command=export)
    assert "is damaged: step-00000003: " in said
    assert "Error" not in said


@pytest.mark.parametrize("temperature", ["nan", "inf", "-1"])
def test_a_temperature_that_is_none(home: Home, temperature: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_command(generate, [str(home.path), "Once", "--temperature", temperature], name="p2ptrain generate")
    assert caught.value.code == 2
    assert "--temperature" in capfd.readouterr().err


def test_addresses_without_a_port_are_read(home: Home) -> None:
    (home.path / "addresses.json").write_text('{"own": ["/ip4/127.0.0.1/tcp/1"], "joined_by": []}')
    assert home.load_addresses().own == ("/ip4/127.0.0.1/tcp/1",)


# --- the home ---------------------------------------------------------------------------------------------------------


def test_a_home_in_use(home: Home, signed_run: SignedRun, refused: Callable[..., str]) -> None:
    home.save_manifest(signed_run())
    with home.locked():
        said = refused("--home", home.path)
    assert "Another process uses" in said
    assert "--home" in said


def test_a_home_below_a_file(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "file").touch()
    said = refused(JoinLink("a" * 64, (ADDRESS,)), "--home", tmp_path / "file" / "home")
    assert "cannot be used: Not a directory" in said


def test_a_directory_where_the_lock_belongs(home: Home, refused: Callable[..., str]) -> None:
    (home.path / "lock").mkdir()
    assert "cannot be used" in refused(JoinLink("a" * 64, (ADDRESS,)), "--home", home.path)


def test_a_corrupt_identity_is_never_overwritten(
    home: Home, signed_run: SignedRun, refused: Callable[..., str]
) -> None:
    home.save_manifest(signed_run())
    home.identity.write_bytes(b"not a key")
    said = refused("--home", home.path)
    assert "is not an identity key" in said
    assert "backup" in said
    assert home.identity.read_bytes() == b"not a key"


@pytest.mark.parametrize("damage", [lambda raw: raw[:-20], lambda raw: b"", lambda raw: raw.replace(b"32", b"33", 1)])
def test_a_corrupt_manifest(
    damage: Callable[[bytes], bytes], home: Home, signed_run: SignedRun, refused: Callable[..., str]
) -> None:
    home.manifest.write_bytes(damage(signed_run().to_bytes()))
    said = refused("--home", home.path)
    assert str(home.manifest) in said
    assert "join again by the run's link" in said


def test_a_run_whose_model_exceeds_the_memory_is_refused_before_it_is_built(
    home: Home, signed_run: SignedRun, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_trainer, "flat_model", lambda *_: pytest.fail("the model would be built"))
    monkeypatch.setattr("peer.space.CHECKPOINT_BYTES", 0)  # the disk would not do, either
    large = {"hidden_size": 16_384, "num_hidden_layers": 256, "num_attention_heads": 128, "num_key_value_heads": 128}
    config = preset("demo", "ab" * 32).model.model_dump()["config"] | large | {"intermediate_size": 65_536}
    home.save_manifest(signed_run(model={"architecture": "LlamaForCausalLM", "config": config}))
    said = refused("--home", home.path)
    assert re.search(r"has [\d,]+ parameters and needs at least [\d.]+ GB of memory, but this machine has", said)


# --- corpus, device, model --------------------------------------------------------------------------------------------


def test_an_index_of_another_text(home: Home, signed_run: SignedRun, refused: Callable[..., str]) -> None:
    section, index = stored_text(np.zeros(5_000), np.zeros(500), 32)
    home.save_manifest(signed_run(corpus=section | {"training_tokens": 4_000}))
    home.files.add(index.root, index.to_bytes())
    assert "4,000 training and 500 held-out tokens, and its index has 5,000 and 500" in refused("--home", home.path)


def test_a_device_that_is_not_there(
    home: Home, signed_run: SignedRun, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    home.save_manifest(signed_run())
    assert "--device cpu" in refused("--home", home.path, "--device", "cuda")
    assert "There is no device 'toaster'" in refused("--home", home.path, "--device", "toaster")


def test_a_model_that_does_not_fit(
    home: Home, signed_run: SignedRun, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2ptrain.train.memory.installed_memory", lambda: 100_000)
    home.save_manifest(signed_run())
    said = refused("--home", home.path)
    assert "18,528 parameters and needs at least" in said
    assert "smaller model" in said


@pytest.mark.parametrize("built", ["flat_model", "place", "LanguageModelTask"])
def test_memory_that_is_installed_but_not_free(
    built: str, home: Home, signed_run: SignedRun, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(language_trainer, built, exhausted)
    home.save_manifest(signed_run())
    assert "does not fit the free memory of cpu" in refused("--home", home.path)


def test_the_accelerator_spares_the_host(signed_run: SignedRun) -> None:
    manifest = signed_run().manifest
    outer_state = math.ceil(host_bytes(RECIPES[manifest.outer.recipe], manifest.outer.fragments) * 18_528)
    activation_bytes(manifest, torch.device("cuda", 0), installed_bytes=outer_state)
    with pytest.raises(DeviceError, match="smaller model"):
        activation_bytes(manifest, torch.device("cpu"), installed_bytes=outer_state)
    in_a_swarm = signed_run(outer__recipe="swarm", outer__exchanges_per_step=1).manifest
    with pytest.raises(DeviceError, match="smaller model"):  # the copies of the fast weights for partners
        activation_bytes(in_a_swarm, torch.device("cuda", 0), installed_bytes=outer_state)
    with pytest.raises(ZeroDivisionError), explained(torch.device("cpu")):
        raise ZeroDivisionError  # errors of the program keep their tracebacks


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_torn_checkpoint_is_told_and_the_one_before_used(
    home: Home, signed_run: SignedRun, capfd: pytest.CaptureFixture[str]
) -> None:
    home.save_manifest(signed_run())
    train(home)
    whole = checkpoint.load_latest(home.checkpoints).checkpoint
    assert whole is not None
    torn = home.checkpoints / "step-00000099"
    torn.mkdir()
    (torn / "state.json").write_bytes((whole.path / "state.json").read_bytes()[:100])
    capfd.readouterr()
    train(home)
    said = capfd.readouterr().out
    assert f"skipped the damaged checkpoint {torn}" in said
    assert f"resumed at step {whole.step}" in said


def test_a_checkpoint_of_another_run(
    home: Home, signed_run: SignedRun, refused: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    home.save_manifest(signed_run())
    train(home)
    capfd.readouterr()
    home.save_manifest(signed_run(run__seed=2))
    said = refused("--home", home.path)
    assert "belongs to another run" in said
    assert str(home.checkpoints) in said


def test_a_checkpoint_of_another_model(home: Home, signed_run: SignedRun, refused: Callable[..., str]) -> None:
    signed = signed_run()
    home.save_manifest(signed)
    checkpoint.save(
        home.checkpoints,
        {name: torch.zeros(3) for name in ("slow", "momentum", "theta")},
        {"step": 7, "run": signed.run_id, "val_loss_first": 1.0},
    )
    assert "does not fit this run's model" in refused("--home", home.path)


# --- the disk ---------------------------------------------------------------------------------------------------------


def test_a_full_disk_while_saving_costs_the_checkpoint_and_not_the_training(
    home: Home, signed_run: SignedRun, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a disk that is full until the last outer step."""
    write = store.write_tensors

    def full(path: Path, tensors: dict[str, torch.Tensor]) -> str:
        if int(path.parent.name[-8:]) < 5:
            raise OSError(28, "No space left on device")
        return write(path, tensors)

    monkeypatch.setattr(store, "write_tensors", full)
    for name in ("SAVE_PERIOD_S", "SAVE_SHARE"):
        monkeypatch.setattr(f"peer.saving.{name}", 0.0)
    home.save_manifest(signed_run())
    train(home)
    said = capfd.readouterr().out
    assert said.count("[save] NOT saved, a checkpoint: ") >= 3
    assert "the disk is full" in said
    found = checkpoint.load_latest(home.checkpoints).checkpoint
    assert found is not None
    assert found.step == 5
    assert json.loads(home.summary.read_text())["finished"]


def test_a_disk_that_is_full_at_the_end(
    home: Home, signed_run: SignedRun, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, tensors: dict[str, torch.Tensor]) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_tensors", full)
    monkeypatch.setattr("peer.saving.LAST_PATIENCE_S", 0.0)
    home.save_manifest(signed_run())
    assert "the disk is full" in refused("--home", home.path)
    assert list(home.checkpoints.iterdir()) == []


# --- admission --------------------------------------------------------------------------------------------------------


@pytest.fixture
def private_run(tmp_path: Path) -> Path:
    create_run(tmp_path / "run", "demo", {"admission.policy": "invite"})
    sign_run(tmp_path / "run")
    return tmp_path / "run"


def test_orders_about_an_open_run(tmp_path: Path, refused: Callable[..., str]) -> None:
    create_run(tmp_path / "run", "demo")
    sign_run(tmp_path / "run")
    for command in (admit, revoke):
        assert "is open" in refused(tmp_path / "run", STRANGER, command=command)
    assert "has printed a link here" in refused(tmp_path / "run", command=invite)
    assert "There is no directory" in refused(tmp_path / "nowhere", STRANGER, command=admit)


def test_an_open_runs_link_is_had_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    create_run(tmp_path / "run", "demo")
    sign_run(tmp_path / "run")
    link = JoinLink(load_run(tmp_path / "run").run_id, (ADDRESS,))
    (tmp_path / "run" / "bootstrap").mkdir()
    (tmp_path / "run" / "bootstrap" / "join-link.txt").write_text(f"{link}\n")
    with pytest.raises(SystemExit) as caught:
        run_command(invite, [str(tmp_path / "run")], name="p2ptrain invite")
    assert not caught.value.code
    out, err = capfd.readouterr()
    assert out == f"{link}\n"
    assert "This run is open" in err
    assert "works on this machine only" in err
    for terms in (("--uses", "0"), ("--expires", "7d")):
        assert "is open and needs no invites" in refused(tmp_path / "run", *terms, command=invite)
    (tmp_path / "run" / "run.key").unlink()  # as on a rented server
    with pytest.raises(SystemExit) as caught:
        run_command(invite, [str(tmp_path / "run")], name="p2ptrain invite")
    assert not caught.value.code
    assert capfd.readouterr().out == f"{link}\n"
    assert "The link belongs to run" in refused(
        tmp_path / "run", "--link", JoinLink("a" * 64, (ADDRESS,)), command=invite
    )


@pytest.mark.parametrize(("holds", "what"), [("run.key", "a run"), ("join-link.txt", "a bootstrap")])
def test_a_place_that_is_no_peers_home(home: Home, holds: str, what: str, refused: Callable[..., str]) -> None:
    (home.path / holds).write_text("")
    before = sorted(home.path.iterdir())
    for said in (refused("--home", home.path), refused(home.path, command=status)):
        assert f"of {what}, not of a peer" in said
    assert sorted(home.path.iterdir()) == before


def test_a_peers_home_stays_one_though_a_bootstrap_was_started_there(home: Home, refused: Callable[..., str]) -> None:
    (home.path / "settings.toml").write_text("")
    (home.path / "bootstrap").mkdir()
    (home.path / "bootstrap" / "join-link.txt").write_text("")
    check_no_other(home.path)  # raises HomeError if there is one
    assert "There is no peer in" in refused(home.path, command=invite)


def test_wrong_orders_about_a_private_run(private_run: Path, refused: Callable[..., str]) -> None:
    assert "is not a peer id" in refused(private_run, "fox", command=revoke)
    said = refused(private_run, command=invite)
    assert "No bootstrap" in said
    assert "--link" in said
    link = JoinLink(load_run(private_run).run_id, (ADDRESS,))
    for expires in ("soon", "0d", "-1d", "366d", "7"):
        assert "30m, 12h or 7d" in refused(private_run, "--link", link, "--expires", expires, command=invite)
    assert "not 0" in refused(private_run, "--link", link, "--uses", "0", command=invite)
    other = JoinLink("a" * 64, (ADDRESS,))
    assert "The link belongs to run" in refused(private_run, "--link", other, command=invite)
    (private_run / "run.key").unlink()
    assert "run.key" in refused(private_run, STRANGER, command=revoke)


@pytest.mark.parametrize(
    ("policy", "how"),
    [
        ("open", "Pass on the link"),
        ("invite", "on the machine that has run.key: p2ptrain invite RUN --link LINK"),
        (
            "allowlist",
            "on the machine that has run.key: p2ptrain admit RUN PEER_ID; then copy RUN/rulings.signed to {run}",
        ),
    ],
)
def test_an_invite_where_the_bootstrap_is_and_the_key_is_not(
    policy: str, how: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    create_run(tmp_path, "demo", {"admission.policy": policy})
    sign_run(tmp_path)
    for name in ("run.key", "manifest.toml"):
        (tmp_path / name).unlink()
    said = refused(tmp_path, command=invite)
    assert f"{tmp_path} contains a run without its run.key." in said
    assert how.format(run=tmp_path) in said
    (tmp_path / "identity.key").write_bytes(b"a peer has lived here")
    assert "contains no address of its peer" in refused(tmp_path, command=invite)


def test_a_home_or_run_where_we_may_not_look(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: Path, **how: bool) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        for method in ("stat", "read_bytes"):
            patch.setattr(Path, method, closed)
        invited, gone_on = refused(tmp_path, command=invite), refused("--home", tmp_path)
    denied = "cannot be read: Permission denied. |  Check its owner and permissions, and those of its directory."
    assert invited == f"{tmp_path} {denied}"
    assert gone_on == f"{tmp_path / 'manifest.signed'} {denied}"


def test_an_invite_is_printed_alone(private_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Check that the invite is all of the output, for use in a pipe."""
    link = JoinLink(load_run(private_run).run_id, (ADDRESS,))
    with pytest.raises(SystemExit) as caught:
        run_command(invite, [str(private_run), "--link", str(link), "--uses", "3"], name="p2ptrain invite")
    said = capfd.readouterr()
    assert caught.value.code == 0, said.err
    assert JoinLink.parse(said.out).addresses == link.addresses
    assert "admits 3 peers until" in said.err
    assert "works on this machine only" in said.err


def test_rulings_are_shown(private_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for command, names, said in (
        (admit, [], "The access list is empty"),
        (revoke, [STRANGER], STRANGER),
        (admit, [], STRANGER),
    ):
        with pytest.raises(SystemExit) as caught:
            run_command(command, [str(private_run), *names], name="p2ptrain")
        assert caught.value.code == 0
        told = capfd.readouterr().out
        assert said in told
        elsewhere = f"If your bootstrap runs elsewhere, copy {private_run / 'rulings.signed'} there."
        assert (elsewhere in told) == (said == STRANGER)  # only then is there another node


# --- the network ------------------------------------------------------------------------------------------------------


def test_a_pages_port_in_use_is_told_before_anybody_hears_of_the_peer(
    home: Home, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it joined first")

    monkeypatch.setattr("peer.app.connect", never)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        link = JoinLink("a" * 64, (ADDRESS,))
        said = refused(link, "--home", home.path, "--local", "--page", other.getsockname()[1])
    assert "The page cannot be served at 127.0.0.1:" in said


@pytest.mark.net
def test_a_port_in_use(home: Home, refused: Callable[..., str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        link = JoinLink("a" * 64, (ADDRESS,))
        said = refused(link, "--home", home.path, "--listen", f"/ip4/127.0.0.1/tcp/{port}", "--local")
    assert f"127.0.0.1:{port} is in use by another program" in said
    assert "--listen" in said


@pytest.mark.parametrize("command", [peer, doctor])
def test_a_directory_instead_of_a_link(home: Home, refused: Callable[..., str], command: click.Command) -> None:
    home.path.mkdir(exist_ok=True)
    said = refused(home.path, command=command)
    assert f"{home.path} is a directory, and no join link." in said
    assert f"--home {home.path}" in said


@pytest.mark.parametrize("command", [peer, doctor])
def test_a_run_directory_instead_of_a_link(tmp_path: Path, refused: Callable[..., str], command: click.Command) -> None:
    create_run(tmp_path / "run", "demo")
    said = refused(tmp_path / "run", command=command)
    assert f"this prints its link: p2ptrain bootstrap {tmp_path / 'run'}" in said


def test_an_empty_link(refused: Callable[..., str]) -> None:
    assert "A join link begins with p2ptrain://, but this is ''" in refused("")


def test_receipts_of_a_run_directory(tmp_path: Path, refused: Callable[..., str]) -> None:
    create_run(tmp_path / "run", "demo")
    assert "is the directory of a run, not of a peer" in refused(tmp_path / "run", command=contributions)


def test_an_address_that_is_none(home: Home, refused: Callable[..., str]) -> None:
    said = refused(JoinLink("a" * 64, (ADDRESS,)), "--home", home.path, "--listen", "localhost:80")
    assert "'localhost:80' is not a usable address" in said


@pytest.mark.parametrize("name", ["n" * 33, "ab\x1b[31mred", "\u202eevil"])
def test_a_nickname_that_cannot_be_shown_as_it_is(refused: Callable[..., str], home: Home, name: str) -> None:
    """Check that the command rejects a nickname, as settings.toml does, instead of shortening it."""
    said = refused(JoinLink("a" * 64, (ADDRESS,)), "--home", home.path, "--nickname", name)
    assert said.startswith("--nickname takes at most 32 printable characters.")
