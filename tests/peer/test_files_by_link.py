"""A run with its own tokenizer and text: a peer that has only the link trains, and starts again without options."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from swarm import ENDLESS, Swarm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from p2ptrain.admission import author
from p2ptrain.data.file_store import FileStore
from p2ptrain.manifest import JoinLink

pytestmark = pytest.mark.net


def own_files(folder: Path) -> tuple[Path, Path]:
    """A text of our own, and a tokenizer.json made from it."""
    text = folder / "my corpus.txt"
    text.write_text("".join(f"{number} green bottles stood on wall {number * number}.\n" for number in range(4_000)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train([str(text)], trainer)
    tokenizer.save(str(folder / "my tokenizer.json"))
    return text, folder / "my tokenizer.json"


def doctor(link: str, home: Path) -> dict[str, str]:
    """Return what the doctor finds about the run's files for a peer that has nothing but the link."""
    command = [sys.executable, "-m", "p2ptrain.cli", "doctor", link, "--home", str(home), "--local", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    found = json.loads(done.stdout)["findings"]
    return {each["check"]: each["state"] for each in found if each["check"] in ("data", "tokenizer")}


@pytest.mark.parametrize("policy", ["open", pytest.param("invite", marks=pytest.mark.lab)])
def test_a_peer_with_nothing_but_the_link_trains(tmp_path: Path, policy: str) -> None:
    text, tokenizer = own_files(tmp_path)
    digests = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in (text, tokenizer)}
    changes = {
        "corpus": {"kind": "file", "sha256": digests[text], "format": "text", "max_tokens": 1_000_000},
        "tokenizer": {"kind": "file", "sha256": digests[tokenizer]},
        "model.config.vocab_size": 300,
        "admission.policy": policy,
    }
    with Swarm(**ENDLESS, **changes) as swarm:
        bootstrap = swarm.bootstrap("--data", str(text), "--tokenizer", str(tokenizer))
        bootstrap.wait_to_say("peers that lack the run's tokenizer get it here")
        link = swarm.link
        if policy == "open":
            assert doctor(swarm.link, tmp_path / "nobody") == {"data": "ok", "tokenizer": "ok"}
        if policy == "invite":
            link = str(author.invite(swarm.root / "run", JoinLink.parse(link), 3600, 2, time.time())[0])
        anna = swarm.peer("anna", link=link)
        assert anna.wait_for("got file", what="tokenizer")["peer"] == bootstrap.peer_id
        anna.wait_for("got file", what="corpus")
        anna.wait_for("first inner step")

        if policy == "invite":
            return
        bob = swarm.peer("bob", link=link)  # finds the tokens in the shared cache, so it needs the tokenizer alone
        bob.wait_for("exchanged")
        assert [note["what"] for note in bob.events("got file")] == ["tokenizer"]

        assert anna.terminate() == 0, anna.output
        assert f"to resume: p2ptrain peer --home {anna.home}" in anna.output
        again = swarm._start(anna.home, "-m", "peer", "--home", str(anna.home))
        again.wait_for("first inner step")
        assert again.events("remembered")[0]["options"] == "--local --nickname anna"
        assert again.events("got file") == []
        stored = FileStore(swarm.root / "anna" / "files")
        assert all(stored.find(digest) for digest in digests.values())
