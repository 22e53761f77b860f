"""``p2ptrain publish``: what the hub would get, and what each of its refusals says; nothing is lost."""

from __future__ import annotations

import json
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
from p2ptrain.manifest import SIGNED_FILE, JoinLink, SignedManifest
from peer.home import Home
from peer.trained import publishing
from peer.trained.publish_command import publish
from peer.trained.publishing import Publication

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

    def upload_folder(self, *, repo_id: str, folder_path: Path, allow_patterns: list[str], **_: Any) -> None:
        if self.failure is not None:
            raise self.failure
        paths = [path.relative_to(folder_path).as_posix() for path in folder_path.rglob("*") if path.is_file()]
        sent = huggingface_hub.utils.filter_repo_objects(paths, allow_patterns=allow_patterns)
        self.uploads.append({name: (folder_path / name).read_bytes() for name in sent})


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
    assert "The card names no licence" in ran.stderr
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


@pytest.mark.parametrize(
    ("status", "why", "remedy"),
    [
        (401, "the hub does not accept the token (401)", "hf auth login"),
        (403, "your token may not write there (403)", "may write to me"),
        (404, "the hub knows no such owner (404)", "Check that me is you"),
        (409, "the repository exists already, or changed meanwhile (409)", "--update"),
        (413, "a file is larger than the hub takes (413)", "more room"),
        (418, "the hub refused it (418: ", "Do what it says"),
        (429, "the hub asks for fewer requests (429)", "Wait some minutes"),
        (500, "the hub has a problem of its own (500)", "Wait some minutes"),
    ],
)
def test_a_refusal_is_a_sentence(
    hub: Hub, tmp_path: Path, status: int, why: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client's own retries
    hub.status = status
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError) as caught:
        publishing.upload(tmp_path, Publication("me/model", "mit"), "p2ptrain publish again")
    assert caught.value.problem.startswith(f"me/model was not published: {why}")
    assert remedy in caught.value.remedy
    assert caught.value.remedy.endswith("p2ptrain publish again")
    assert {each["visibility"] for each in hub.created} == {"private"}


