"""From text to batches, and every fault of a corpus."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from p2ptrain.base.errors import CorpusError, HomeError
from p2ptrain.data import sources
from p2ptrain.data.corpus import open_corpus
from p2ptrain.data.file_store import FileStore, named_files
from p2ptrain.data.rows import TextCounts
from p2ptrain.data.tokenizer import ByteTokenizer, load_tokenizer
from p2ptrain.manifest import with_changes
from p2ptrain.manifest.sources import FileTokenizer
from tests.data.made_tokenizer import with_bos

TEXT = "".join(f"line {number} of a small text, für alle.\n" for number in range(200))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def rows_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"text": f"document {number} " * 20, "other": number} for number in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def file_corpus(path: Path, **fields: object) -> dict[str, object]:
    return {"kind": "file", "sha256": digest(path), **fields}


def test_shakespeare_ships_with_the_package(manifest_with, tmp_path):
    corpus = open_corpus(manifest_with({"kind": "builtin", "name": "shakespeare"}), tmp_path)
    assert len(corpus.tokens) == 5_055_611
    assert corpus.tokens.dtype == np.uint8
    assert corpus.tokenizer.decode(corpus.tokens[:26].tolist()) == "ALL'S WELL THAT ENDS WELL\n"


def test_a_batch_holds_the_text_at_its_place(manifest_with, text_file, tmp_path):
    corpus = open_corpus(manifest_with(file_corpus(text_file)), tmp_path / "cache", text_file)
    batch = corpus.batch([3, 0])
    assert batch.shape == (2, 17)
    assert batch.dtype == torch.int64
    assert bytes(batch[1].tolist()) == TEXT.encode()[:17]
    assert bytes(batch[0].tolist()) == TEXT.encode()[48:65]


def test_it_tells_how_far_it_is_while_it_is_built_and_not_later(manifest_with, rows_file, tmp_path):
    told: list[tuple[int, int | None]] = []
    manifest = manifest_with(file_corpus(rows_file, format="jsonl", max_tokens=5000))
    for _ in range(2):
        corpus = open_corpus(manifest, tmp_path / "cache", rows_file, tell=lambda *so_far: told.append(so_far))
    assert len(told) > 5
    assert told == sorted(told)
    assert told[-1] == (len(corpus.tokens), 5000)


def test_a_cached_stream_needs_the_file_no_more(manifest_with, text_file, tmp_path):
    manifest = manifest_with(file_corpus(text_file))
    first = open_corpus(manifest, tmp_path / "cache", text_file)
    text_file.unlink()
    again = open_corpus(manifest, tmp_path / "cache")
    assert np.array_equal(first.tokens, again.tokens)


def test_a_file_that_is_named_has_to_be_the_runs(manifest_with, text_file, tmp_path):
    """Check that a file named on the command line is read or refused: its owner expects to train on it."""
    shipped = manifest_with({"kind": "builtin", "name": "shakespeare"})
    with pytest.raises(CorpusError, match=r"text is shakespeare, which ships.*\n.*init NEW_RUN --corpus FILE"):
        open_corpus(shipped, tmp_path / "cache", text_file)
    with pytest.raises(CorpusError, match="tokenizer is bytes"):
        open_corpus(shipped, tmp_path / "cache", tokenizer_file=text_file)
    manifest = manifest_with(file_corpus(text_file))
    open_corpus(manifest, tmp_path / "cache", text_file)
    (tmp_path / "another.txt").write_text("another text")
    with pytest.raises(CorpusError, match="is not this run's corpus"):
        open_corpus(manifest, tmp_path / "cache", tmp_path / "another.txt")
    with pytest.raises(CorpusError, match="cannot be read"):
        open_corpus(manifest, tmp_path / "cache", tmp_path / "nothing.txt")


def test_held_out_batches_are_the_same_each_time_and_keep_the_bound(manifest_with, text_file, tmp_path):
    corpus = open_corpus(manifest_with(file_corpus(text_file)), tmp_path / "cache", text_file)
    few = list(corpus.validation_batches(most_tokens=5 * 16 + 3, batch_sequences=2))
    assert [len(batch) for batch in few] == [2, 2, 1]
    again = list(corpus.validation_batches(most_tokens=5 * 16 + 3, batch_sequences=2))
    assert all(torch.equal(one, other) for one, other in zip(few, again, strict=True))
    every = list(corpus.validation_batches(most_tokens=10**9, batch_sequences=4))
    assert sum(batch[:, 1:].numel() for batch in every) == corpus.held_out_tokens
    assert sum(map(len, corpus.validation_batches(most_tokens=1, batch_sequences=4))) == 1


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_rows_become_documents_with_separators(manifest_with, rows_file, tmp_path, form):
    path = rows_file
    if form == "parquet":
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist([json.loads(line) for line in rows_file.open()]), path)
    manifest = manifest_with(file_corpus(path, format=form))
    tokens = open_corpus(manifest, tmp_path / "cache", path).tokens
    documents = bytes(tokens).split(b"\0")
    assert documents[:2] == [b"document 0 " * 20, b"document 1 " * 20]
    assert len(documents) == 41
    assert documents[-1] == b""


def test_a_run_that_continues_a_model_begins_documents_as_its_tokenizer_does(manifest_with, rows_file, tmp_path):
    path = with_bos(tmp_path / "tokenizer.json")
    random = manifest_with(file_corpus(rows_file, format="jsonl"), {"kind": "file", "sha256": digest(path)})
    continued = with_changes(random, {"model.init": f"sha256:{'0' * 64}"})
    begun, plain = (
        open_corpus(manifest, tmp_path / "cache", rows_file, path).tokens.tolist() for manifest in (continued, random)
    )
    assert 256 not in plain
    starts = [0, *(place + 1 for place, each in enumerate(begun) if each == 257)][:-1]
    assert len(starts) == 40
    assert [place for place, each in enumerate(begun) if each == 256] == starts
    assert [each for each in begun if each != 256] == plain


def test_a_files_name_is_no_pattern(manifest_with, rows_file, tmp_path):
    strange = rows_file.rename(tmp_path / "rows [1] *.jsonl")
    manifest = manifest_with(file_corpus(strange, format="jsonl"))
    assert len(open_corpus(manifest, tmp_path / "cache", strange).tokens) > 0


@pytest.mark.parametrize("max_tokens", [1000, 100_000])
def test_a_file_that_changes_while_it_is_read_is_noticed(manifest_with, rows_file, tmp_path, max_tokens):
    """At whatever place reading ends; the text read so far is not used."""
    manifest = manifest_with(file_corpus(rows_file, format="jsonl", max_tokens=max_tokens))
    changed = rows_file.read_text().replace("document", "invented")

    def change(tokens: int, most: int | None) -> None:
        rows_file.write_text(changed)

    with pytest.raises(CorpusError, match=r"rows\.jsonl changed while it was read"):
        open_corpus(manifest, tmp_path / "cache", rows_file, tell=change)
    assert not list((tmp_path / "cache").glob("*.npy"))


def test_a_file_that_is_cut_while_it_is_read_is_said_to_have_changed(manifest_with, rows_file, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "check_digest", lambda path, *_: path.write_bytes(b"\xff no json\n"))
    with pytest.raises(CorpusError, match="changed while it was read"):
        open_corpus(manifest_with(file_corpus(rows_file, format="jsonl")), tmp_path / "cache", rows_file)


def test_what_was_read_is_reported_at_each_opening(manifest_with, rows_file, text_file, tmp_path):
    reports: list[tuple[TextCounts, int]] = []
    with rows_file.open("a") as file:
        file.write('{"text": null}\n{"text": "fin"}\n')
    manifest = manifest_with(file_corpus(rows_file, format="jsonl"))
    for _ in range(2):
        corpus = open_corpus(manifest, tmp_path / "cache", rows_file, report=lambda *given: reports.append(given))
    (counts, tokens), again = reports
    assert again == (counts, tokens)
    assert (counts.rows, counts.documents, counts.skipped) == (42, 41, 1)
    assert counts.examples == ["line 41: the field 'text' is null, not text"]
    assert tokens == len(corpus.tokens) == counts.text_bytes + 41
    open_corpus(manifest_with(file_corpus(text_file)), tmp_path, text_file, report=lambda *given: reports.append(given))
    assert (reports[2][0].documents, reports[2][0].text_bytes) == (1, len(TEXT.encode()))


def test_a_text_that_is_cut_is_reported_and_only_what_is_used_is_counted(manifest_with, rows_file, tmp_path):
    reports: list[TextCounts] = []
    manifest = manifest_with(file_corpus(rows_file, format="jsonl", max_tokens=1000))
    open_corpus(manifest, tmp_path / "cache", rows_file, report=lambda counts, _: reports.append(counts))
    (counts,) = reports
    assert counts.is_cut
    used = json.loads(rows_file.read_text().splitlines()[0])["text"]
    documents, rest = divmod(1000, len(used) + 1)
    assert counts.documents == documents + 1
    assert abs(counts.text_bytes - documents * len(used) - rest) <= 1


CONNECTIONS = """
import sys
from pathlib import Path

