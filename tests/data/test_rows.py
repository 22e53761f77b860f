"""Rows of jsonl and parquet: every kind of row that has no text, and files that are odd in other ways."""

import bz2
import gzip
import io
import itertools
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from p2ptrain.base.errors import CorpusError
from p2ptrain.data import rows, unpacking
from p2ptrain.data.rows import TextCounts, jsonl_rows, names, parquet_rows, texts


@pytest.fixture
def jsonl(tmp_path):
    """``jsonl(content)``: the texts of a file with this content, and the counts."""

    def read(content: bytes) -> tuple[list[str], TextCounts]:
        path, counts = tmp_path / "some.jsonl", TextCounts("some.jsonl")
        path.write_bytes(content)
        return [text for _, text in texts(jsonl_rows(path, "text"), "line", counts)], counts

    return read


@pytest.fixture
def parquet(tmp_path):
    """``parquet(table)``: the texts of a file with this table, and the counts."""

    def read(table: pa.Table, **options: object) -> tuple[list[str], TextCounts]:
        path, counts = tmp_path / "some.parquet", TextCounts("some.parquet")
        pq.write_table(table, path, **options)
        return [text for _, text in texts(parquet_rows(path, "text"), "row", counts)], counts

    return read


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"body": "x", "id": 1}', "no field 'text', but 'body', 'id'"),
        (b"{}", "no field 'text', but no field at all"),
        (b'{"text": null}', "the field 'text' is null, not text"),
        (b'{"text": 3}', "the field 'text' is a number, not text"),
        (b'{"text": true}', "the field 'text' is true or false, not text"),
        (b'{"text": ["a"]}', "the field 'text' is a list, not text"),
        (b'{"text": {"a": 1}}', "the field 'text' is an object, not text"),
        (b'["text"]', "a list instead of an object"),
        (b'"text"', "text instead of an object"),
        (b'{"text": "caf\xe9"}', "invalid UTF-8"),
        (b'{"text": "a"', "invalid JSON"),
        (b"[" * 100_000, "invalid JSON"),
        (rb'{"text": "\ud800"}', "half of a surrogate pair in the text"),
        (b'{"text": "' + b"x" * 200_000 + b'"}', "longer than 150,000 bytes"),
    ],
)
def test_a_row_without_text_is_skipped_and_named(jsonl, monkeypatch, line, why):
    monkeypatch.setattr(rows, "MOST_LINE_BYTES", 150_000)
    found, counts = jsonl(b'{"text": "a"}\n' + line + b'\n\n{"text": ""}\n{"text": "\xc3\xa9"}\n')
    assert found == ["a", "é"]
    assert (counts.rows, counts.skipped) == (4, 1)
    assert counts.examples == [f"line 2: {why}"]
    counts.check()


def test_other_columns_have_no_effect(jsonl):
    """A field that appears late, changes its type, is null for long, or holds a number that Python refuses."""
    lines = [{"text": "0", "late": None}] * 100 + [{"text": "1", "late": 2}, {"late": "3", "text": "4", "new": [5]}]
    content = "".join(json.dumps(line) + "\n" for line in lines) + f'{{"text": "6", "large": {"7" * 5000}}}'
    found, counts = jsonl(content.encode())
    assert found == ["0"] * 100 + ["1", "4", "6"]
    assert not counts.skipped


def test_a_late_change_of_type_is_no_text(jsonl):
    _, counts = jsonl(b'{"text": "a"}\n' * 3 + b'{"text": {"a": 1}}\n')
    assert counts.examples == ["line 4: the field 'text' is an object, not text"]


