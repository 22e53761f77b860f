"""Data sets of the hub: which files make up a split, rows without text, and a hub on loopback that stops midway."""

import errno
import gzip
import io
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from p2ptrain.base.errors import CorpusError, HomeError
from p2ptrain.data import hub as hub_files
from p2ptrain.data.author_text import find_source
from p2ptrain.data.hub import HubText, split_paths
from p2ptrain.data.reading import SourceReader
from p2ptrain.data.rows import TextCounts
from p2ptrain.data.sources import InterruptedCorpusError

sys.path.insert(0, str(Path(__file__).parent.parent))
from hub import REVISION, serving, use

ROWS = 400


def texts(first: int) -> list[str]:
    return [f"document {number} " * 20 for number in range(first, first + ROWS)]


def shard(first: int) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": texts(first)}), buffer, row_group_size=100)
    return buffer.getvalue()


LATE = [{"text": {"a": 1}}, {"text": 99}, {"text": None}]
"""Rows without text after many with it; the ``datasets`` library makes text of the first two."""

CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*
---
"""


def lines(first: int) -> bytes:
    rows = [{"text": text} for text in texts(first)] + LATE
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


START = """
import json
import sys
from pathlib import Path

reached = set()
sys.addaudithook(lambda event, args: reached.add(str(args[0])) if event == "socket.getaddrinfo" else None)

from p2ptrain.base.errors import CorpusError
from p2ptrain.data import shard_text, tokenizing, unfinished
from p2ptrain.tokens import index, writing
from tests.data.building import build

for module in (index, writing, shard_text):
    module.SHARD_BYTES = 40_000
tokenizing.BATCH_CHARACTERS = 5_000
unfinished.SAVED_S = 0.0
told = []
try:
    source = f"hf:someone/texts@{'a' * 40}"
    built = build(Path(sys.argv[1]), source, tell=lambda tokens, share: told.append(tokens), held_out=0.001)
    counts = built.summary.counts
    print(counts.documents, counts.text_bytes, counts.skipped, len(built.ids))
except CorpusError as error:
    print(error.problem)