@pytest.mark.usefixtures("in_process")
def test_after_a_refusal_the_files_are_kept_and_nothing_is_computed_again(
    home: Home, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.status = 401
    error = error_of(run(home.path, "me/model", "--license", "mit"))
    assert error.remedy.endswith(f"p2ptrain publish {home.path} me/model --upload published-model")
    assert {path.name for path in (tmp_path / "published-model").iterdir()} == FILES
    hub.status = 200
    monkeypatch.setattr(publishing, "export", None)
    ran = run(home.path, "me/model", "--upload", "published-model")
    assert ran.exception is None, ran.output
    assert set(hub.uploads[0]) == FILES


@pytest.mark.usefixtures("in_process")
def test_after_a_torn_upload_the_repository_is_updated(home: Home, hub: Hub) -> None:
    hub.failure = ConnectionError("Connection reset by peer")
    error = error_of(run(home.path, "me/model", "--license", "mit"))
    assert "the connection to the hub failed (Connection reset by peer)" in error.problem
    assert error.remedy.endswith("--upload published-model --update")
    hub.failure, hub.status = None, 409  # it exists now, which --update accepts
    assert run(home.path, "me/model", "--upload", "published-model", "--update").exception is None
    assert len(hub.uploads) == 1


def test_what_the_hub_would_refuse_is_told_before_anything_is_computed(
    home: Home, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "export", None)
    assert "needs a licence" in error_of(run(home.path, "me/model")).problem
    for name in ("model", "me/", "me/a/b", "me/a--b", "me/../b", "-/-"):
        assert "is not the name of a repository" in error_of(run(home.path, "--license", "mit", "--", name)).problem
    for licence, near in (("My Licence", "unlicense"), ("Apache-2.0", "apache-2.0"), ("apache-2", "apache-2.0")):
        error = error_of(run(home.path, "me/m", "--license", licence))
        assert "is not the identifier of a licence of the hub" in error.problem
        assert near in error.remedy.partition("; if yours")[0].split()
    assert (
        "is not the code of a language"
        in error_of(run(home.path, "me/m", "--license", "mit", "--language", "Klingon_")).problem
    )
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "There is no token for the Hugging Face hub" in error_of(run(home.path, "me/m", "--license", "mit")).problem
    assert run(home.path, "me/m", "--dry-run", "a", "--upload", "b").exit_code == 2
    assert hub.created == []


@pytest.mark.usefixtures("in_process")
def test_a_link_of_another_run_is_refused_and_nothing_is_left(home: Home, tmp_path: Path) -> None:
    peer = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    link = JoinLink("0" * 64, (f"/ip4/127.0.0.1/tcp/1/p2p/{peer}",))
    error = error_of(run(home.path, "me/model", "--dry-run", tmp_path / "out", "--link", link))
    assert "but the link is to run 000000000000…" in error.problem
    assert not (tmp_path / "out").exists()


def test_an_invite_is_kept_out_of_the_card(home: Home, tmp_path: Path) -> None:
    link = f"p2ptrain://{'a' * 64}@/ip4/46.10.1.2/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    error = error_of(run(home.path, "me/model", "--dry-run", tmp_path / "out", "--link", f"{link}#abc"))
    assert "contains an invite, which is secret" in error.problem
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("in_process")
def test_only_a_whole_folder_of_this_run_is_sent(home: Home, hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "cannot be read" in error_of(run(home.path, "me/model", "--upload", tmp_path / "nowhere")).problem
    assert run(home.path, "me/model", "--dry-run", out).exception is None
    assert "names no licence" in error_of(run(home.path, "me/model", "--upload", out)).problem
    card = (out / "README.md").read_text()
    (out / "README.md").write_text(card.replace("---\n", "---\nlicense: mit\n", 1))
    signed = home.load_manifest(None)
    assert signed is not None
    raw = (out / SIGNED_FILE).read_bytes()
    (out / SIGNED_FILE).write_bytes(b"no manifest")
    assert "manifest" in error_of(run(home.path, "me/model", "--upload", out)).problem
    (out / SIGNED_FILE).write_bytes(raw)
    weights = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").unlink()
    assert "has no weights" in error_of(run(home.path, "me/model", "--upload", out)).problem
    (out / "model.safetensors").write_bytes(weights)
    (out / "config.json").rename(out / "config")
    assert "lacks config.json" in error_of(run(home.path, "me/model", "--upload", out)).problem
    assert hub.uploads == []


@pytest.mark.usefixtures("in_process")
def test_what_the_owner_says_at_the_upload_reaches_the_card(home: Home, hub: Hub, tmp_path: Path) -> None:
    """Check that edits of the card stay."""
    out = tmp_path / "out"
    signed = home.load_manifest(None)
    assert signed is not None
    peer = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    link = JoinLink(signed.run_id, (f"/ip4/127.0.0.1/tcp/1/p2p/{peer}",))
    ran = run(home.path, "me/model", "--dry-run", out)
    assert ran.stdout.rstrip().endswith(f"--upload {out} --license ID")
    card = out / "README.md"
    card.write_text(card.read_text().replace("## Limitations", "## My own words: é\n\n## Limitations"))
    said = ["--license", "cc-by-4.0", "--language", "en", "--language", "de", "--link", link]
    hub.status = 401
    assert "token" in error_of(run(home.path, "me/model", "--upload", out, *said)).problem
    hub.status = 200
    ran = run(home.path, "me/model", "--upload", out)  # as the message says
    assert ran.exception is None, ran.output
    sent = hub.uploads[0]["README.md"].decode()
    data = yaml.safe_load(sent.split("---\n")[1])
    assert (data["license"], data["language"]) == ("cc-by-4.0", ["en", "de"])
    assert data["library_name"] == "transformers"
    assert f"The run's join link is `{link}`. `manifest.signed` describes" in sent
    assert "## My own words: é" in sent
    other = JoinLink("0" * 64, link.addresses)
    assert "but the link is to run" in error_of(run(home.path, "me/model", "--upload", out, "--link", other)).problem
    card.write_text("---\nlicense: [\n---\n")
    assert "is not a model card" in error_of(run(home.path, "me/model", "--upload", out)).problem
    assert len(hub.uploads) == 1


@pytest.mark.usefixtures("in_process")
def test_only_what_publish_wrote_is_sent_and_the_rest_is_named(home: Home, hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(home.path, "me/model", "--dry-run", out, "--license", "mit").exception is None
    (out / "run.key").write_text("secret")
    (out / "own_tokenizer.py").write_text("import os")
    (out / "notes").mkdir()
    (out / "notes" / "README.md").write_text("secret")
    (out / "model-00001-of-00009.safetensors").write_bytes(b"other")
    ran = run(home.path, "me/model", "--upload", out, "--license", "apache-2.0")
    assert ran.exception is None, ran.output
    assert set(hub.uploads[0]) == FILES
    assert "did not write them: model-00001-of-00009.safetensors, notes, own_tokenizer.py, run.key." in ran.stderr
    assert yaml.safe_load(hub.uploads[0]["README.md"].decode().split("---\n")[1])["license"] == "apache-2.0"


@pytest.mark.usefixtures("in_process")
def test_the_card_names_the_peer_only_if_asked(home: Home, hub: Hub, tmp_path: Path) -> None:
    peer = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    theta = load_model(home)[0].theta
    checkpoint.save(home.checkpoints, {"slow": theta}, {"step": 9, "peer": peer})
    for options, is_named in (([], False), (["--peer-id"], True)):
        out = tmp_path / f"out{len(options)}"
        assert run(home.path, "me/model", "--dry-run", out, *options).exception is None
        assert any(peer.encode() in path.read_bytes() for path in out.iterdir()) == is_named
    assert "--peer-id is for a card that is written now" in run(home.path, "me/m", "--upload", out, "--peer-id").stderr
