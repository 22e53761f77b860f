"""Rows of jsonl and parquet files: the text of one column, in bounded memory.

Only the column with the text is looked at; what other columns hold, and whether it changes, has no effect. A row
without usable text is skipped and counted, so that one bad line does not cost the file.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Protocol, TypeVar, cast

from p2ptrain.base import files
from p2ptrain.base.documents import install_extra
from p2ptrain.base.errors import CorpusError
from p2ptrain.base.text import one_line, printable

ROWS_VERSION = 3
"""Version of the text that jsonl and parquet files yield. Raise it when the same files would yield another text, so
that cached token streams are not used."""

MOST_LINE_BYTES = 32 << 20
"""Maximum size of a line of jsonl; a longer one is skipped. Decoding takes up to ten times as much memory. Guess: the
longest documents of public corpora would settle it."""

BATCH_ROWS = 64
"""Rows of parquet decoded at once. Guess: the memory that corpora of long documents take would settle it."""

SURE_ROWS = 1_000
"""Rows without any text after which the file is refused, without reading the rest. Guess: a good corpus that begins
with so many empty rows would settle it."""

MOST_EXAMPLES = 5
"""Maximum number of skipped rows that a report names."""

MOST_NAMES = 10
"""Maximum number of columns that a message names."""

NAME_COLUMN = (
    "Name the column with the text: `p2ptrain init --text-field`, or corpus.text_field before the run is signed. If "
    "the run is not yours, ask its author."
)

INSTALL_DATA = install_extra("data")

_NO_FIELD = "no field "

_Found = TypeVar("_Found")
"""What is taken from a row: text, or the messages of a dialogue."""

_OPENERS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


class RowFile(Protocol):
    """File with rows: a local path, or a file of the hub; its string names it in messages."""

    def open(self, mode: Literal["rb"], /) -> IO[bytes]:
        """Open for reading and seeking."""


class UnreadableError(CorpusError):
    """A file, or what was received of it, is damaged."""


class ColumnError(CorpusError):
    """A file has no such column, or something else in it; the remedy is for the text of a run."""


class Unusable(NamedTuple):
    """The reason why a row has no text."""

    why: str


@dataclass(slots=True)
class TextCounts:
    """Counts of what was read from a corpus, for a report to the owner."""

    where: str = ""
    """Name of the source in messages."""
    rows: int = 0
    """Rows read; 0 for plain text. If the text is cut, up to a megabyte of them is read and not used."""
    documents: int = 0
    """Documents whose tokens are in the stream, the last perhaps in part."""
    text_bytes: int = 0
    """Bytes of their text as UTF-8; of a text that is cut, in proportion to its tokens."""
    is_cut: bool = False
    """Whether ``corpus.max_tokens`` leaves out the rest of the text."""
    skipped: int = 0
    """Rows without usable text; rows with an empty text are not among them."""
    examples: list[str] = field(default_factory=list)
    """The first skipped rows: place and reason."""
    answer_tokens: int = 0
    """Tokens of answers, which training predicts; 0 unless the corpus has dialogues."""
    padding_tokens: int = 0
    """Tokens that fill rows of dialogues."""
    truncated: int = 0
    """Dialogues that are longer than a sequence and lose their end."""
    left_out: int = 0
    """Dialogues whose first answer begins after a sequence's end."""

    def check(self, is_whole: bool = True) -> None:
        """Raise CorpusError if more than half of the rows were skipped; ``is_whole``: no row was left unread."""
        if 2 * self.skipped > self.rows:
            which = f"{self.skipped:,} of {self.rows:,} rows" if is_whole else f"The first {self.rows:,} rows"
            rest = "" if is_whole else ", and the rest was not read"
            found = f"{which} of {self.where} have no text{rest}"
            common = {example.partition(": ")[2] for example in self.examples}
            if len(common) == 1 and (why := common.pop()).startswith(_NO_FIELD):
                raise ColumnError(f"{found}: {why}.", NAME_COLUMN)
            raise ColumnError(
                f"{found}. Found: {reasons(self.examples, self.skipped)}.",
                f"Check that the file is whole. {NAME_COLUMN}",
            )


def reasons(examples: Sequence[str], skipped: int) -> str:
    """Describe skipped rows on one line, each reason once, of which ``TextCounts.examples`` lists the first rows."""
    places: dict[str, list[str]] = {}
    for place, _, why in (example.partition(": ") for example in examples):
        places.setdefault(why, []).append(place)
    more = skipped - len(examples)
    found = [f"{', '.join(each)}: {why}" for why, each in places.items()] + ([f"and {more:,} more"] if more else [])
    return "; ".join(found)


