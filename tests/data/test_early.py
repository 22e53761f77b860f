"""What would stop every peer at its first start is found before a run is signed."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers

from p2ptrain.base.errors import CorpusError, UserError
from p2ptrain.cli import cli
from p2ptrain.data import early
from p2ptrain.data.early import check_text
from p2ptrain.data.file_store import FILES_FOLDER
from p2ptrain.manifest import create_run

TEXT = "A line of a text that is long enough for a run.\n" * 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "p2ptrain"


def file_of(path: Path, content: bytes) -> tuple[Path, dict[str, Any]]:
    path.write_bytes(content)
    return path, {"kind": "file", "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize(
    ("content", "fields", "problem"),
    [
        (b"", {}, "corpus is an empty file"),
        (b'{"body": "x"}\n' * 9, {"format": "jsonl"}, "no field 'text', but 'body'"),
        (b"PAR1 and more", {"format": "jsonl"}, "invalid JSON"),
        (TEXT.encode(), {"format": "parquet"}, "cannot be read as parquet"),
        ("café ".encode("latin-1") * 99, {}, "is not UTF-8 text"),
        (b"a text of less than thirty-six bytes", {}, "too short: 36 tokens"),
    ],
)
def test_a_run_with_an_unusable_text_is_not_signed(
    tmp_path: Path, content: bytes, fields: dict[str, Any], problem: str
) -> None:
    run = tmp_path / "run"
    _, corpus = file_of(tmp_path / "text", content)
    create_run(run, "demo", {"corpus": corpus | fields})
    (run / FILES_FOLDER).mkdir()
    (run / FILES_FOLDER / str(corpus["sha256"])).write_bytes(content)
    error = CliRunner().invoke(cli, ["sign", str(run)]).exception
    assert isinstance(error, UserError), error
    assert problem in str(error)
    assert not (run / "manifest.signed").exists()


def test_warnings_on_the_tokenizer_appear_before_signing_too(manifest_with: Any, tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "A": 1, "text": 2, "of": 3, "line": 4, "a": 5}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer, section = file_of(tmp_path / "tokenizer.json", made.to_str().encode())
    data, corpus = file_of(tmp_path / "text", b"A line of a text with words of a text\n" * 400)
    said = check_text(manifest_with(corpus, section), data, tokenizer)
    assert said[0].startswith("20.0 % of the tokens are the unknown token")


def test_of_a_long_text_only_the_beginning_is_read(
    manifest_with: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    data, corpus = file_of(tmp_path / "rows", rows * 20 + b"no JSON\n" * 50)
    manifest = manifest_with(corpus | {"format": "jsonl"})
    with pytest.raises(CorpusError, match="50 of 70 rows"):
        check_text(manifest, data, None)
    monkeypatch.setattr(early, "TRIED_CHARACTERS", 5000)
    assert check_text(manifest, data, None) == []
    monkeypatch.setattr(early, "HASHED_BYTES", 100)
    assert "was not checked" in check_text(manifest, data, None)[0]


def test_what_peers_leave_out_is_not_read(manifest_with: Any, tmp_path: Path) -> None:
    data, corpus = file_of(tmp_path / "text", b"x\n" * (1 << 20) + b"caf\xe9")
    with pytest.raises(CorpusError, match="not UTF-8"):
        check_text(manifest_with(corpus), data, None)
    check_text(manifest_with(corpus | {"max_tokens": 1000}), data, None)


def test_a_package_that_only_peers_need_is_not_demanded(
    manifest_with: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, corpus = file_of(tmp_path / "rows", b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (said,) = check_text(manifest_with(corpus | {"format": "parquet"}), data, None)
    assert said.startswith("the text was not checked")
    assert "pyarrow, which is not installed" in said
