"""Weights of the hub: what is asked and kept, what a hub that refuses, waits or tears a file leads to."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from p2ptrain.base.errors import HomeError, WeightsError
from p2ptrain.data import hub_weights
from p2ptrain.data.hub_weights import HubUnavailableError, commit_of, download_weights, most_bytes
from p2ptrain.manifest import Decoder, preset

sys.path.insert(0, str(Path(__file__).parent.parent))
from hub import NAME, REVISION, FakeHub, serving, use

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
CONTENT = bytes(range(256)) * 40


@pytest.fixture
def model() -> Decoder:
    return preset("demo", "ab" * 32).model


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with a model in one file, an empty cache, and a client that does not sleep between its attempts."""
    with serving({SINGLE: CONTENT}) as hub:
        use(hub.url, tmp_path, monkeypatch)
        yield hub


def download(model: Decoder) -> list[bytes]:
    return [path.read_bytes() for path in download_weights(NAME, REVISION, model)]


def test_a_model_is_downloaded_once(hub: FakeHub, model: Decoder) -> None:
    assert download(model) == [CONTENT]
    asked = len(hub.asked)
    assert download(model) == [CONTENT]
    hub.refusal = 500
    assert download(model) == [CONTENT], "needs the hub again"
    assert len(hub.asked) == asked


def test_shards_are_those_of_the_index(hub: FakeHub, model: Decoder) -> None:
    index = {"weight_map": {"b": SHARDS[1], "a": SHARDS[0], "c": SHARDS[1]}}
    hub.files = {INDEX: json.dumps(index).encode(), SHARDS[0]: b"one", SHARDS[1]: b"two"}
    assert download(model) == [b"one", b"two"]


def test_the_clients_own_cache_is_used(hub: FakeHub, model: Decoder, tmp_path: Path) -> None:
    folder = tmp_path / "their cache" / "models--someone--model" / "snapshots" / REVISION
    folder.mkdir(parents=True)
    (folder / SINGLE).write_bytes(b"theirs")
    assert download(model) == [b"theirs"]
    assert hub.asked == []


@pytest.mark.parametrize(
    ("status", "passes"), [(401, False), (403, False), (404, False), (429, True), (500, True), (503, True)]
)
def test_each_refusal_names_its_status(hub: FakeHub, model: Decoder, status: int, passes: bool) -> None:
    hub.refusal = status
    with pytest.raises(WeightsError, match=str(status)) as caught:
        download(model)
    assert "someone/model at revision " in caught.value.problem
    assert "start again" in caught.value.remedy
    assert isinstance(caught.value, HubUnavailableError) == passes
    assert "\n" not in caught.value.problem
    hub.refusal = 0
    assert download(model) == [CONTENT]


def test_a_hub_that_heals_is_continued(hub: FakeHub, model: Decoder) -> None:
    hub.failures[SINGLE] = ["torn", "torn", "500", "429", "torn"]
    with contextlib.suppress(HubUnavailableError):
        download(model)
    assert download(model) == [CONTENT]
    assert hub.failures[SINGLE] == []


def test_a_damaged_file_of_the_clients_cache_is_not_used(hub: FakeHub, model: Decoder, tmp_path: Path) -> None:
    folder = tmp_path / "their cache" / "models--someone--model"
    (folder / "snapshots" / REVISION).mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "blobs" / hashlib.sha256(CONTENT).hexdigest()).write_bytes(b"torn")
    (folder / "snapshots" / REVISION / SINGLE).symlink_to(folder / "blobs" / hashlib.sha256(CONTENT).hexdigest())
    with pytest.raises(HubUnavailableError, match="is damaged: its sha256 is "):
        download(model)
    assert download(model) == [CONTENT]


def test_a_file_of_the_cache_that_cannot_be_read_is_said(
    hub: FakeHub, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    download(model)
    monkeypatch.setattr(hashlib, "file_digest", fail)
    with pytest.raises(HomeError, match="Input/output error"):
        download(model)


def test_false_bytes_are_thrown_away(hub: FakeHub, model: Decoder) -> None:
    hub.failures[SINGLE] = ["false"]
    with pytest.raises(HubUnavailableError, match=r"model\.safetensors of .* is damaged: its sha256 is "):
        download(model)
    assert download(model) == [CONTENT]
    assert hub.asked[-1] == ("GET", SINGLE, "")


def test_a_model_without_safetensors_is_refused(hub: FakeHub, model: Decoder) -> None:
    hub.files = {"pytorch_model.bin": b"\x80\x02"}
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor .*, and pickles .* never loaded"):
        download(model)
    assert hub.sent_bytes == 0


@pytest.mark.parametrize(
    "index",
    [
        b"no JSON",
        b"[" * 100_000,
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": 3}}',
        b'{"weight_map": {"a": "../../.ssh/id_rsa.safetensors"}}',
        b'{"weight_map": {"a": "/etc/passwd"}}',
        b'{"weight_map": {"a": "pytorch_model.bin"}}',
        json.dumps({"weight_map": {str(n): f"{n}.safetensors" for n in range(65)}}).encode(),
    ],
)
def test_a_hostile_index_is_refused(hub: FakeHub, model: Decoder, index: bytes) -> None:
    hub.files = {INDEX: index, SINGLE.replace("model", "x"): b""}
    with pytest.raises(WeightsError, match="cannot be used"):
        download(model)


def test_too_large_files_are_not_downloaded(hub: FakeHub, model: Decoder, monkeypatch: Any) -> None:
    monkeypatch.setattr(hub_weights, "most_bytes", lambda model: len(CONTENT) - 1)
    with pytest.raises(WeightsError, match="have 10,240 bytes, but those of the described model take at most 10,239"):
        download(model)
    hub.files = {INDEX: b" " * (hub_weights.MAX_INDEX_BYTES + 1)}
    with pytest.raises(WeightsError, match="at most 4,194,304 are read"):
        download(model)
    assert hub.sent_bytes == 0


def test_a_missing_shard_is_said(hub: FakeHub, model: Decoder) -> None:
    hub.files = {INDEX: json.dumps({"weight_map": {"a": SHARDS[0]}}).encode()}
    with pytest.raises(WeightsError, match=f"{SHARDS[0]} of someone/model .* is missing"):
        download(model)


def test_offline_says_so(hub: FakeHub, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match="HF_HUB_OFFLINE is set") as caught:
        download(model)
    assert not isinstance(caught.value, HubUnavailableError)


def test_an_unreachable_hub_may_come_back(tmp_path: Path, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    use("http://127.0.0.1:1", tmp_path, monkeypatch)
    with pytest.raises(HubUnavailableError, match="could not be downloaded"):
        download(model)


def test_a_branch_becomes_its_commit(hub: FakeHub) -> None:
    assert commit_of(NAME, "main") == commit_of(NAME, "") == commit_of(NAME, REVISION) == REVISION
    with pytest.raises(WeightsError, match="is not a model of the Hugging Face hub"):
        commit_of("../model", "")
    hub.refusal = 404
    with pytest.raises(WeightsError, match="does not give someone/model at revision main"):
        commit_of(NAME, "")


def test_the_largest_files_of_a_model_fit(model: Decoder) -> None:
    assert most_bytes(model) > 4 * (3 * 10**5 + 256 * 96)
