"""Repository on loopback that answers as the Hugging Face hub does, and fails as a test asks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest

REVISION = "a" * 40
NAME = "someone/model"
REFUSALS = {401: "RepoNotFound", 403: "GatedRepo", 404: "RevisionNotFound"}


class FakeHub(ThreadingHTTPServer):
    """Hub with one model or data set.

    ``failures`` lists, by file, what its next requests get: a status, ``torn`` (half of what was asked, then the line
    breaks), ``short`` (half of it as if it were all), ``false`` (as many bytes, the latter ones zero) or ``head 429``
    (the status at once, also for the file's size).

    Args:
        kind: ``models`` or ``datasets``.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes], kind: str = "models", name: str = NAME) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.kind, self.name = kind, name
        self.refusal = 0
        """Status of every answer; 0: none."""
        self.failures: dict[str, list[str]] = {}
        self.asked: list[tuple[str, str, str]] = []
        """Method, file and range of each request."""
        self.agents: set[str] = set()
        self.sent_bytes = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def serving(files: dict[str, bytes], kind: str = "models", name: str = NAME) -> Iterator[FakeHub]:
    with FakeHub(files, kind, name) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def use(hub_url: str, cache: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the hub's client ask this hub alone, keep its files below ``cache``, and not sleep between its attempts."""
    constants = huggingface_hub.constants
    patch.setattr(constants, "ENDPOINT", hub_url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub_url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(cache / "their cache"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 256)  # the client loses the chunk in which a transfer breaks
    patch.setattr("time.sleep", lambda seconds: None)
    patch.setenv("XDG_CACHE_HOME", str(cache / "cache"))


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        repository = hub.name if hub.kind == "models" else f"{hub.kind}/{hub.name}"
        if hub.refusal:
            self._answer(hub.refusal, b"", {"X-Error-Code": REFUSALS.get(hub.refusal, ""), "Retry-After": "0"})
        elif re.fullmatch(f"/api/{hub.kind}/{hub.name}/tree/{REVISION}/?.*", path):
            listed = [
                {"type": "file", "path": name, "size": len(each), "oid": "1" * 40} for name, each in hub.files.items()
            ]
            self._answer(200, json.dumps(listed).encode())
        elif re.fullmatch(f"/api/{hub.kind}/{hub.name}(/revision/.*)?", path):
            about = {"id": hub.name, "sha": REVISION, "siblings": [{"rfilename": name} for name in hub.files]}
            self._answer(200, json.dumps(about).encode())
        elif (found := re.fullmatch(f"/{repository}/resolve/{REVISION}/(.*)", path)) and found[1] in hub.files:
            hub.asked.append((self.command, found[1], self.headers.get("Range", "")))
            hub.agents.add(self.headers["User-Agent"])
            self._send(found[1], hub.files[found[1]])
        else:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    def _send(self, name: str, content: bytes) -> None:
        hub = self.server
        is_large = name.endswith(".safetensors")
        digest = hashlib.sha256(content).hexdigest() if is_large else hashlib.sha1(content).hexdigest()
        headers = {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        failures = hub.failures.get(name, [])
        failure = failures.pop(0) if failures and (self.command == "GET" or failures[0].startswith("head")) else ""
        failure = failure.removeprefix("head ")
        if failure.isdigit():
            self._answer(int(failure), b"", {"Retry-After": "0"})
            return
        asked = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (int(asked[1]), int(asked[2] or len(content) - 1)) if asked else (0, len(content) - 1)
        part = content[first : last + 1]
        if failure == "false":
            part = part[: len(part) // 3] + bytes(len(part) - len(part) // 3)
        if failure == "short":
            part = part[: len(part) // 2]
        headers["Content-Length"] = str(len(part))
        if asked:
            headers["Content-Range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
        self._answer(206 if asked else 200, part[: len(part) // 2] if failure == "torn" else part, headers)
        if failure == "torn":
            self.close_connection = True

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "X-Repo-Commit": REVISION, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
            self.server.sent_bytes += len(content)
