"""``p2ptrain publish``: what the hub would get, and what each of its refusals says; nothing is lost."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from click.testing import CliRunner, Result
from trained_model import load_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from p2ptrain import checkpoint
from p2ptrain.base.errors import UserError
from p2ptrain.manifest import SIGNED_FILE, SignedManifest
from peer.home import Home
from peer.trained import publishing
from peer.trained.publish_command import publish

FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "manifest.signed",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(publish, [str(each) for each in arguments])


def error_of(ran: Result) -> UserError:
    assert isinstance(ran.exception, UserError), ran.output
    return ran.exception


class Hub:
    """Hub on loopback that answers the creation of a repository, and keeps what is uploaded."""

    def __init__(self) -> None:
        self.status = 200
        self.created: list[dict[str, Any]] = []
        self.uploads: list[dict[str, bytes]] = []
        self.failure: Exception | None = None

        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                asked = json.loads(self.rfile.read(size) or b"{}")
                hub.created.append(asked)
                name = f"{asked.get('organization') or 'me'}/{asked.get('name')}"
                url = f"http://127.0.0.1:{hub.server.server_port}/{name}"
                body = json.dumps({"url": url, "name": name, "error": "said the hub"}).encode()
                self.send_response(hub.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def upload_folder(self, *, folder_path: Path, **_: Any) -> None:
        if self.failure is not None:
            raise self.failure
        self.uploads.append({path.name: path.read_bytes() for path in folder_path.iterdir()})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    found = Hub()
    thread = threading.Thread(target=found.server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{found.server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_test")
    monkeypatch.setattr(
        huggingface_hub.HfApi, "upload_folder", lambda api, **options: found.upload_folder(**options), raising=True
    )
    monkeypatch.chdir(tmp_path)
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


@pytest.mark.usefixtures("in_process")
def test_a_dry_run_writes_what_the_hub_would_get(home: Home, hub: Hub, tmp_path: Path) -> None:
    ran = run(home.path, "me/model", "--dry-run", tmp_path / "out")
    assert ran.exception is None, ran.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    assert hub.created == hub.uploads == []
    assert "hf upload me/model" in ran.stdout
    signed = home.load_manifest(None)
    assert signed is not None
    assert SignedManifest.from_bytes((tmp_path / "out" / SIGNED_FILE).read_bytes()).run_id == signed.run_id
    text = (tmp_path / "out" / "README.md").read_text()
    assert "outer step 7" in text
    assert "trained on 1,234 tokens itself" in text
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").num_parameters() == 18_528
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("To be")["input_ids"] == list(b"To be")


@pytest.mark.usefixtures("in_process")
def test_the_hub_gets_the_files_of_the_dry_run(home: Home, hub: Hub, tmp_path: Path) -> None:
    assert run(home.path, "me/model", "--dry-run", tmp_path / "out", "--license", "mit").exception is None
    ran = run(home.path, "me/model", "--license", "mit", "--public")
    assert ran.exception is None, ran.output
    assert hub.created == [{"name": "model", "organization": "me", "visibility": "public", "type": "model"}]
    assert hub.uploads == [{path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}]
    assert yaml.safe_load(hub.uploads[0]["README.md"].decode().split("---\n")[1])["license"] == "mit"
    assert not (tmp_path / "published-model").exists()
    assert "published." in ran.stdout


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("status", [401, 409, 418])
def test_after_a_refusal_the_files_are_kept_for_the_hub_s_own_command(
    home: Home, hub: Hub, tmp_path: Path, status: int
) -> None:
    hub.status = status
    error = error_of(run(home.path, "me/model", "--license", "mit"))
    assert error.problem.startswith("me/model was not published: ")
    assert str(status) in error.problem
    assert error.remedy.endswith("hf upload me/model published-model --private")
    assert {path.name for path in (tmp_path / "published-model").iterdir()} == FILES
    assert {each["visibility"] for each in hub.created} == {"private"}
    assert hub.uploads == []


@pytest.mark.usefixtures("in_process")
def test_a_repository_that_exists_is_updated_if_asked(home: Home, hub: Hub, tmp_path: Path) -> None:
    hub.failure = ConnectionError("Connection reset by peer")
    error = error_of(run(home.path, "me/model", "--license", "mit", "--public"))
    assert "Connection reset by peer" in error.problem
    assert error.remedy.endswith("hf upload me/model published-model")
    hub.failure, hub.status = None, 409
    shutil.rmtree(tmp_path / "published-model")
    assert run(home.path, "me/model", "--license", "mit", "--update").exception is None
    assert len(hub.uploads) == 1


def test_what_cannot_be_published_is_told_before_anything_is_computed(
    home: Home, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "export", None)
    assert "needs a licence" in error_of(run(home.path, "me/model")).problem
    for name in ("model", "me/", "me/a/b"):
        assert "is not the name of a repository" in error_of(run(home.path, "--license", "mit", "--", name)).problem
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "There is no token for the Hugging Face hub" in error_of(run(home.path, "me/m", "--license", "mit")).problem
    assert hub.created == []


@pytest.mark.usefixtures("in_process")
def test_the_card_names_the_peer_only_if_asked(home: Home, hub: Hub, tmp_path: Path) -> None:
    peer = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    theta = load_model(home)[0].theta
    checkpoint.save(home.checkpoints, {"slow": theta}, {"step": 9, "peer": peer})
    for options, is_named in (([], False), (["--peer-id"], True)):
        out = tmp_path / f"out{len(options)}"
        assert run(home.path, "me/model", "--dry-run", out, *options).exception is None
        assert any(peer.encode() in path.read_bytes() for path in out.iterdir()) == is_named
