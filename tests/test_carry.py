"""Simulation of who carries a run's text: lines are shared, shards arrive, and adversarial peers cost little."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import carry
from bench.home_lines import MBIT, HomeLine, LineTransfer, LineWorld
from bench.shard_swarm import CarryCase, Swarm
from p2ptrain.tokens.index import SHARD_BYTES

FEW = CarryCase(peers=8, joining_s=5.0, corpus_tokens=20_000_000, duration_s=600.0)


def test_transfers_share_a_line_equally() -> None:
    world, ends = LineWorld(), dict[str, float]()
    sender, slow, fast = HomeLine(100.0, 8.0), HomeLine(2.0, 8.0), HomeLine(100.0, 8.0)

    def begin(name: str, receiver: HomeLine, size_bytes: float) -> None:
        world.send(LineTransfer(sender, receiver, lambda: ends.setdefault(name, world.now), size_bytes))

    begin("slow", slow, 2 * MBIT)  # at 2 Mbit/s, the receiver's share
    begin("fast", fast, 8 * MBIT)  # at 4 Mbit/s for a second, then at 8
    world.run(10.0)
    assert ends == pytest.approx({"slow": 1.0, "fast": 1.5})
    assert sender.sent_bytes == pytest.approx(10 * MBIT)


def test_all_peers_get_their_text_and_each_shard_comes_from_somewhere() -> None:
    swarm = Swarm(FEW, 1)
    swarm.run()
    received = sum(len(peer.here) for peer in swarm.peers) * SHARD_BYTES
    sent = swarm.bootstrap.line.sent_bytes + sum(peer.line.sent_bytes for peer in swarm.peers)
    assert all(peer.begun_at is not None for peer in swarm.peers)
    assert received <= sent <= 2 * received
    assert sum(peer.line.sent_bytes for peer in swarm.peers) > 0


def test_a_seed_gives_one_result() -> None:
    figures = [carry.measure(FEW, seed) for seed in (1, 1, 2)]
    assert figures[0] == figures[1] != figures[2]


def test_a_peer_alone_trains_from_the_bootstrap() -> None:
    found = carry.measure(replace(FEW, peers=1), 1)
    assert found["first_step_last_s"] < 60.0
    assert found["bootstrap_corpora"] > 0.0
    assert found["peer_sent_most_mb"] == 0.0


def test_adversarial_peers_and_peers_that_leave_stop_nobody() -> None:
    swarm = Swarm(replace(FEW, peers=20, adversarial=0.5, leaving=0.3), 1)
    swarm.run()
    staying = [peer for peer in swarm.peers if not peer.lie and peer.left_at is None]
    assert len([peer for peer in swarm.peers if peer.lie]) == 10
    assert len([peer for peer in swarm.peers if peer.left_at is not None]) == 6
    for peer in staying:
        has_been_long = swarm.world.now - peer.joined_at > 120.0
        assert peer.begun_at is not None or not has_been_long


def test_a_mirror_relieves_the_bootstrap() -> None:
    with_mirror = carry.measure(replace(FEW, mirror_mbit_s=1000.0), 1)
    assert with_mirror["bootstrap_corpora"] == 0.0 < with_mirror["mirror_corpora"]


def test_the_command_prints_runs_and_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(carry.CASES, "alone", ("one CPU", replace(FEW, peers=1)))
    monkeypatch.setattr(carry, "FOLDER", tmp_path)
    done = CliRunner().invoke(carry.main, ["--case", "alone", "--seed", "1", "--seed", "2"], catch_exceptions=False)
    assert [json.loads(line)["seed"] for line in done.output.splitlines()] == [1, 2]
    (tmp_path / "runs.jsonl").write_text(done.output)
    (tmp_path / "CARRY.md").write_text("# Page\n\n<!-- carry: begin -->\n<!-- carry: end -->\n")
    CliRunner().invoke(carry.main, ["--page", str(tmp_path / "runs.jsonl")], catch_exceptions=False)
    assert "| one CPU |" in (tmp_path / "CARRY.md").read_text()
