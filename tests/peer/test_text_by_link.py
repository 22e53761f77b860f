"""A run with its own text: peers that have only the link get it from the bootstrap and from each other, and train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from swarm import ENDLESS, Program, Swarm, until

from p2ptrain.data.file_store import FileStore
from p2ptrain.tokens.index import SHARD_BYTES, ShardIndex
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.writing import ShardWriter

pytestmark = pytest.mark.net

SHARDS = 3  # all of which a peer needs soon


def made_text(folder: Path) -> tuple[dict[str, Any], ShardIndex]:
    """Write shards of some text; return the corpus section and the index."""
    writer = ShardWriter(ShardStore(folder), 2)
    ids = np.random.default_rng(0).integers(0, 255, SHARDS * SHARD_BYTES // 2)
    writer.add(ids, is_training=True)
    writer.add(ids[:50_000] // 2, is_training=False)
    index = writer.finish(32)
    tokens = {"training_tokens": index.training_tokens, "held_out_tokens": index.held_out_tokens}
    return {"kind": "shards", "root": index.root, **tokens}, index


def text_swarm(folder: Path, policy: str = "open") -> tuple[Swarm, ShardIndex]:
    """Return a swarm whose run has a text of several shards."""
    section, index = made_text(folder)
    swarm = Swarm(**ENDLESS, corpus=section, admission__policy=policy)
    (swarm.root / "run" / "shards").symlink_to(folder)
    FileStore(swarm.root / "run" / "files").add(index.root, index.to_bytes())
    return swarm, index


def peer(swarm: Swarm, name: str, *arguments: str, **named: Any) -> Program:
    """Start a peer with a cache of its own."""
    swarm.environment["XDG_CACHE_HOME"] = str(swarm.root / f"cache of {name}")
    return swarm.peer(name, *arguments, **named)


def store(swarm: Swarm, name: str) -> ShardStore:
    return ShardStore(swarm.root / f"cache of {name}" / "p2ptrain" / "shards")


def sources(program: Program) -> set[str]:
    return {note["source"] for note in program.events("got shard")}


def doctor(link: str, home: Path) -> list[dict[str, str]]:
    """Return what the doctor finds about the run's text for a peer that has nothing but the link."""
    command = [sys.executable, "-m", "p2ptrain.cli", "doctor", link, "--home", str(home), "--local", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return [each for each in json.loads(done.stdout)["findings"] if each["check"] == "data"]


def test_peers_get_the_text_from_each_other(tmp_path: Path) -> None:
    swarm, index = text_swarm(tmp_path / "text")
    with swarm:
        bootstrap = swarm.bootstrap()
        anna = peer(swarm, "anna")
        anna.wait_for("first inner step")
        assert sources(anna) == {bootstrap.peer_id}
        until("anna to have it all", lambda: len(store(swarm, "anna").held(index)) == SHARDS + 1)

        bob = peer(swarm, "bob")
        bob.wait_for("exchanged")
        until("bob to have it all", lambda: len(store(swarm, "bob").held(index)) == SHARDS + 1)
        assert anna.peer_id in sources(bob)

        for digest in index.digests[:SHARDS]:  # from now on, anna sends something else, and the bootstrap nothing
            path = store(swarm, "anna").path(digest)
            path.unlink()  # not overwritten: her trainer has mapped it
            path.write_bytes(bytes(SHARD_BYTES))
            ShardStore(tmp_path / "text").path(digest).unlink()
        carl = peer(swarm, "carl")
        carl.wait_for("first inner step")
        assert {note["source"] for note in carl.events("got shard") if note["shard"] < SHARDS} == {bob.peer_id}
        until("carl to have it all", lambda: len(store(swarm, "carl").held(index)) == SHARDS + 1)
        assert all(note["source"] == anna.peer_id[-6:] for note in carl.events("shard refused"))

        carl.wait_for_more("exchanged")
        assert carl.terminate() == 0, carl.output
        again = peer(swarm, "carl", link=None)
        assert again.wait_for("resumed")["step"] > 0
        again.wait_for("first inner step")
        assert again.events("got shard") == []
        assert not again.events("no text")


def test_the_doctor_fetches_a_shard_and_a_peer_waits_for_one(tmp_path: Path) -> None:
    swarm, index = text_swarm(tmp_path / "text")
    with swarm:
        swarm.bootstrap()
        [found] = doctor(swarm.link, tmp_path / "nobody")
        assert found["state"] == "ok"
        held_out = ShardStore(tmp_path / "text").path(index.digests[-1])
        data = held_out.read_bytes()
        held_out.unlink()
        [found] = doctor(swarm.link, tmp_path / "nobody")
        assert found["state"] == "bad"
        assert "does not have it" in found["found"]
        anna = peer(swarm, "anna")
        anna.wait_to_say("training waits for text, 1 shard")
        held_out.write_bytes(data)
        anna.wait_for("first inner step")
        anna.wait_to_say("the text that training waited for is here")