@pytest.mark.parametrize(
    ("content", "most_line_bytes"),
    [(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n', 100), (b'{"text": "a"}\n{"text": "b"}\n', 14)],
)
def test_lines_of_any_system_are_read(jsonl, monkeypatch, content, most_line_bytes):
    monkeypatch.setattr(rows, "MOST_LINE_BYTES", most_line_bytes)
    assert jsonl(content)[0] == ["a", "b"]


def test_a_line_of_any_length_takes_bounded_memory():
    class Terabyte(io.BytesIO):
        left, most = 1 << 40, 0

        def readline(self, size=-1):
            self.most = max(self.most, size)
            self.left -= 1 << 34
            return b"x" * min(size, 100) if self.left > 0 else b""

    file = Terabyte()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "MOST_LINE_BYTES", 50)
        assert list(rows._lines(file)) == [(1, None)]
    assert 0 < file.most <= 1 << 20


def test_packed_files_are_read(jsonl):
    content = b'{"text": "a"}\n{"text": "b"}\n'
    for pack in (gzip.compress, bz2.compress, lzma.compress, lambda plain: pa.compress(plain, "zstd", asbytes=True)):
        assert jsonl(pack(content))[0] == ["a", "b"]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, lambda plain: pa.compress(plain, "zstd")])
def test_a_packed_file_that_is_cut_is_an_error(jsonl, pack):
    packed = bytes(pack(b"".join(b'{"text": "%d"}\n' % number for number in range(5000))))
    with pytest.raises(CorpusError, match=r"some\.jsonl cannot be read as jsonl: \w"):
        jsonl(packed[: len(packed) // 2])


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_every_type_of_text_in_parquet_is_read(parquet, kind):
    expected = [f"text {number % 7}" for number in range(1000)]
    table = pa.table({"id": range(1000), "text": pa.array(expected).cast(kind), "null": pa.nulls(1000)})
    found, counts = parquet(table, row_group_size=300)
    assert found == expected
    assert (counts.rows, counts.skipped) == (1000, 0)


def test_only_the_texts_column_of_parquet_is_read(parquet, monkeypatch):
    taken = []
    batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile,
        "iter_batches",
        lambda *args, **options: (taken.append(each) or each for each in batches(*args, **options)),
    )
    parquet(pa.table({"id": range(1000), "text": ["a"] * 1000}))
    assert {tuple(each.schema.names) for each in taken} == {("text",)}
    assert max(map(len, taken)) <= rows.BATCH_ROWS


def test_a_dotted_column_is_not_a_field_of_another_one(tmp_path):
    path = tmp_path / "some.parquet"
    pq.write_table(pa.table({"meta": [{"text": "no"}] * 3, "meta.text": ["a", "b", "c"]}), path)
    assert list(parquet_rows(path, "meta.text")) == [(1, "a"), (2, "b"), (3, "c")]


@pytest.mark.parametrize("after", [0, 1, 299, 300, 301, 999, 1000])
def test_rows_are_continued_after_any_of_them(tmp_path, after):
    table = pa.table({"text": [f"text {number}" for number in range(1, 1001)]})
    pq.write_table(table, tmp_path / "some.parquet", row_group_size=300)
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    expected = [(number, f"text {number}") for number in range(after + 1, 1001)]
    assert list(parquet_rows(tmp_path / "some.parquet", "text", after)) == expected
    assert list(jsonl_rows(tmp_path / "some.jsonl", "text", after)) == expected


def test_rows_of_parquet_without_text_are_skipped(parquet):
    raw = pa.array([b"a", None, b"", b"\xff", b"b", b"c"])
    broken = pa.StringArray.from_buffers(len(raw), *raw.buffers()[1:], raw.buffers()[0])
    found, counts = parquet(pa.table({"text": broken}))
    assert found == ["a", "b", "c"]
    assert (counts.rows, counts.skipped) == (6, 2)
    assert counts.examples == ["row 2: the field 'text' is null, not text", "row 4: invalid UTF-8"]


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (pa.table({"body": ["a"], "id": [1]}), "does not have one column 'text', but 'body', 'id'"),
        (pa.table([["a"], ["b"]], names=["text", "text"]), "does not have one column 'text', but 'text', 'text'"),
        (pa.table({"text": [1]}), "The column 'text' of .* holds int64, not text"),
        (pa.table({"text": [b"a"]}), "holds binary, not text"),
        (pa.table({"text": [{"text": "a"}]}), "holds struct<text: string>, not text"),
    ],
)
def test_a_wrong_column_of_parquet_says_what_is_there(parquet, table, problem):
    with pytest.raises(CorpusError, match=problem):
        parquet(table)


