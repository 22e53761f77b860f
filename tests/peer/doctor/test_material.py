"""What the doctor finds about a run's packages, text and tokenizer."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from p2ptrain.data.corpus import open_corpus
from tokenizers import Tokenizer, models, pre_tokenizers

from p2ptrain.base.errors import CorpusError, ManifestError, WeightsError
from p2ptrain.base.ids import PeerId
from p2ptrain.data.file_store import named_files
from p2ptrain.manifest import Manifest, preset, with_changes
from peer.doctor import command
from peer.doctor.findings import FindingState
from peer.doctor.material import check_data, check_packages, check_tokenizer, check_weights
from peer.home import Home
from peer.owner.settings import Settings
from peer.start_options import StartFile, StartOptions


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Return a corpus file and a tokenizer.json with 300 ids."""
    corpus, tokenizer = tmp_path / "my text.txt", tmp_path / "tokenizer.json"
    corpus.write_text("To be, or not to be. " * 2000)
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"token {number}" for number in range(44))]
    made = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(tokenizer))
    return {"corpus": corpus, "tokenizer": tokenizer}


def run(files: dict[str, Path], vocabulary: int = 512, **corpus: Any) -> Manifest:
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    changes = {
        "model.config.vocab_size": vocabulary,
        "tokenizer": {"kind": "file", "sha256": digests["tokenizer"]},
        "corpus": {
            "kind": "file",
            "sha256": digests["corpus"],
            "max_tokens": 100_000,
            "validation_fraction": 0.1,
            **corpus,
        },
    }
    return with_changes(preset("demo", "ab" * 32), changes)


def test_files_that_are_not_here_may_come_from_peers(files: dict[str, Path], tmp_path: Path) -> None:
    manifest, home = run(files), Home(tmp_path / "home")
    for found in check_data(manifest, tmp_path, home, None), check_tokenizer(manifest, home, None):
        assert (found.state, "is not here" in found.found) == (FindingState.NOTE, True)
    assert "--tokenizer FILE" in found.fix
    digests = {each.sha256 for each in named_files(manifest)}
    for holder, state, word in (
        (PeerId("12D3KooWabcdef"), FindingState.OK, "sends"),
        (None, FindingState.BAD, "no node"),
    ):
        holders = dict.fromkeys(digests, holder)
        for found in (
            check_data(manifest, tmp_path, home, None, holders),
            check_tokenizer(manifest, home, None, holders),
        ):
            assert (found.state, word in found.found) == (state, True)
    assert not home.path.exists()


def test_the_owners_files_and_those_of_earlier_starts_are_checked(files: dict[str, Path], tmp_path: Path) -> None:
    manifest, home = run(files), Home(tmp_path / "home")
    given = [
        check_data(manifest, tmp_path, home, files["corpus"]),
        check_tokenizer(manifest, home, files["tokenizer"]),
    ]
    home.path.mkdir()
    StartFile(home.path).save(StartOptions(data=files["corpus"], tokenizer=files["tokenizer"]), Settings())
    remembered = [check_data(manifest, tmp_path, home, None), check_tokenizer(manifest, home, None)]
    assert given == remembered
    assert {each.state for each in given} == {FindingState.OK}
    assert "300 ids, and the model has 512" in given[1].found
    files["corpus"].write_text("another text")
    assert check_data(manifest, tmp_path, home, None).state is FindingState.NOTE
    with pytest.raises(CorpusError, match="is not this run's corpus"):
        check_data(manifest, tmp_path, home, files["corpus"])


def test_a_chat_template_that_is_not_here(files: dict[str, Path], tmp_path: Path) -> None:
    template = b"{{ messages }}"
    digest = hashlib.sha256(template).hexdigest()
    manifest, home = run(files, format="jsonl", template=digest), Home(tmp_path / "home")
    found = check_data(manifest, tmp_path, home, files["corpus"])
    assert "the template with sha256" in found.found
    assert "--template FILE" in found.fix
    home.files.add(digest, template)
    assert check_data(manifest, tmp_path, home, files["corpus"]).state is FindingState.OK


def test_a_tokenizer_that_does_not_fit_the_model(files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="300 ids, but the model has only 256"):
        check_tokenizer(run(files, vocabulary=256), Home(tmp_path / "home"), files["tokenizer"])


def test_a_run_that_needs_no_file(tmp_path: Path, files: dict[str, Path]) -> None:
    manifest, home = preset("demo", "ab" * 32), Home(tmp_path / "home")
    found = [
        check_packages(manifest, tmp_path),
        check_data(manifest, tmp_path, home, None),
        check_tokenizer(manifest, home, None),
    ]
    assert {each.state for each in found} == {FindingState.OK}
    with pytest.raises(CorpusError, match="Omit --data"):
        check_data(manifest, tmp_path, home, files["corpus"])
    open_corpus(manifest, tmp_path)
    assert "in the cache" in check_data(manifest, tmp_path, home, None).found


def test_packages_that_the_text_needs(files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    found = check_packages(run(files, format="parquet", text_field="text"), tmp_path)
    assert (found.state, "pyarrow" in found.found) == (FindingState.BAD, True)
    assert "extra data" in found.fix
    assert check_packages(run(files), tmp_path).state is FindingState.OK


def test_initial_weights_are_here_or_can_be_had(files: dict[str, Path], tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    assert check_weights(run(files), home, None) == []
    digest = hashlib.sha256(files["tokenizer"].read_bytes()).hexdigest()
    manifest = with_changes(run(files), {"model.init": f"sha256:{digest}"})
    [missing] = check_weights(manifest, home, None, {digest: None})
    assert (missing.check, missing.state) == ("weights", FindingState.BAD)
    assert "--weights" in missing.fix
    assert [each.state for each in check_weights(manifest, home, files["tokenizer"])] == [FindingState.OK]
    hub = with_changes(manifest, {"model.init": f"hf:someone/model@{'a' * 40}"})
    assert "downloaded at the first start" in check_weights(hub, home, None)[0].found
    with pytest.raises(WeightsError, match=r"those of someone/model of the hub"):
        check_weights(hub, home, files["tokenizer"])
    (home.checkpoints / "step-00000001").mkdir(parents=True)
    assert "replaces" in check_weights(hub, home, None)[0].found


def test_each_check_has_its_finding(files: dict[str, Path], tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    assert [each.state for each in command._material(None, home, None, None, None, {})] == [FindingState.SKIPPED] * 4
    found = command._material(run(files), home, files["tokenizer"], files["tokenizer"], None, {})
    assert [(each.check, each.state) for each in found] == [
        ("run", FindingState.OK),
        ("packages", FindingState.OK),
        ("data", FindingState.BAD),
        ("tokenizer", FindingState.OK),
    ]
