"""Rows of jsonl and parquet files: the text of one column, in bounded memory.

Only the column with the text is looked at; what other columns hold, and whether it changes, has no effect. A row
without usable text is skipped and counted, so that one bad line does not cost the file: pyarrow, which reads parquet
here, gives up a file of jsonl for a broken line, a number, half a surrogate pair or a long row in it.
"""

from __future__ import annotations

import codecs
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple, TypeVar

from p2ptrain.base.errors import CorpusError
from p2ptrain.base.text import one_line, printable
from p2ptrain.data.unpacking import MOST_LINE_BYTES, RowFile, import_pyarrow, unpacked, unreadable

BATCH_ROWS = 64
"""Rows of parquet decoded at once. Guess: the memory that corpora of long documents take would settle it."""

SURE_ROWS = 1_000
"""Rows without any text after which a data set of the hub is refused, without downloading the rest. Guess: a good data
set that begins with so many empty rows would settle it."""

MOST_EXAMPLES = 5
"""Maximum number of skipped rows that a report names."""

MOST_NAMES = 10
"""Maximum number of columns that a message names."""

NAME_COLUMN = "Name the column with the text: p2ptrain init --text-field COLUMN"

_NO_FIELD = "no field "

_Found = TypeVar("_Found")
"""What is taken from a row: text, or the messages of a dialogue."""


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
    """Rows read; 0 for plain text. If the text is cut, some of them are read and not used."""
    documents: int = 0
    """Documents whose tokens are in the stream, the last perhaps in part."""
    text_bytes: int = 0
    """Bytes of their text as UTF-8; of a text that is cut, in proportion to its tokens."""
    is_cut: bool = False
    """Whether there is more text than the run needs, which was not read."""
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
    """Dialogues whose first answer that counts begins after a sequence's end, or that have none."""
    length_bits: dict[str, int] = field(default_factory=dict)
    """Dialogues by the bits of their lengths in tokens: 8 for 128 to 255."""
    unused_fields: dict[str, int] = field(default_factory=dict)
    """Messages, or rows, with a field that the chat template does not use, by its name."""

    def count_unused(self, names: Iterable[str]) -> None:
        """Count fields that the chat template does not use, of at most ``MOST_NAMES`` names."""
        for name in names:
            if name in self.unused_fields or len(self.unused_fields) < MOST_NAMES:
                self.unused_fields[name] = self.unused_fields.get(name, 0) + 1

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


def texts(
    rows: Iterable[tuple[int, str | Unusable]], unit: str, counts: TextCounts, is_remote: bool = False
) -> Iterator[tuple[int, str]]:
    """Yield number and text of rows that have text, each a document; count the rows, and those without text.

    Args:
        rows: number of the row, from 1, and its text.
        unit: what the number counts, "line" or "row".
        is_remote: whether reading the rest takes a network.

    Raises:
        CorpusError: none of the first ``SURE_ROWS`` remote rows has text. ``TextCounts.check`` judges at the end.
    """
    for number, found in rows:
        if is_remote and counts.skipped == counts.rows == SURE_ROWS:
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
        CorpusError: the file cannot be read or unpacked.
    """
    try:
        with file.open("rb") as raw, unpacked(raw, file) as content:
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
    return parquet_values(file, text_field, _check_text, lambda value, _: _arrow_text(value, text_field), after)


def parquet_values(
    file: RowFile,
    column: str,
    check: Callable[[Any, str, RowFile], None],
    take: Callable[[Any, Any], _Found | Unusable],
    after: int = 0,
    beside: str = "",
) -> Iterator[tuple[int, _Found | Unusable]]:
    """Yield row number and value of every row, from batches of one column.

    One page of the column, about a megabyte in most files and at most 2 GiB, is decoded at once.

    Args:
        column: its name.
        check: raises CorpusError if the column's type, the name and the file do not suit.
        take: returns the value of an Arrow scalar, and of the one ``beside`` it.
        after: number of the last row that is not wanted again.
        beside: name of another column, if the file has it.

    Raises:
        CorpusError: the file cannot be read, it has no such column or another type there, or pyarrow is not installed.
    """
    pyarrow, parquet = import_pyarrow(f"The corpus {file}")
    try:
        with file.open("rb") as raw, parquet.ParquetFile(raw, pre_buffer=False, buffer_size=1 << 20) as table:
            check(_column_type(table.schema_arrow, column, file), column, file)
            number, groups = 0, 0
            while groups < table.num_row_groups and number + table.metadata.row_group(groups).num_rows <= after:
                number += table.metadata.row_group(groups).num_rows
                groups += 1
            wanted = range(groups, table.num_row_groups)
            columns = [column, beside] if table.schema_arrow.names.count(beside) == 1 else [column]
            for batch in table.iter_batches(BATCH_ROWS, row_groups=wanted, columns=columns, use_threads=False):
                others = batch.column(beside) if beside in columns else itertools.repeat(None)
                # by name: a dotted name also selects a field inside a column
                for value, other in zip(batch.column(column), others, strict=False):
                    number += 1
                    if number > after:
                        yield number, take(value, other)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise unreadable(file, "parquet", error) from error


def parquet_types(file: RowFile) -> dict[str, Any]:
    """Return the Arrow type of each column. Raises CorpusError if the file cannot be read, or pyarrow is missing."""
    pyarrow, parquet = import_pyarrow(f"The corpus {file}")
    try:
        with file.open("rb") as raw, parquet.ParquetFile(raw) as table:
            schema = table.schema_arrow
            return {name: schema.field(name).type for name in schema.names if schema.names.count(name) == 1}
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise unreadable(file, "parquet", error) from error


def _encodable(text: str | Unusable) -> str | Unusable:
    """Refuse lone surrogates, which JSON can write and UTF-8 cannot: tokenizers fail on them."""
    if isinstance(text, str) and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return Unusable("half of a surrogate pair in the text")
    return text


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


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) < 1_000 else float(digits)


_DECODER = json.JSONDecoder(parse_int=_number)
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