attempts = []
sys.addaudithook(lambda event, args: attempts.append((event, args)) if event.startswith("socket.") else None)

from p2ptrain.data.corpus import open_corpus
from p2ptrain.manifest import preset, with_changes

folder = Path(sys.argv[1])
for form, digest, tokenizer_digest in zip(sys.argv[2::3], sys.argv[3::3], sys.argv[4::3]):
    manifest = with_changes(preset("demo", "ab" * 32), {
        "corpus": {"kind": "file", "sha256": digest, "format": form, "validation_fraction": 0.1},
        "tokenizer": {"kind": "file", "sha256": tokenizer_digest},
        "training.sequence_length": 16,
        "model.config.vocab_size": 512,
    })
    open_corpus(manifest, folder / "cache", folder / f"rows.{form}", folder / "tokenizer.json")
names = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.sendmsg")
print([attempt for attempt in attempts if attempt[0] in names], "huggingface_hub" in sys.modules)
"""


def test_a_local_corpus_makes_no_connection(rows_file, tmp_path):
    """Nothing is sent while a corpus and a tokenizer of the owner's are read."""
    ByteTokenizer().save(tmp_path)
    (tmp_path / "rows.text").write_bytes(rows_file.read_bytes())
    pq.write_table(pa.Table.from_pylist([json.loads(line) for line in rows_file.open()]), tmp_path / "rows.parquet")
    arguments = [str(tmp_path)]
    for form in ("text", "jsonl", "parquet"):
        arguments += [form, digest(tmp_path / f"rows.{form}"), digest(tmp_path / "tokenizer.json")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", CONNECTIONS, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[] False", done.stderr
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 3


def test_at_most_max_tokens_are_read(manifest_with, text_file, tmp_path):
    manifest = manifest_with(file_corpus(text_file, max_tokens=1000))
    assert len(open_corpus(manifest, tmp_path / "cache", text_file).tokens) == 1000


def test_large_texts_pass_in_pieces(manifest_with, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 100)
    assert all(len(piece.text) <= 200 for piece in sources._text_file_pieces(text_file))
    tokens = open_corpus(manifest_with(file_corpus(text_file)), tmp_path / "cache", text_file).tokens
    assert bytes(tokens) == TEXT.encode()


def test_an_unnamed_file_is_asked_for(manifest_with, text_file, tmp_path):
    with pytest.raises(CorpusError, match="no file was given") as caught:
        open_corpus(manifest_with(file_corpus(text_file)), tmp_path / "cache")
    assert "--data" in caught.value.remedy


def test_another_file_than_the_runs_is_refused(manifest_with, text_file, tmp_path):
    manifest = manifest_with(file_corpus(text_file))
    text_file.write_text(TEXT + "!")
    with pytest.raises(CorpusError, match=r"not this run's corpus: its sha256 is [0-9a-f]{64}"):
        open_corpus(manifest, tmp_path / "cache", text_file)
    assert not list((tmp_path / "cache").glob("*.npy"))


def test_what_is_no_regular_file_is_named(manifest_with, text_file, tmp_path):
    manifest = manifest_with(file_corpus(text_file))
    with pytest.raises(CorpusError, match=r"absent\.txt cannot be read: No such file"):
        open_corpus(manifest, tmp_path / "cache", tmp_path / "absent.txt")
    with pytest.raises(CorpusError, match="is a folder, and a run uses one file"):
        open_corpus(manifest, tmp_path / "cache", tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for path in tmp_path / "pipe", Path("/dev/zero"):
        for use in (
            lambda path: open_corpus(manifest, tmp_path / "cache", path),
            lambda path: FileStore(tmp_path / "files").adopt(named_files(manifest)[0], path),
            lambda path: load_tokenizer(FileTokenizer(kind="file", sha256="0" * 64), path),
        ):
            with pytest.raises(CorpusError, match="is a pipe or a device"):
                use(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"", "empty"), (b"a few words", "too short: 11 tokens"), (b"caf\xe9 " * 100, "not UTF-8.*0xe9")],
)
def test_bad_texts_are_refused(manifest_with, tmp_path, content, problem):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=problem):
        open_corpus(manifest_with(file_corpus(path)), tmp_path / "cache", path)


