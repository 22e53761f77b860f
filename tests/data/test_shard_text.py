"""From an author's text to shards, and every fault of a text."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from p2ptrain.base.errors import CorpusError, HomeError, UserError
from p2ptrain.data import author_text, own_text, tokenizing
from p2ptrain.data.file_store import FileStore, NamedFile
from p2ptrain.data.tokenizer import ByteTokenizer, load_tokenizer
from p2ptrain.manifest.sources import FileTokenizer
from p2ptrain.tokens.store import ShardStore
from tests.data.building import build, opened

TEXT = "".join(f"line {number} of a small text, für alle.\n" for number in range(200))


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": f"document {number} " * 20, "other": number} for number in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_is_a_document(tmp_path: Path, text_file: Path) -> None:
    built = build(tmp_path / "run", text_file)
    assert bytes(built.ids) == TEXT.encode() + b"\0"
    assert (built.summary.counts.documents, built.summary.counts.text_bytes) == (1, len(TEXT.encode()))
    assert built.manifest.corpus.training_tokens == len(built.training)
    assert built.index.id_bytes == 2


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "parquet"])
def test_rows_become_documents_with_separators(tmp_path: Path, rows_file: Path, form: str) -> None:
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist([json.loads(line) for line in rows_file.open()]), path)
    elif form == "jsonl.gz":
        path.write_bytes(gzip.compress(rows_file.read_bytes()))
    documents = bytes(build(tmp_path / "run", path).ids).split(b"\0")
    assert documents[:2] == [b"document 0 " * 20, b"document 1 " * 20]
    assert len(documents) == 41
    assert documents[-1] == b""


def test_a_folder_is_read_in_an_order_of_its_names_digests(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name, content in {
        "a.py": b"print(1)\n" * 20,
        "b/c.py": b"print(2)\n" * 20,
        "b.py": b"print(3)\n" * 20,
        ".git/config": b"hidden",
        "empty.py": b"",
        "logo.png": b"\x89PNG\0\0",
        "rows.jsonl": b'{"text": "a row"}\n',
    }.items():
        (folder / name).write_bytes(content)
    built = build(tmp_path / "run", folder)
    order = [b"print(3)\n" * 20, b"a row", b"print(2)\n" * 20, b"print(1)\n" * 20, b""]
    assert bytes(built.ids).split(b"\0") == order
    assert built.summary.warnings[-1] == f"{folder} has 1 files that are not text and were skipped: logo.png"
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()
    with pytest.raises(CorpusError, match="has no text"):
        build(tmp_path / "other", folder)


def test_links_in_a_folder_are_followed_or_told(tmp_path: Path) -> None:
    (folder := tmp_path / "notes").mkdir()
    (other := tmp_path / "other").mkdir()
    (folder / "a.txt").write_text("a note\n" * 20)
    (other / "b.txt").write_text("another\n" * 20)
    for name, target in (("linked", other), ("dead", tmp_path / "nowhere"), ("round", folder)):
        (folder / name).symlink_to(target)
    (other / "back").symlink_to(folder)
    built = build(tmp_path / "run", folder)
    assert set(bytes(built.ids).split(b"\0")[:2]) == {b"a note\n" * 20, b"another\n" * 20}
    [said] = built.summary.warnings
    assert "has 3 files that are not text" in said
    for name in ("dead", "linked/back", "round"):
        assert f"{name} (a link that leads nowhere or back)" in said


def test_several_sources_are_mixed_by_their_sizes(tmp_path: Path) -> None:
    """Check that each part of what is trained on has as much of each source as the whole."""
    for name, rows in (("a", 300), ("b", 100)):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name * 100}"}}\n' * rows)
    ids = bytes(build(tmp_path / "run", tmp_path / "a.jsonl", tmp_path / "b.jsonl").ids)
    for start in range(0, 36_000, 6_000):
        assert 0.2 < ids[start : start + 6_000].count(b"b") / 6_000 < 0.3
    assert (ids.count(b"a"), ids.count(b"b")) == (30_000, 10_000)


def test_held_out_text_is_evenly_spread_and_apart(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("".join(f"{number:07}\n" for number in range(200_000)))
    built = build(tmp_path / "run", path, held_out=0.05)
    lines = {int(line) for line in bytes(built.held_out.tolist()).replace(b"\0", b"\n").split() if len(line) == 7}
    trained = {int(line) for line in bytes(built.training.tolist()).replace(b"\0", b"\n").split() if len(line) == 7}
    assert not lines & trained
    assert 0.03 < len(lines) / 200_000 <= 0.05
    assert len(lines | trained) > 199_000  # a piece may end within a line
    for start in range(0, 200_000, 50_000):
        assert 1_000 < sum(start <= each < start + 50_000 for each in lines) < 3_500


def test_reading_stops_when_the_budget_is_covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_text, "MARGIN", 0.01)
    (tmp_path / "rows.jsonl").write_text(("{" + f'"text": "{100 * "x"}"' + "}\n") * 1_000)
    built = build(tmp_path / "run", tmp_path / "rows.jsonl")
    assert 24_000 <= len(built.ids) < 24_200  # a hundredth of the demo's
    assert built.summary.counts.is_cut
    assert len(build(tmp_path / "all", tmp_path / "rows.jsonl", is_all=True).ids) == 101_000


def test_it_tells_how_far_it_is(tmp_path: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "BATCH_CHARACTERS", 1_000)
    told: list[tuple[int, float]] = []
    built = build(tmp_path / "run", rows_file, tell=lambda *so_far: told.append(so_far))
    assert told == sorted(told)
    assert len(told) > 5
    assert len(built.ids) >= told[-1][0] > 8_000
    assert told[-1][1] == 1.0


def test_what_was_skipped_and_replaced_is_told(tmp_path: Path, rows_file: Path) -> None:
    with rows_file.open("a") as file:
        file.write('{"text": null}\n{"text": "a\\u0000b"}\n{"text": "\\ud800"}\n')
    found = build(tmp_path / "run", rows_file).summary
    assert (found.counts.rows, found.counts.documents, found.counts.skipped) == (43, 41, 2)
    assert found.counts.examples == [
        "line 41: the field 'text' is null, not text",
        "line 43: half of a surrogate pair in the text",
    ]
    assert any("1 zero bytes of the text became U+FFFD" in each for each in found.warnings)


@pytest.mark.parametrize("when", ["first", "last"])
def test_a_file_that_changes_while_it_is_read_is_noticed(
    tmp_path: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(tokenizing, "BATCH_CHARACTERS", 500)
    changed = rows_file.read_text().replace("document", "invented")
    is_done: list[bool] = []

    def change(tokens: int, share: float) -> None:
        if not is_done and (when == "first" or tokens > 4_000):
            is_done.append(True)
            rows_file.write_text(changed)
            os.utime(rows_file, (1, 1))

    with pytest.raises(CorpusError, match=r"rows\.jsonl changed while it was read"):
        build(tmp_path / "run", rows_file, tell=change)
    assert not (tmp_path / "run").exists()


CONNECTIONS = """
import sys
from pathlib import Path

