"""What the doctor finds about a run's text, tokenizer and weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from small_corpus import stored_text
from tokenizers import Tokenizer, models, pre_tokenizers

from p2ptrain.base.errors import ManifestError, WeightsError
from p2ptrain.base.ids import PeerId
from p2ptrain.manifest import Manifest, preset, with_changes
from p2ptrain.tokens.index import ShardIndex
from p2ptrain.tokens.opened import user_store
from peer.doctor import command
from peer.doctor.findings import FindingState, ok
from peer.doctor.material import check_data, check_tokenizer, check_weights
from peer.home import Home


@pytest.fixture
def tokenizer(tmp_path: Path) -> bytes:
    """A tokenizer.json with 300 ids."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"token {number}" for number in range(44))]
    made = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made.to_str().encode()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShardIndex:
    """The index of a text that is stored where peers of this user have it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return stored_text(np.arange(9000) % 251, np.arange(2000) % 251, 256)[1]


def run(tokenizer: bytes, index: ShardIndex, vocabulary: int = 512) -> Manifest:
    changes = {
        "model.config.vocab_size": vocabulary,
        "tokenizer": {"kind": "file", "sha256": hashlib.sha256(tokenizer).hexdigest()},
        "corpus": {
            "kind": "shards",
            "root": index.root,
            "training_tokens": index.training_tokens,
            "held_out_tokens": index.held_out_tokens,
        },
    }
    return with_changes(preset("demo", "ab" * 32), changes)


def test_text_is_here_or_others_send_it(tokenizer: bytes, index: ShardIndex, tmp_path: Path) -> None:
    manifest, home = run(tokenizer, index), Home(tmp_path / "home")
    found = check_data(manifest, home, None)
    assert (found.state, "is not here" in found.found) == (FindingState.NOTE, True)
    asked = ok("data", "somebody sends it")
    assert check_data(manifest, home, asked) is asked
    home.files.add(index.root, index.to_bytes())
    user_store().path(index.digests[0]).unlink()
    assert check_data(manifest, home, None) == ok("data", "1 of the 2 shards of the run's text are here")
    other = with_changes(manifest, {"corpus.training_tokens": 7})
    with pytest.raises(ManifestError, match="7 training"):
        check_data(other, home, None)


def test_a_tokenizer_comes_from_peers(tokenizer: bytes, index: ShardIndex, tmp_path: Path) -> None:
    manifest, home = run(tokenizer, index), Home(tmp_path / "home")
    digest = hashlib.sha256(tokenizer).hexdigest()
    assert check_tokenizer(manifest, home).state is FindingState.NOTE
    assert "sends" in check_tokenizer(manifest, home, {digest: PeerId("12D3KooWabcdef")}).found
    missing = check_tokenizer(manifest, home, {digest: None})
    assert (missing.state, "no node" in missing.found) == (FindingState.BAD, True)
    home.files.add(digest, tokenizer)
    assert "300 ids, and the model has 512" in check_tokenizer(manifest, home).found
    with pytest.raises(ManifestError, match="300 ids, but the model has only 256"):
        check_tokenizer(run(tokenizer, index, vocabulary=256), home)


def test_a_run_that_needs_no_file(tmp_path: Path) -> None:
    manifest, home = preset("demo", "ab" * 32), Home(tmp_path / "home")
    found = [check_data(manifest, home, None), check_tokenizer(manifest, home)]
    assert {each.state for each in found} == {FindingState.OK}


def test_initial_weights_are_here_or_can_be_had(tokenizer: bytes, index: ShardIndex, tmp_path: Path) -> None:
    home, weights = Home(tmp_path / "home"), tmp_path / "weights"
    weights.write_bytes(b"weights")
    assert check_weights(run(tokenizer, index), home, None) == []
    digest = hashlib.sha256(b"weights").hexdigest()
    manifest = with_changes(run(tokenizer, index), {"model.init": {"kind": "file", "sha256": [digest]}})
    [missing] = check_weights(manifest, home, None, {digest: None})
    assert (missing.check, missing.state) == ("weights", FindingState.BAD)
    assert "--weights" in missing.fix
    assert [each.state for each in check_weights(manifest, home, weights)] == [FindingState.OK]
    hub = with_changes(manifest, {"model.init": {"kind": "hub", "name": "someone/model", "revision": "a" * 40}})
    assert "downloaded at the first start" in check_weights(hub, home, None)[0].found
    with pytest.raises(WeightsError, match=r"those of someone/model of the hub"):
        check_weights(hub, home, weights)
    (home.checkpoints / "step-00000001").mkdir(parents=True)
    assert "replaces" in check_weights(hub, home, None)[0].found


def test_each_check_has_its_finding(tokenizer: bytes, index: ShardIndex, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    assert [each.state for each in command._material(None, home, None, {}, None)] == [FindingState.SKIPPED] * 3
    found = command._material(run(tokenizer, index), home, None, {}, None)
    assert [(each.check, each.state) for each in found] == [
        ("run", FindingState.OK),
        ("data", FindingState.NOTE),
        ("tokenizer", FindingState.NOTE),
    ]
