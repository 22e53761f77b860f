"""Three real peers on loopback train one model to the end of their run, and their files are usable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm import TOGETHER, Program, Swarm

from p2ptrain import checkpoint
from p2ptrain.manifest import JoinLink
from p2ptrain.train.model import flat_model
from peer import exporting, loading
from peer.cli import export, generate, invite

pytestmark = pytest.mark.net


@dataclass(frozen=True)
class Ended:
    swarm: Swarm
    peers: list[Program]
    statuses: list[int]
    summaries: list[dict[str, Any]]
    latecomer: Program
    """Started when the others had left or were reading their final loss."""
    farewells: str
    """What a peer that started when all had left knew of the run's end."""


@pytest.fixture(scope="module")
def ended() -> Iterator[Ended]:
    # Held-out text of one batch: on a busy machine a peer would skip part of a longer one, and losses would differ.
    with Swarm(run__tokens=600_000, corpus__validation_fraction=0.0015) as swarm:
        bootstrap = swarm.bootstrap()
        slow = Path(__file__).with_name("slow_reader.py")
        scripts = {"anna": slow, "bert": TOGETHER, "cleo": TOGETHER}
        peers = [swarm.peer(name, script=script) for name, script in scripts.items()]
        swarm.begin_together(peers)
        others = [each.end() for each in peers[1:]]
        peers[0].wait_for("finished")
        latecomer = swarm.peer("dora")
        others.append(latecomer.end())
        (peers[0].home / "read").touch()
        statuses = [peers[0].end(), *others]
        assert statuses == [0, 0, 0, 0], "\n".join(each.output[-2000:] for each in (*peers, latecomer))
        beginner = swarm.peer("emil")
        why = beginner.wait_for("ended before")["why"]
        beginner.interrupt()
        beginner.end()
        assert bootstrap.terminate() == 0
        assert swarm.processes() == []
        assert swarm.socket_folders() == []
        summaries = [json.loads((each.home / "summary.json").read_text()) for each in peers]
        yield Ended(swarm, peers, statuses, summaries, latecomer, why)


def weights(directory: Path) -> torch.Tensor:
    found = checkpoint.load_latest(directory).checkpoint
    assert found is not None
    return found.tensors["slow"]


def disagreement(points: list[torch.Tensor]) -> float:
    mean = torch.stack(points).mean(dim=0)
    return float(torch.stack([(point - mean).norm() for point in points]).mean() / mean.norm())


def test_every_peer_learned(ended: Ended) -> None:
    for summary in ended.summaries:
        assert summary["val_loss_last"] < 0.75 * summary["val_loss_first"]
        assert summary["finished"]
        assert summary["tokens"] > 0


def test_all_began_at_the_same_weights(ended: Ended) -> None:
    first = [summary["val_loss_first"] for summary in ended.summaries]
    assert first == pytest.approx([first[0]] * 3, rel=1e-5)


def test_every_peer_exchanged_and_nobody_trained_alone(ended: Ended) -> None:
    for summary in ended.summaries:
        assert summary["exchanges_ok"] >= 10
        assert summary["received_bytes"] > 0
        assert summary["exchanges_failed"] <= 3 + 0.1 * summary["exchanges_ok"]


def test_the_peers_agree(ended: Ended) -> None:
    assert disagreement([weights(each.home / "trained") for each in ended.peers]) < 0.2
    assert disagreement([weights(each.home / "checkpoints") for each in ended.peers]) < 0.03


def test_a_latecomer_gets_the_model_of_peers_that_read_their_final_loss(ended: Ended) -> None:
    summary = json.loads((ended.latecomer.home / "summary.json").read_text())
    story = f"{summary}\n{ended.latecomer.output}\n{ended.summaries[0]}\n{ended.peers[0].output}"
    assert summary["finished"]
    assert summary["tokens"] < 10_000, story  # of 600,000: it may begin before the directory has answered
    homes = [ended.peers[0].home, ended.latecomer.home]
    assert torch.equal(*(weights(each / "checkpoints") for each in homes)), story
    assert summary["val_loss_last_tokens"] == ended.summaries[0]["val_loss_last_tokens"], story
    assert summary["val_loss_last"] == pytest.approx(ended.summaries[0]["val_loss_last"], rel=1e-5), story
    assert "[join] the run is over: this peer has the final weights of " in ended.latecomer.output


def test_a_peer_that_starts_when_all_have_left_hears_of_the_end(ended: Ended) -> None:
    assert ended.farewells.endswith(" of its peers announced its end and left")


def test_the_log_tells_the_story(ended: Ended) -> None:
    for each in ended.peers:
        kinds = ("listening", "found", "started", "first inner step", "exchanged", "trained", "finished", "saved")
        for kind in (*kinds, "final loss", "to export"):
            assert each.events(kind), kind
        assert "[exchange] exchanged with " in each.output
        assert "Traceback" not in each.output


def test_the_export_loads_and_computes_the_same(ended: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(exporting, "_load", loading.answer)  # in this process, which takes a fraction of the time
    home = ended.peers[0].home
    export.main([str(home), str(tmp_path / "out")], standalone_mode=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()

    manifest = ended.swarm.signed.manifest
    ours = flat_model(manifest.model, manifest.run.seed, torch.device("cpu"))
    ours.theta.copy_(weights(home / "checkpoints"))
    tokens = torch.tensor([list(b"To be, or not to be")])
    with torch.no_grad():
        assert torch.allclose(loaded(tokens).logits, ours.module.eval()(tokens).logits, atol=1e-5)


def test_the_model_continues_a_text(ended: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(ended.peers[0].home), "ROMEO:", "--tokens", "40"]
    generate.main(arguments, standalone_mode=False)
    first = capsys.readouterr().out
    generate.main(arguments, standalone_mode=False)
    assert first.startswith("ROMEO:")
    assert len(first) > 30
    assert capsys.readouterr().out == first


def test_every_home_prints_a_join_link(ended: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    for each in ended.peers:
        invite.main([str(each.home)], standalone_mode=False)
        link = JoinLink.parse(capsys.readouterr().out)
        assert link.run_id == ended.swarm.signed.run_id
        assert link.addresses[0].endswith(each.peer_id)