@pytest.mark.parametrize(
    ("content", "fields", "problem"),
    [
        (b'{"body": "x"}\n', {}, "1 of 1 rows of .* have no text: no field 'text', but 'body'."),
        (b'{"text": 3}\n', {}, "line 1: the field 'text' is a number, not text"),
        (b'{"text": ""}\n', {}, "empty"),
        (b"", {}, "This run's corpus is an empty file"),
        (b"\n\n", {}, "empty"),
        (b"this is not json\n", {}, "line 1: invalid JSON"),
        (b"this is not parquet\n", {"format": "parquet"}, "cannot be read as parquet"),
    ],
)
def test_bad_rows_are_refused(manifest_with, tmp_path, content, fields, problem):
    path = tmp_path / "bad.rows"
    path.write_bytes(content)
    manifest = manifest_with(file_corpus(path, **{"format": "jsonl", **fields}))
    with pytest.raises(CorpusError, match=problem):
        open_corpus(manifest, tmp_path / "cache", path)


def test_a_missing_library_is_explained(manifest_with, tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CorpusError, match="needs the package pyarrow") as caught:
        open_corpus(manifest_with(file_corpus(path, format="parquet")), tmp_path / "cache", path)
    assert "with its extra data" in caught.value.remedy


def test_a_damaged_installation_is_recognized(manifest_with, tmp_path, monkeypatch):
    monkeypatch.setitem(sources.BUILTIN_DIGESTS, "shakespeare", "0" * 64)
    with pytest.raises(CorpusError, match="damaged"):
        open_corpus(manifest_with({"kind": "builtin", "name": "shakespeare"}), tmp_path)


def test_a_cache_that_cannot_be_made_is_the_homes_fault(manifest_with, text_file):
    with pytest.raises(HomeError, match="token cache"):
        open_corpus(manifest_with(file_corpus(text_file)), text_file / "cache", text_file)
