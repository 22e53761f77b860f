"""A data set of the hub, served on loopback, that stops midway: reading continues, and nobody else is contacted."""

import io
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

REVISION = "0" * 40
API = f"/api/datasets/someone/texts/(?:revision|tree)/{REVISION}/?(.*)"
FILE = f"/datasets/someone/texts/resolve/{REVISION}/(.*)"
ROWS = 400


def texts(first: int) -> list[str]:
    return [f"document {number} " * 20 for number in range(first, first + ROWS)]


def shard(first: int) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": texts(first)}), buffer, row_group_size=100)
    return buffer.getvalue()


class FakeHub(ThreadingHTTPServer):
    """Hub with one data set of two shards; the second one fails as ``failures`` say, once for each request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHubHandler)
        self.shards = {"data/train-0.parquet": shard(0), "data/train-1.parquet": shard(ROWS)}
        self.failures = ["reset", "429", "torn"]
        self.sent: list[str] = []


class FakeHubHandler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, shards = unquote(urlsplit(self.path).path), self.server.shards
        if found := re.fullmatch(API, path):
            listed = [
                {"type": "file", "path": name, "size": len(each), "oid": "1" * 40} for name, each in shards.items()
            ]
            if not found[1]:
                listed = [{"type": "directory", "path": "data", "oid": "1" * 40}]
            about = {"id": "someone/texts", "sha": REVISION, "siblings": [{"rfilename": name} for name in shards]}
            self._answer(200, json.dumps(listed if "/tree/" in path else about).encode())
        elif (found := re.fullmatch(FILE, path)) and (content := shards.get(found[1])):
            self._shard(found[1], content)
        else:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    def _shard(self, name: str, content: bytes) -> None:
        self.server.sent.append(name)
        first, last = map(int, re.findall(r"\d+", self.headers["Range"]))
        part = content[first : last + 1]
        failure = self.server.failures.pop(0) if name.endswith("1.parquet") and self.server.failures else ""
        if failure == "429":
            self._answer(429, b"", {"Retry-After": "0"})
        elif failure == "reset":
            self._answer(206, part[: len(part) // 2], {"Content-Length": str(len(part))})
            self.close_connection = True
        else:
            torn = part[: len(part) // 3] + bytes(len(part) - len(part) // 3)
            self._answer(206, torn if failure == "torn" else part)

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "X-Repo-Commit": REVISION, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


START = """
import json
import sys
from pathlib import Path

reached = set()
sys.addaudithook(lambda event, args: reached.add(str(args[0])) if event == "socket.getaddrinfo" else None)

from p2ptrain.base.errors import CorpusError
from p2ptrain.data import sources, stream
from p2ptrain.data.corpus import open_corpus
from p2ptrain.manifest import preset, with_changes

stream.PIECE_CHARACTERS, sources.SAVED_CHARACTERS = 5_000, 20_000
manifest = with_changes(preset("demo", "ab" * 32), {
    "corpus": {"kind": "hub", "name": "someone/texts", "revision": "0" * 40, "validation_fraction": 0.1},
    "training.sequence_length": 16,
})
told = []
try:
    open_corpus(
        manifest,
        Path(sys.argv[1]),
        tell=lambda tokens, most: told.append(tokens),
        report=lambda counts, tokens: print(counts.documents, counts.text_bytes, counts.skipped, tokens),
    )
except CorpusError as error:
    print(error.problem)
print(json.dumps([told[0], told[-1], sorted(reached)]))
"""


@pytest.fixture
def hub():
    with FakeHub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.net
def test_a_hub_that_stops_midway_is_continued(hub, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HOME": str(tmp_path / "home")}
    environment["HF_ENDPOINT"] = f"http://127.0.0.1:{hub.server_port}"

    def start() -> tuple[str, list[object]]:
        arguments = [sys.executable, "-c", START, str(tmp_path / "cache")]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        said, figures = done.stdout.splitlines()
        return said, json.loads(figures)

    said, (first, last, reached) = start()
    assert said.startswith("The corpus someone/texts (")
    assert "not a parquet file" in said
    assert hub.failures == []  # the library repeats a request after a reset and 429
    assert reached == ["127.0.0.1"]
    expected = "".join(f"{text}\0" for text in texts(0) + texts(ROWS)).encode()
    said, (first_again, _, _) = start()
    assert last - 25_000 < first_again <= last, "it does not continue"
    assert first < 1000
    assert said == f"{2 * ROWS} {len(expected) - 2 * ROWS} 0 {len(expected)}"
    (stream,) = (tmp_path / "cache").glob("*.npy")
    assert np.load(stream).tobytes() == expected
    assert {path.suffix for path in stream.parent.iterdir()} == {".npy", ".lock", ".json"}