def test_a_damaged_parquet_file_is_an_error(tmp_path):
    path = tmp_path / "some.parquet"
    pq.write_table(pa.table({"text": [f"{number}" * 50 for number in range(5000)]}), path)
    whole = path.read_bytes()
    for content in (b"", whole[:-100], whole[: len(whole) // 2], whole[:1000] + b"\xff" * 5000 + whole[6000:]):
        path.write_bytes(content)
        with pytest.raises(CorpusError, match=r"some\.parquet cannot be read as parquet: "):
            list(parquet_rows(path, "text"))


def test_more_than_half_without_text_is_an_error_and_half_is_none(jsonl):
    _, counts = jsonl(b'{"text": "a"}\n{"body": "b"}\n' * 20)
    counts.check()
    _, counts = jsonl(b'{"text": "a"}\n' + b'{"body": "b"}\n{"text": 3}\n' * 20)
    with pytest.raises(CorpusError, match=r"^40 of 41 rows of .*jsonl have no text\. .* 35 more\.") as caught:
        counts.check()
    assert caught.value.problem.endswith(
        "Found: line 2, line 4, line 6: no field 'text', but 'body'; line 3, line 5: the field 'text' is a number, "
        "not text; and 35 more."
    )


def test_a_data_set_without_any_text_is_not_downloaded_to_its_end():
    endless = ((number, rows.Unusable("invalid JSON")) for number in itertools.count(1))
    expected = r"^The first 1,000 rows of some\.jsonl have no text, and the rest was not read\. Found: "
    with pytest.raises(CorpusError, match=expected):
        list(texts(endless, "line", TextCounts("some.jsonl"), is_remote=True))
    counts = TextCounts("some.jsonl")
    assert list(texts(((each, rows.Unusable("invalid JSON")) for each in range(rows.SURE_ROWS)), "line", counts)) == []
    with pytest.raises(CorpusError, match=r"^1,000 of 1,000 rows of "):
        counts.check()


def test_a_files_names_are_cut_and_printable():
    listed = names(["\x1b[2J" + "x" * 100, *map(str, range(30))])
    assert len(listed) < 150
    assert listed.isprintable()
    assert listed.endswith(" and 21 more")


def test_zstd_may_begin_with_a_frame_to_skip(tmp_path: Path):
    """Check a skippable frame before and between frames (RFC 8878), and an empty frame."""
    frame, empty = (pa.compress(plain, "zstd", asbytes=True) for plain in (b'{"text": "a"}\n', b""))
    skipped = b"\x5a\x2a\x4d\x18\x05\x00\x00\x00hello"
    for content in (skipped + frame + skipped + frame, empty + frame + frame):
        (tmp_path / "packed").write_bytes(content)
        assert [text for _, text in jsonl_rows(tmp_path / "packed", "text")] == ["a", "a"]
        assert unpacking.first_line(tmp_path / "packed") == (b'{"text": "a"}\n', True)


def test_zstd_that_only_its_command_unpacks(tmp_path: Path):
    """Check a frame header that asks for a window of 2 GiB, as zstd --long=31 writes it."""
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00\xa8\x01\x00\x00")
    with pytest.raises(CorpusError, match="too much memory") as caught:
        list(jsonl_rows(tmp_path / "a.zst", "text"))
    assert "zstd -dc --long=31" in caught.value.remedy


def test_a_file_is_judged_whole(tmp_path: Path):
    """Check a file of which the first 1,500 rows have no text, and the other 4,500 have."""
    lines = ['{"other": 1}'] * 1500 + ['{"text": "a"}'] * 4500
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    counts = TextCounts("a.jsonl")
    assert len(list(texts(jsonl_rows(tmp_path / "a.jsonl", "text"), "line", counts))) == 4500
    counts.check()
    assert (counts.rows, counts.skipped) == (6000, 1500)