print(json.dumps([told[0], told[-1], sorted(reached)]))
"""


@pytest.fixture
def hub():
    """A hub with a data set of three files; the later ones fail once for each request."""
    files = {
        "README.md": CARD.encode(),
        "data/0.parquet": shard(0),
        "data/1.parquet": shard(ROWS),
        "data/2.jsonl": lines(2 * ROWS),
    }
    with serving(files, "datasets", "someone/texts") as hub:
        hub.failures = {"data/1.parquet": ["torn", "404"], "data/2.jsonl": ["404"]}
        yield hub


@pytest.mark.net
def test_a_hub_that_stops_midway_is_continued(hub, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    path = [str(Path(__file__).parents[2]), *sys.path]
    environment |= {"PYTHONPATH": os.pathsep.join(path), "HF_HOME": str(tmp_path / "home")}
    environment["HF_ENDPOINT"] = hub.url

    def start() -> tuple[str, list[object]]:
        arguments = [sys.executable, "-c", START, str(tmp_path / "run")]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        said, figures = done.stdout.splitlines()
        return said, json.loads(figures)

    said, (first, last, reached) = start()
    assert said.startswith("The corpus someone/texts (")
    assert hub.failures["data/1.parquet"] == []  # the library repeats a request after a reset
    assert reached == ["127.0.0.1"]
    said, (first_again, last_again, _) = start()
    assert last - 30_000 < first_again < last + 6_000, "it does not continue"
    assert said.startswith("The corpus someone/texts (")
    expected = "".join(f"{text}\0" for text in texts(0) + texts(ROWS) + texts(2 * ROWS)).encode()
    said, (first_at_last, _, _) = start()
    assert last_again - 30_000 < first_at_last < last_again + 6_000, "it does not continue"
    assert first < 6_000
    assert said == f"{3 * ROWS} {len(expected) - 3 * ROWS} 3 {len(expected)}"
    assert not [agent for agent in hub.agents if "torch" in agent]


def spec(config: str = "default", split: str = "train") -> HubText:
    return HubText("someone/texts", REVISION, config, split)


def card(*configs: dict[str, object]) -> str:
    return f"---\n{json.dumps({'configs': configs})}\n---\nA data set.\n"


FILES = [
    ".gitattributes",
    "README.md",
    "LICENSE",
    "data/de/b.parquet",
    "data/de/a.parquet",
    "data/de/deep/c.parquet",
    "data/fr/test-1.parquet",
    "data/fr/train-1.parquet",
    "data/fr/.hidden.parquet",
]
DE = ["data/de/a.parquet", "data/de/b.parquet"]


@pytest.mark.parametrize(
    ("data_files", "expected"),
    [
        ("data/de/*", DE),
        ("data/de/**", [*DE, "data/de/deep/c.parquet"]),
        ("**/[!c].parquet", DE),
        ("*/*/?.parquet", DE),
        (["data/de/b.parquet", "data/de/*"], DE[::-1]),
        ([{"split": "test", "path": "data/fr/*"}, {"split": "train", "path": "data/de/*"}], DE),
        ([{"split": "train", "path": ["data/de/a*", "data/de/b*"]}], DE),
        ({"test": "data/fr/*", "train": ["data/de/*"]}, DE),
    ],
)
def test_the_files_of_a_split_are_those_that_the_card_names(data_files, expected):
    for name in "default", "de":
        listed = card({"config_name": "other", "data_files": "x"}, {"config_name": name, "data_files": data_files})
        assert split_paths(listed, FILES, spec(name)) == expected


@pytest.mark.parametrize("before", ["\n", " \r\n"])
def test_a_card_that_begins_with_blank_lines_is_read(before):
    assert split_paths(before + card({"data_files": "data/de/*"}), FILES, spec()) == DE


def test_a_card_may_name_a_folder():
    listed = card({"config_name": "fr", "data_dir": "data/fr"}, {"config_name": "de", "data_dir": "data/de/"})
    assert split_paths(listed, FILES, spec("fr")) == ["data/fr/train-1.parquet"]
    assert split_paths(listed, FILES, spec("fr", "test")) == ["data/fr/test-1.parquet"]
    assert split_paths(listed, FILES, spec("de")) == [*DE, "data/de/deep/c.parquet"]


@pytest.mark.parametrize("text", ["", "A data set.", "---\nlicense: mit\n---\n"])
@pytest.mark.parametrize(
    ("paths", "chosen"),
    [
        (["b.jsonl", "a.jsonl", "README.md", "dataset_infos.json", "LICENSE", "make.py"], ["a.jsonl", "b.jsonl"]),
        (
            ["data/train-00000-of-00002.parquet", "data/random-00000-of-00001.parquet"],
            ["data/train-00000-of-00002.parquet"],
        ),
        (["my_train_file.jsonl", "my_test_file.jsonl", "more.jsonl"], ["my_train_file.jsonl"]),
        (["training/1.jsonl", "dev/1.jsonl", "constrained/1.jsonl"], ["training/1.jsonl"]),
        (["train.jsonl", "train/test.jsonl"], ["train/test.jsonl"]),
        (["default/train/0000.parquet", "default/test/0000.parquet"], ["default/train/0000.parquet"]),
    ],
)
def test_without_configurations_the_names_tell_the_split(text, paths, chosen):
    assert split_paths(text, paths, spec()) == chosen


def test_the_hubs_own_conversion_is_read():
    paths = [
        "sample-10BT/train/0000.parquet",
        "sample-10BT/train/0001.parquet",
        "sample-10BT/partial-train/0000.parquet",
    ]
    assert split_paths("", paths, spec("sample-10BT")) == paths[:2]


@pytest.mark.parametrize(
    ("text", "paths", "config", "split", "problem"),
    [
        (
            card({"config_name": "de", "data_files": "x"}),
            FILES,
            "default",
            "train",
            "no configuration 'default', but 'de'",
        ),
        ("", FILES, "fr", "train", "no configuration 'fr', but 'default' alone"),
        (card({"data_files": "data/none/*"}), FILES, "default", "train", "No file .* matches 'data/none/\\*'"),
        (card({"data_files": "data/de/*"}), FILES, "default", "test", "has no split 'test', but 'train'"),
        (card({"data_files": 3}), FILES, "default", "train", "unclear: its card's data_files"),
        (card({"data_files": []}), FILES, "default", "train", "unclear: its card's data_files"),
        (card({"data_files": "**/**/**"}), FILES, "default", "train", "unclear: its card's data_files"),
        (card({"data_files": ["a**/b"]}), FILES, "default", "train", "unclear: its card's data_files"),
        (
            card({"data_files": [{"split": "train", "path": 3}]}),
            FILES,
            "default",
            "train",
            "unclear: its card's data_files",
        ),
        ("---\n{{{\n---\n", FILES, "default", "train", "unclear: its README.md cannot be read"),
        ("---\nconfigs: 3\n---\n", FILES, "default", "train", "unclear: its README.md cannot be read"),
        ("", ["train-test.jsonl"], "default", "train", "unclear: the name train-test.jsonl"),
        ("", ["a.jsonl"], "default", "test", "has no split 'test', but 'train'"),
        ("", ["README.md"], "default", "train", "has no split 'train', but no data"),
    ],
)
def test_files_that_are_not_plainly_named_are_refused(text, paths, config, split, problem):
    with pytest.raises(CorpusError, match=problem) as caught:
        split_paths(text, paths, spec(config, split))
    assert caught.value.problem.isprintable()


@pytest.fixture
def read(tmp_path, monkeypatch):
    """``read(content)``: texts and counts of a data set with these files."""

    def read(content: dict[str, bytes]) -> tuple[list[str], TextCounts]:
        with serving(content, "datasets", "someone/texts") as hub:
            use(hub.url, tmp_path, monkeypatch)
            reader = SourceReader(find_source(f"hf:someone/texts@{REVISION}", "", False))
            return [cut.text for cut in iter(reader.next, None)], reader.counts

    return read


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lambda plain: pa.compress(plain, "zstd", asbytes=True)])
def test_late_values_that_are_not_text_are_skipped(read, pack):
    suffix = {"bytes": "", "compress": ".gz"}.get(pack.__name__, ".zst")
    found, counts = read({f"{first}.jsonl{suffix}": pack(lines(first)) for first in (0, ROWS)})
    assert found == texts(0) + texts(ROWS)
    assert (counts.rows, counts.skipped) == (2 * ROWS + 6, 6)
    assert counts.examples[0] == f"0.jsonl{suffix}, line 401: the field 'text' is an object, not text"


@pytest.mark.parametrize(
    "config",
    [
        "config_name: *h",
        "data_dir: *h",
        "data_files: *h",
        "data_files: [{split: *h, path: x}]",
        "data_files: [{split: train, path: *h}]",
        "data_files: {train: *h}",
        "data_files: {? *h : x}",
    ],
)
def test_a_card_of_references_takes_no_memory(config):
    """Each level holds nine times the one before: the text of the last one would have half a gigabyte."""
    levels = "".join(f"{name}: &{name} [{','.join(['*' + last] * 9)}]\n" for last, name in pairwise("abcdefgh"))
    listed = f"---\na: &a [{','.join('x' * 9)}]\n{levels}configs:\n- {config}\n---\n"
    with pytest.raises(CorpusError):
        split_paths(listed, ["data/test.jsonl"], spec())


def test_other_formats_are_refused(read):
    with pytest.raises(CorpusError, match=r"holds b.csv, and only jsonl and parquet can be read") as caught:
        read({"a.jsonl": lines(0), "b.csv": b"text\na\n"})
    assert caught.value.remedy.endswith("datasets/someone/texts refs/convert/parquet")


def test_a_card_that_is_too_large_is_refused(read, monkeypatch):
    """Check a large card: its configurations might be in the part that is not read."""
    monkeypatch.setattr(hub_files, "MAX_CARD_BYTES", len(CARD))
    content = {"README.md": CARD.encode(), "data/a.jsonl": lines(0)}
    assert len(read(content)[0]) == ROWS
    content["README.md"] += b"x"
    with pytest.raises(CorpusError, match=r"README.md is larger than \d+ bytes"):
        read(content)


def test_a_full_disk_is_not_the_internet(read, monkeypatch):
    def fill(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub_files.huggingface_hub(), "hf_hub_download", fill)
    with pytest.raises(HomeError, match="No space left on device") as caught:
        read({"a.jsonl": lines(0)})
    assert "Free some space" in caught.value.remedy


def test_an_unreachable_hub_says_what_was_tried(tmp_path, monkeypatch):
    use("http://127.0.0.1:1", tmp_path, monkeypatch)
    with pytest.raises(InterruptedCorpusError, match=r"someone/texts .*revision a{40}.*could not be downl") as caught:
        find_source(f"hf:someone/texts@{REVISION}", "", False)
    assert "internet" in caught.value.remedy


def test_the_clients_telemetry_is_off():
    import huggingface_hub.constants as constants

    constants.HF_HUB_DISABLE_TELEMETRY = False
    hub_files.huggingface_hub()
    assert constants.HF_HUB_DISABLE_TELEMETRY
