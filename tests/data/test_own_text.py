"""From an author's own files to a run: ``init --corpus --tokenizer``, ``tokens`` and ``sign``."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from p2ptrain.base.errors import HomeError, UserError
from p2ptrain.cli import cli
from p2ptrain.data.author_text import detected_format
from p2ptrain.data.file_store import FileStore, stored
from p2ptrain.manifest import KEY_FILE, MANIFEST_FILE, Manifest, load_run, parse_toml, preset
from p2ptrain.manifest.presets import PresetText

sys.path.insert(0, str(Path(__file__).parent.parent))
from hub import NAME, REVISION, serving, use

LINES = [f"Line {number} of a text that nobody has read before, für alle.\n" for number in range(40_000)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("".join(LINES), encoding="utf-8")
    return tmp_path


@pytest.fixture
def tokenizer(place: Path) -> Path:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer, trained.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(LINES[:1000], trainer)
    trained.save(str(place / "tokenizer.json"))
    return place / "tokenizer.json"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(each) for each in arguments])


def done(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.output


def refused(*arguments: object) -> str:
    """Return problem and remedy of a command that must be refused."""
    error = invoke(*arguments).exception
    assert isinstance(error, UserError), error
    return f"{error.problem} | {error.remedy}"


def manifest_of(run: str) -> Manifest:
    return parse_toml((Path(run) / MANIFEST_FILE).read_text())


def test_from_a_text_and_a_tokenizer_to_a_signed_run(place: Path, tokenizer: Path) -> None:
    said = done("init", "run", "--corpus", "corpus.txt", "--tokenizer", tokenizer)
    manifest = manifest_of("run")
    assert (manifest.corpus.kind, manifest.tokenizer.kind) == ("shards", "file")
    assert manifest.model.config.vocab_size == 400
    assert "corpus.txt: read as text" in said
    assert "Hoffmann et al. 2022" in said
    comment = " ".join(Path("run", MANIFEST_FILE).read_text().split("\n\n")[0].replace("\n#", "").split())
    assert comment.endswith(said.partition("size: ")[2].partition("\n")[0])
    assert done("tokens", "run").splitlines() == said.splitlines()[1:8]
    done("sign", "run")
    assert load_run(Path("run")).manifest == manifest
    for digest in (manifest.corpus.root, manifest.tokenizer.sha256):
        assert stored(Path("run"), digest) is not None


def test_a_failed_init_is_no_run_and_goes_on(place: Path, tokenizer: Path, monkeypatch: Any) -> None:
    run = place / "mine"
    run.mkdir()
    (run / "notes").write_text("of its author")
    add, added = FileStore.add, []

    def full(self: FileStore, sha256: str, data: bytes) -> Path:
        if added:
            raise HomeError("no space", "free some")
        added.append(sha256)
        return add(self, sha256, data)

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "add", full)
        said = refused("init", run, "--corpus", "corpus.txt", "--tokenizer", tokenizer)
        assert "no space" in said
        assert "the same command goes on" in said
    assert not {MANIFEST_FILE, KEY_FILE} & {each.name for each in run.iterdir()}
    assert "holds no manifest.toml" in refused("sign", run)
    done("init", run, "--corpus", "corpus.txt", "--tokenizer", tokenizer)
    assert sorted(each.name for each in run.iterdir()) == [
        "files",
        "manifest.toml",
        "notes",
        "run.key",
        "shards",
        "text.json",
    ]


def test_a_folder_stands_for_the_tokenizer_in_it(place: Path, tokenizer: Path) -> None:
    folder = place / "a model"
    folder.mkdir()
    said = refused("init", "run", "--corpus", "corpus.txt", "--tokenizer", folder)
    assert "a model/tokenizer.json' cannot be read" in said
    tokenizer.rename(folder / "tokenizer.json")
    done("init", "run", "--corpus", "corpus.txt", "--tokenizer", folder)


def test_a_data_set_and_a_tokenizer_of_the_hub(place: Path, tokenizer: Path, monkeypatch: Any) -> None:
    (place / "cache").mkdir()
    with serving({"tokenizer.json": tokenizer.read_bytes()}) as hub:
        use(hub.url, place, monkeypatch)
        said = done("init", "ids", "--corpus", "corpus.txt", "--tokenizer", f"hf:{NAME}@main")
        manifest = manifest_of("ids")
        assert stored(Path("ids"), manifest.tokenizer.sha256).read_bytes() == tokenizer.read_bytes()
        assert manifest.model.config.vocab_size == 400
        assert "files: tokenizer, which" in said
        hub.refusal = 404
        assert "other/model at revision main to you (status 404)" in refused(
            "init", "no", "--tokenizer", "hf:other/model"
        )
        assert "is not a model of" in refused("init", "no", "--tokenizer", "hf:gpt2")
    rows = "".join(json.dumps({"text": line}) + "\n" for line in LINES[:8_000])
    talk = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "There, or nearby."}]
    for name, content, column in (
        ("some/texts", rows, "text"),
        ("some/talk", 2_000 * (json.dumps({"messages": talk}) + "\n"), "messages"),
    ):
        run = name.partition("/")[2]
        with serving({"train.jsonl": content.encode()}, "datasets", name) as hub:
            use(hub.url, place, monkeypatch)
            monkeypatch.setattr("huggingface_hub.hf_file_system.constants.ENDPOINT", hub.url)
            said = done("init", run, "--corpus", f"hf:{name}")
            assert f"{name} (configuration default, split train, revision {REVISION}): read as jsonl" in said
            assert bool(manifest_of(run).corpus.template) == (column == "messages")
            done("tokens", run)
            done("sign", run)


def test_a_run_is_named_by_option_or_directory(place: Path) -> None:
    for number, arguments in enumerate(([], ["--corpus", "corpus.txt"], ["--preset", "llama-15m"])):
        done("init", f"Run {number}", *arguments)
        assert manifest_of(f"Run {number}").run.name == f"Run {number}"
        done("init", f"named {number}", "--name", "Ours", *arguments)
        assert manifest_of(f"named {number}").run.name == "Ours"
        assert "run.name" in refused("init", f"refused {number}", "--name", "a/b", *arguments)
        assert not Path(f"refused {number}").exists()
    done("init", "für alle")
    assert manifest_of("für alle").run.name == "demo"


def test_tokens_are_counted_as_json(place: Path) -> None:
    rows = [{"text": line} if number % 2 or number > 9 else {"content": line} for number, line in enumerate(LINES)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done("init", "run", "--corpus", "rows.jsonl")
    figures = json.loads(done("tokens", "run", "--json"))
    read = sum(len(row["text"].encode()) for row in rows if "text" in row)
    assert figures["text"]["sources"] == ["rows.jsonl"]
    counts = figures["text"]["counts"]
    assert (counts["documents"], counts["text_bytes"]) == (len(LINES) - 5, read)
    assert (counts["rows"], counts["skipped"]) == (len(LINES), 5)
    assert counts["examples"][0] == "line 1: no field 'text', but 'content'"
    assert figures["epochs"] == pytest.approx(figures["run_tokens"] / figures["training_tokens"])
    used = figures["training_tokens"] + figures["held_out_tokens"]
    assert f"{figures['tokens']:,}" in done("tokens", "run")
    assert figures["tokens"] == used
    assert figures["measured_tokens"] == 65_536 <= figures["held_out_tokens"]
    assert 0 < figures["held_out_tokens"] <= figures["tokens"] / 20
    assert "rows skipped     5 of 40,000 (line 1, line 3, line 5, line 7, line 9: no field" in done("tokens", "run")


def test_the_numbers_stay_known_without_the_summary(place: Path) -> None:
    done("init", "run", "--corpus", "corpus.txt")
    before = json.loads(done("tokens", "run", "--json"))
    (place / "run" / "text.json").write_text("{")
    after = json.loads(done("tokens", "run", "--json"))
    assert after["training_tokens"] == before["training_tokens"]
    assert after["text"] is None
    assert "documents" not in done("tokens", "run")


def test_a_text_that_is_cut_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.data.own_text.MARGIN", 0.1)
    done("init", "run", "--corpus", "corpus.txt", "--preset", "demo")
    assert "the text beyond what the run needs; init --all takes it" in done("tokens", "run")
    done("init", "all", "--corpus", "corpus.txt", "--preset", "demo", "--all")
    assert "beyond" not in done("tokens", "all")


def test_rows_are_shown(place: Path) -> None:
    done("init", "run", "--corpus", "corpus.txt")
    said = done("tokens", "run", "--show", "2")
    assert said.startswith("--- row 1\n»Line 0 of a text that nobody has read before")
    assert said.count("--- row") == said.count("«\n") == 2
    parts = [json.loads(line) for line in done("tokens", "run", "--show", "3", "--json").splitlines()]
    assert "".join(part["text"] for row in parts for part in row) == "".join(LINES).encode()[: 3 * 128].decode()
    assert all(part["counts"] for row in parts for part in row)
    done("init", "shipped")
    assert "»ALL'S WELL THAT ENDS WELL" in done("tokens", "shipped", "--show", "1")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("rows.jsonl", b'{"text": "a"}\n', "jsonl"),
        ("rows.data", b'{"text": "a"}\n{"text": "b"}\n', "jsonl"),
        ("rows.jsonl.gz", gzip.compress(b'{"text": "a"}\n', mtime=0), "jsonl"),
        ("rows.jsonl", b"broken\n", "jsonl"),
        ("table.bin", b"PAR1....", "parquet"),
        ("main.py", b"{}['a']\n", "text"),
        ("notes.txt", b"{\n", "text"),
        ("notes", b"", "text"),
    ],
)
def test_the_format_is_detected(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert detected_format(tmp_path / name) == expected


def test_a_parquet_column_is_named_by_an_option(place: Path) -> None:
    pq.write_table(pa.table({"body": LINES[:5000]}), "rows.parquet")
    assert "Name the column with the text" in refused("init", "run", "--corpus", "rows.parquet")
    assert not Path("run").exists()
    done("init", "run", "--corpus", "rows.parquet", "--text-field", "body")
    assert json.loads(done("tokens", "run", "--json"))["text"]["counts"]["documents"] == 5000


def broken(name: str, content: bytes) -> Callable[[], str]:
    def write() -> str:
        Path(name).write_bytes(content)
        return name

    return write


def folder() -> str:
    Path("texts").mkdir()
    return "texts"


def pipe() -> str:
    os.mkfifo("pipe")
    return "pipe"


def test_a_column_of_no_table_is_refused(place: Path) -> None:
    Path("my.txt").write_text("Plain text.\n" * 999)
    said = refused("init", "run", "--corpus", "my.txt", "--text-field", "body")
    assert "my.txt is plain text, which has no column 'body'." in said
    assert "my.txt is a file; tokens are counted of a run" in refused("tokens", "my.txt")
    assert "--text-field body needs the text" in refused("init", "run", "--text-field", "body")
    assert "--all needs the text" in refused("init", "run", "--all")
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("option", "make", "why"),
    [
        ("--corpus", lambda: "nowhere.txt", r"nowhere.txt cannot be read: No such file"),
        ("--corpus", folder, r"The folder texts has no text"),
        ("--corpus", pipe, r"is a pipe or a device"),
        ("--corpus", broken("e.txt", b""), r"e.txt is an empty file"),
        ("--corpus", broken("l.txt", b"caf\xe9 " * 999), r"not UTF-8.*iconv"),
        ("--corpus", broken("u.txt", "caf\xe9 ".encode("utf-16") * 99), r"not UTF-8.*iconv"),
        ("--corpus", broken("my photo.jpg", b"\xff\xd8\xff\xe0\0\x10JFIF\0"), r"'my photo.jpg' is not a text file"),
        ("--corpus", broken("my rows.jsonl", b'{"content": "a"}\n' * 9), r"'my rows.jsonl' have no text"),
        ("--corpus", broken("m.jsonl", b'{"messages": "no"}\n' * 9), r"'messages' is text, not a list of messages"),
        ("--corpus", broken("w.txt", b"a few words"), r"too short: its 12 training tokens"),
        ("--corpus", broken("r.jsonl", b'{"content": "a"}\n' * 9), r"no field 'text', but 'content'.*--text-field"),
        ("--corpus", broken("a.json", b'[\n{"text": "a"}\n]'), r"does not have one object per line.*Convert it"),
        ("--corpus", broken("t.txt.gz", gzip.compress(b"text")), r"is packed.*Unpack it"),
        ("--corpus", broken("t.txt.gz", gzip.compress(bytes(range(99, 255)))[:40]), r"cannot be read as text"),
        ("--tokenizer", lambda: "nowhere.json", r"nowhere.json cannot be read: No such file"),
        ("--tokenizer", folder, r"texts/tokenizer.json cannot be read"),
        ("--tokenizer", broken("e.json", b""), r"e.json is an empty file"),
        ("--tokenizer", broken("o.json", b'{"a": 1}'), r"is not a tokenizer \(model.vocab is missing\)"),
    ],
)
def test_unusable_files_are_refused_and_leave_nothing(
    place: Path, option: str, make: Callable[[], str], why: str
) -> None:
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(refused("init", "run", option, make()))
    assert not Path("run").exists()


@pytest.mark.parametrize("arguments", [[], ["--corpus", "corpus.txt"]])
def test_a_step_keeps_its_tokens_in_sequences_of_another_length(place: Path, arguments: list[str]) -> None:
    usual = preset("demo", "ab" * 32).training
    done("init", "run", "--preset", "demo", "--sequence-length", str(usual.sequence_length // 2), *arguments)
    assert manifest_of("run").training.tokens_per_step == usual.tokens_per_step


def test_little_held_out_text_is_the_end_of_a_long_one(place: Path) -> None:
    done("init", "run", "--corpus", "corpus.txt", "--held-out", "1e-9")
    assert manifest_of("run").corpus.held_out_tokens == 129


def test_nothing_is_created_if_a_file_cannot_be_stored(place: Path) -> None:
    Path("run").mkdir()
    Path("run", "files").write_text("in the way")
    assert "cannot be written" in refused("init", "run", "--corpus", "corpus.txt")
    assert not Path("run", MANIFEST_FILE).exists()
    assert not Path("run", KEY_FILE).exists()


def test_a_tokenizer_that_is_too_large_to_travel_is_refused(place: Path, tokenizer: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("p2ptrain.data.own_text.MOST_STORED_BYTES", 1000)
    assert "too large to travel" in refused("init", "run", "--corpus", "corpus.txt", "--tokenizer", tokenizer)
    assert not Path("run").exists()


@pytest.mark.parametrize("harm", ["edited", "cut", "missing"])
def test_a_run_whose_shards_were_harmed_is_not_signed(place: Path, harm: str) -> None:
    done("init", "run", "--corpus", "corpus.txt")
    shard = next(path for path in Path("run", "shards").rglob("*") if path.is_file())
    content = shard.read_bytes()
    if harm == "missing":
        shard.unlink()
    else:
        shard.write_bytes(content[:-2] if harm == "cut" else b"\1" + content[1:])
    said = refused("sign", "run")
    assert "1 of the run's 3 shards are missing or were edited" in said
    assert str(shard) in said
    assert "Restore run/shards from a copy, or make it again with `p2ptrain init NEW_RUN`" in said
    assert not Path("run", "manifest.signed").exists()
    done("init", "again", "--corpus", "corpus.txt")
    shard.write_bytes(Path("again", *shard.parts[1:]).read_bytes())
    done("sign", "run")


def test_a_root_that_fits_no_index_is_not_signed(place: Path, tokenizer: Path) -> None:
    done("init", "run", "--corpus", "corpus.txt", "--tokenizer", tokenizer)
    manifest, path = manifest_of("run"), Path("run", MANIFEST_FILE)
    whole = path.read_text()
    path.write_text(whole.replace(manifest.corpus.root, "ab" * 32))
    assert f"index of shards, run/files/{'ab' * 32}, is missing" in refused("sign", "run")
    training = manifest.corpus.training_tokens
    path.write_text(whole.replace(f"training_tokens = {training:_}", f"training_tokens = {training + 1:_}"))
    said = refused("sign", "run")
    assert f"its index has {training:,}" in said
    assert "If the run is yours, undo the edit" in said
    path.write_text(whole)
    for digest, what in ((manifest.corpus.root, "index of shards"), (manifest.tokenizer.sha256, "tokenizer")):
        kept = Path("run", "files", digest)
        content = kept.read_bytes()
        kept.write_bytes(content + b" ")
        for command in (["sign", "run"], ["tokens", "run", "--show", "1"]):
            assert f"{what}, run/files/{digest}, was edited" in refused(*command)
        kept.write_bytes(content)
    done("sign", "run")


def test_a_preset_of_another_text_reads_it(place: Path, tokenizer: Path, monkeypatch: Any) -> None:
    """Check that a run may name the preset alone, and that a tokenizer asks for a text."""
    texts = {"llama-15m": PresetText("corpus.txt", str(tokenizer))}
    monkeypatch.setattr("p2ptrain.data.own_text.PRESET_TEXTS", texts)
    done("init", "run", "--preset", "llama-15m")
    assert json.loads(done("tokens", "run", "--json"))["text"]["sources"] == ["corpus.txt"]
    assert "--corpus FILE" in refused("init", "without", "--tokenizer", tokenizer)


def test_a_sequence_length_may_be_chosen(place: Path) -> None:
    done("init", "run", "--corpus", "corpus.txt", "--sequence-length", "512")
    training = manifest_of("run").training
    assert (training.sequence_length, training.tokens_per_step) == (512, 512)
    assert manifest_of("run").model.config.max_position_embeddings == 512
    done("sign", "run")


def test_a_small_text_is_reported_by_init_tokens_and_sign(place: Path) -> None:
    Path("small.txt").write_text("".join(LINES[:200]))
    for arguments in (("init", "run", "--corpus", "small.txt"), ("tokens", "run"), ("sign", "run")):
        said = done(*arguments)
        assert "warning: the text is small for this run" in said
        assert ("Muennighoff" in said) is (arguments[0] != "sign")
    assert said.count("More about the text: p2ptrain tokens run\n") == 1


def test_a_vocabulary_that_is_too_small_is_found_before_signing(place: Path, tokenizer: Path) -> None:
    done("init", "run", "--corpus", "corpus.txt", "--tokenizer", tokenizer)
    path = Path("run", MANIFEST_FILE)
    path.write_text(path.read_text().replace("vocab_size = 400", "vocab_size = 399"))
    assert "The tokenizer has 400 ids, but the model has only 399" in refused("sign", "run")
    assert not Path("run", "manifest.signed").exists()


def test_a_text_that_is_too_short_for_its_sequences_is_not_signed(place: Path) -> None:
    Path("small.txt").write_text("".join(LINES[:10]))
    done("init", "run", "--corpus", "small.txt")
    path = Path("run", MANIFEST_FILE)
    text = path.read_text().replace("sequence_length = 128", "sequence_length = 1024")
    path.write_text(text.replace("max_position_embeddings = 128", "max_position_embeddings = 1024"))
    assert "too short: its training part has no sequence of 1,024 tokens" in refused("sign", "run")


def test_tokens_of_no_run(place: Path) -> None:
    folder()
    assert "Create a run with `p2ptrain init texts`" in refused("tokens", "texts")


@pytest.mark.parametrize("name", ["a table.csv", "table.TSV"])
def test_a_table_is_told(place: Path, name: str) -> None:
    Path(name).write_text("".join(LINES))
    assert "is read as plain text; to use a column of a table" in done("init", "run", "--corpus", name)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_packed_text_is_refused(place: Path, pack: Callable[[bytes], bytes]) -> None:
    Path("a text").write_bytes(pack(b"no json\n"))
    assert "'a text' is packed, and its content is not jsonl" in refused("init", "run", "--corpus", "a text")


def test_a_byte_order_mark_is_no_text(place: Path) -> None:
    Path("marked.txt").write_bytes(b"\xef\xbb\xbf" + b"a line\n" * 5000)
    done("init", "marked", "--corpus", "marked.txt")
    assert json.loads(done("tokens", "marked", "--json"))["text"]["counts"]["text_bytes"] == 7 * 5000


def test_a_large_vocabulary_is_what_makes_the_model_large(place: Path, tokenizer: Path) -> None:
    outline = json.loads(tokenizer.read_text())
    used = outline["model"]["vocab"]
    used |= {f"unused {number}": number for number in range(len(used), 250_000)}
    outline["added_tokens"] = []
    Path("large.json").write_text(json.dumps(outline))
    said = done("init", "run", "--corpus", "corpus.txt", "--tokenizer", "large.json")
    assert "No smaller model is offered: use a tokenizer of fewer ids than 250,000 if you can." in said