def texts(rows: Iterable[tuple[int, str | Unusable]], unit: str, counts: TextCounts) -> Iterator[tuple[int, str]]:
    """Yield number and text of rows that have text, each a document; count the rows, and those without text.

    Args:
        rows: number of the row, from 1, and its text.
        unit: what the number counts, "line" or "row".

    Raises:
        CorpusError: there are more than ``SURE_ROWS`` rows, and none of the first ones has text.
            ``TextCounts.check`` judges at the end.
    """
    for number, found in rows:
        if counts.skipped == counts.rows == SURE_ROWS:
            counts.check(is_whole=False)
        counts.rows += 1
        text = _encodable(found)
        if isinstance(text, Unusable):
            skip(counts, f"{unit} {number:,}", text.why)
        elif text:
            yield number, text


def skip(counts: TextCounts, place: str, why: str) -> None:
    """Count a row without usable text."""
    counts.skipped += 1
    if len(counts.examples) < MOST_EXAMPLES:
        counts.examples.append(f"{place}: {why}")


def text_of(row: object, text_field: str) -> str | Unusable:
    """Return the text of one decoded row, or the reason why it has none."""
    if not isinstance(row, Mapping):
        return Unusable(f"{kind_of(row)} instead of an object")
    if text_field not in row:
        return Unusable(f"{_NO_FIELD}{text_field!r}, but {names(row) or 'no field at all'}")
    value = row[text_field]
    return value if isinstance(value, str) else Unusable(f"the field {text_field!r} is {kind_of(value)}, not text")


def names(columns: Iterable[object]) -> str:
    """List names of columns for a message; the file determines them, so both their number and length are bounded."""
    listed = [repr(one_line(str(name), 40)) for name in columns]
    return ", ".join(listed[:MOST_NAMES]) + (f" and {more} more" if (more := len(listed) - MOST_NAMES) > 0 else "")


def jsonl_rows(file: RowFile, text_field: str, after: int = 0) -> Iterator[tuple[int, str | Unusable]]:
    """Yield line number and text of every line that is not blank; see ``jsonl_values``."""
    return jsonl_values(file, lambda row: text_of(row, text_field), after)


def jsonl_values(
    file: RowFile, take: Callable[[object], _Found | Unusable], after: int = 0
) -> Iterator[tuple[int, _Found | Unusable]]:
    """Yield line number and value of every line that is not blank; the file may be packed by gzip, bzip2, xz or zstd.

    Args:
        take: returns the value of a decoded row.
        after: number of the last line that is not wanted again.

    Raises:
        UnreadableError: the file cannot be read or unpacked.
    """
    try:
        with file.open("rb") as raw, _unpacked(raw, file) as content:
            for number, line in _lines(content):
                if number <= after:
                    continue
                if line is None:
                    yield number, Unusable(f"longer than {MOST_LINE_BYTES:,} bytes")
                elif not line.isspace():
                    yield number, _parsed(line, take)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:  # gzip raises EOFError for a truncated file
        raise unreadable(file, "jsonl", error) from error


def parquet_rows(file: RowFile, text_field: str, after: int = 0) -> Iterator[tuple[int, str | Unusable]]:
    """Yield row number and text of every row; see ``parquet_values``."""
    return parquet_values(file, text_field, _check_text, lambda value: _arrow_text(value, text_field), after)


def parquet_values(
    file: RowFile,
    column: str,
    check: Callable[[Any, str, RowFile], None],
    take: Callable[[Any], _Found | Unusable],
    after: int = 0,
) -> Iterator[tuple[int, _Found | Unusable]]:
    """Yield row number and value of every row, from batches of one column.

    One page of the column, about a megabyte in most files and at most 2 GiB, is decoded at once.

    Args:
        column: its name.
        check: raises CorpusError if the column's type, the name and the file do not suit.
        take: returns the value of an Arrow scalar.
        after: number of the last row that is not wanted again.

    Raises:
        UnreadableError: the file cannot be read.
        CorpusError: it has no such column or another type there, or pyarrow is not installed.
    """
    pyarrow, parquet = _import_pyarrow(f"The corpus {file}")
    try:
        with file.open("rb") as raw, parquet.ParquetFile(raw, pre_buffer=False, buffer_size=1 << 20) as table:
            check(_column_type(table.schema_arrow, column, file), column, file)
            number, groups = 0, 0
            while groups < table.num_row_groups and number + table.metadata.row_group(groups).num_rows <= after:
                number += table.metadata.row_group(groups).num_rows
                groups += 1
            wanted = range(groups, table.num_row_groups)
            for batch in table.iter_batches(BATCH_ROWS, row_groups=wanted, columns=[column], use_threads=False):
                for value in batch.column(column):  # by name: a dotted name also selects a field inside a column
                    number += 1
                    if number > after:
                        yield number, take(value)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise unreadable(file, "parquet", error) from error