attempts = []
sys.addaudithook(lambda event, args: attempts.append((event, args)) if event.startswith("socket.") else None)

from tests.data.building import build

folder = Path(sys.argv[1])
for form in ("text", "jsonl", "parquet"):
    build(folder / f"run-{form}", folder / f"rows.{form}", tokenizer=folder / "tokenizer.json")
names = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.sendmsg")
print([attempt for attempt in attempts if attempt[0] in names])
"""


def test_a_local_corpus_makes_no_connection(rows_file: Path, tmp_path: Path) -> None:
    """Check that nothing is sent while an author's corpus and tokenizer are read."""
    ByteTokenizer().save(tmp_path)
    (tmp_path / "rows.text").write_bytes(rows_file.read_bytes())
    pq.write_table(pa.Table.from_pylist([json.loads(line) for line in rows_file.open()]), tmp_path / "rows.parquet")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", CONNECTIONS, tmp_path], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_what_is_no_regular_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in tmp_path / "pipe", Path("/dev/zero"):
        for use in (
            lambda path: build(tmp_path / "run", path),
            lambda path: FileStore(tmp_path / "files").adopt(NamedFile("tokenizer", "", "0" * 64), path),
            lambda path: load_tokenizer(FileTokenizer(kind="file", sha256="0" * 64), path),
        ):
            with pytest.raises(CorpusError, match="is a pipe or a device"):
                use(path)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("bad.txt", b"", "is an empty file"),
        ("bad.txt", b"a few words", "too short: its 12 training tokens"),
        ("bad.txt", b"caf\xe9 " * 100, "not UTF-8.*0xe9"),
        ("bad.txt", b"good " * 10_000 + b"caf\xe9 ", "not UTF-8.*0xe9"),
        ("bad.jsonl", b'{"body": "x"}\n', "1 of 1 rows of .* have no text: no field 'text', but 'body'."),
        ("bad.jsonl", b'{"text": 3}\n', "line 1: the field 'text' is a number, not text"),
        ("bad.jsonl", b'{"text": ""}\n', "The corpus is empty"),
        ("bad.jsonl", b"\n\n", "The corpus is empty"),
        ("bad.jsonl", b"this is not json\n", "line 1: invalid JSON"),
        ("bad.parquet", b"PAR1 this is not parquet\n", "cannot be read as parquet"),
    ],
)
def test_bad_texts_are_refused_and_leave_nothing(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=problem):
        build(tmp_path / "new" / "run", path)
    assert not (tmp_path / "new").exists()


def test_a_missing_library_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CorpusError, match="needs the package pyarrow") as caught:
        build(tmp_path / "run", path)
    assert "with its extra data" in caught.value.remedy


def test_a_full_disk_keeps_what_was_done(tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:

        def full(self: ShardStore, digest: str, data: bytes) -> None:
            raise HomeError("The text cannot be stored: No space left on device.", "")

        patch.setattr(ShardStore, "add", full)
        with pytest.raises(HomeError, match="the same command goes on"):
            build(tmp_path / "run", text_file)
    with pytest.raises(UserError):
        opened(tmp_path / "run")
    assert bytes(build(tmp_path / "run", text_file).ids) == TEXT.encode() + b"\0"
    assert not (tmp_path / "run" / "unfinished").exists()


def test_a_mix_of_text_and_dialogues_is_refused(tmp_path: Path, text_file: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    with pytest.raises(CorpusError, match=r"has dialogues, and .* has text"):
        build(tmp_path / "run", text_file, tmp_path / "chats.jsonl")
    (tmp_path / "both").mkdir()
    for path in (text_file, tmp_path / "chats.jsonl"):
        path.rename(tmp_path / "both" / path.name)
    with pytest.raises(CorpusError, match=r"has dialogues, and .*text.txt in it is plain text"):
        build(tmp_path / "run", tmp_path / "both")


def test_a_files_name_is_no_pattern(rows_file: Path, tmp_path: Path) -> None:
    strange = rows_file.rename(tmp_path / "rows [1] *.jsonl")
    assert len(build(tmp_path / "run", strange).ids) > 0


@pytest.mark.parametrize("named", ["hf:a/b@" + "0" * 40, f"hf:a/b@{'0' * 40}:c:d"])
def test_a_data_set_is_named_with_its_split(named: str) -> None:
    found = author_text.hub_text(named)
    assert (found.name, found.revision) == ("a/b", "0" * 40)
    assert (found.config, found.split) == (("c", "d") if named.endswith("d") else ("default", "train"))