def parquet_types(file: RowFile) -> dict[str, Any]:
    """Return the Arrow type of each column. Raises CorpusError if the file cannot be read, or pyarrow is missing."""
    pyarrow, parquet = _import_pyarrow(f"The corpus {file}")
    try:
        with file.open("rb") as raw, parquet.ParquetFile(raw) as table:
            schema = table.schema_arrow
            return {name: schema.field(name).type for name in schema.names if schema.names.count(name) == 1}
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise unreadable(file, "parquet", error) from error


def unreadable(file: RowFile, file_format: str, error: Exception) -> UnreadableError:
    reason = one_line((error.strerror if isinstance(error, OSError) else None) or str(error))
    return UnreadableError(
        f"{printable(f'{file}')} cannot be read as {file_format}: {reason.rstrip('.')}.",
        files.remedy(error, "")
        if isinstance(error, OSError) and error.errno is not None
        else f"Name a whole {file_format} file, as the run needs.",
    )


def _encodable(text: str | Unusable) -> str | Unusable:
    """Refuse lone surrogates, which JSON can write and UTF-8 cannot: tokenizers fail on them."""
    if isinstance(text, str) and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return Unusable("half of a surrogate pair in the text")
    return text


class FirstLine(NamedTuple):
    """Beginning of a file."""

    line: bytes
    """First line, or as much of it as a row may have."""
    is_packed: bool


def first_line(path: Path) -> FirstLine:
    """Return the first line of a file, which may be packed. Raises CorpusError if it cannot be read or unpacked."""
    try:
        with path.open("rb") as raw:
            is_packed = _head(raw).startswith((*_OPENERS, _ZSTANDARD))
            with _unpacked(raw, path) as content:
                return FirstLine(content.readline(MOST_LINE_BYTES), is_packed)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise unreadable(path, "text", error) from error


def _head(raw: IO[bytes]) -> bytes:
    head = raw.read(6)
    raw.seek(0)
    return head


def _unpacked(raw: IO[bytes], file: RowFile) -> IO[bytes]:
    head = _head(raw)
    for magic, opened in _OPENERS.items():
        if head.startswith(magic):
            return cast("IO[bytes]", opened(raw))
    if head.startswith(_ZSTANDARD):
        pyarrow, _ = _import_pyarrow(f"The packed corpus {file}")
        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "zstd"))
    return raw


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Yield number and content of every line; None as the content of a line that is too long."""
    number = 0
    while line := file.readline(MOST_LINE_BYTES + 1):
        number += 1
        if len(line) <= MOST_LINE_BYTES:
            yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(1 << 20)
        yield number, None


_DECODER = json.JSONDecoder(parse_int=float)
"""JSON decoder for which an integer may have any number of digits: other columns must not make a row unusable."""


def _parsed(line: bytes, take: Callable[[object], _Found | Unusable]) -> _Found | Unusable:
    try:
        row = _DECODER.decode(line.decode())
    except UnicodeDecodeError:
        return Unusable("invalid UTF-8")
    except (ValueError, RecursionError):
        return Unusable("invalid JSON")
    return take(row)


def _column_type(schema: Any, column: str, file: RowFile) -> Any:
    """Return the type of a column. Raises CorpusError unless an Arrow schema has one of this name."""
    if schema.names.count(column) != 1:
        found = names(schema.names) or "none at all"
        raise ColumnError(f"{printable(f'{file}')} does not have one column {column!r}, but {found}.", NAME_COLUMN)
    return schema.field(column).type


def _check_text(kind: Any, text_field: str, file: RowFile) -> None:
    """Raise CorpusError unless an Arrow type is text."""
    import pyarrow.types as types

    value = kind.value_type if types.is_dictionary(kind) else kind
    is_text = types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)
    if not (is_text or types.is_null(value)):
        raise ColumnError(
            f"The column {text_field!r} of {printable(f'{file}')} holds {one_line(str(kind), 80)}, not text.",
            NAME_COLUMN,
        )


def _arrow_text(value: Any, text_field: str) -> str | Unusable:
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        return Unusable("invalid UTF-8")
    return Unusable(f"the field {text_field!r} is null, not text") if text is None else text


def kind_of(value: object) -> str:
    """Return the name of the type of a decoded value for a message, as JSON calls it."""
    named = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
    return named.get(type(value), "an object" if isinstance(value, Mapping) else type(value).__name__)


def _import_pyarrow(purpose: str) -> tuple[Any, Any]:
    """Import the optional ``pyarrow`` library; done late because it takes a second."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise CorpusError(f"{purpose} needs the package pyarrow, which is not installed.", INSTALL_DATA) from error
    return pyarrow, pyarrow.parquet
