"""Reading of an author's text, each file once and in bounded memory, from any saved position.

Several sources are mixed as they are read: the next text comes from the one of which the smallest share was read.
"""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from p2ptrain.base.text import one_line, printable
from p2ptrain.data.author_text import LocalFile, Source, SourceFile
from p2ptrain.data.chat_template import Dialogue
from p2ptrain.data.dialogues import broken, characters, dialogue_rows
from p2ptrain.data.rows import MOST_EXAMPLES, SURE_ROWS, TextCounts, Unusable, jsonl_rows, parquet_rows, skip, texts
from p2ptrain.data.sources import PIECE_CHARACTERS, not_text, unchanged, unreadable_text
from p2ptrain.data.stream import Cut, border

MIXED_CHARACTERS = 1 << 18
"""Characters of a document after which another source may go on: few sequences get a jump within them."""

LEAST_PIECE_BYTES, MOST_PIECE_BYTES, PIECES = 1 << 11, 1 << 15, 64
"""Bytes of a piece of plain text, which is held out or not as a whole: a 64th of what was read of the file, within
these bounds, so that a short text has several, and a long one some that hold eight sequences of 1,024 tokens."""

Item = TypeVar("Item", Cut, Dialogue)


class Taken(NamedTuple, Generic[Item]):
    """One piece of text, or a dialogue."""

    item: Item
    source: int
    """Number of the source."""


@dataclass(slots=True)
class ReadPlace:
    """Position in a source, after what was taken from it."""

    file: int = 0
    row: int = 0
    """Rows of the file that were read."""
    byte: int = 0
    """Bytes of a plain text that were read."""
    held: str = ""
    """End of a plain text's bytes that was not yet taken."""
    context: str = ""
    """Text before ``held``."""
    characters: int = 0
    """Characters that were taken of the whole source."""
    is_between: bool = True
    """Whether reading can continue here: not within a row."""
    is_read: bool = False
    """Whether nothing of the file is left."""
    is_done: bool = False


class SourceReader(Generic[Item]):
    """One source, read in order.

    Args:
        source: its files.
        saved: ``state`` of an earlier reader, to go on after it.
    """

    def __init__(self, source: Source, saved: dict[str, Any] | None = None) -> None:
        self._source = source
        saved = saved or {"place": {}, "counts": {}}
        self.place = ReadPlace(**saved["place"])
        self.counts = TextCounts(**saved["counts"])
        self.counts.where = source.name
        self._sizes = [each.size for each in source.files]
        self._open: _OpenedFile | None = None
        self._items: Iterator[Item] | None = None

    def state(self) -> dict[str, Any]:
        return {"place": asdict(self.place), "counts": asdict(self.counts)}

    @property
    def share(self) -> float:
        """Share of the source that was read, roughly: characters by bytes, which no machine's buffers change."""
        return self.place.characters / max(1, sum(self._sizes))

    @property
    def bytes(self) -> int:
        return sum(self._sizes)

    @property
    def done_bytes(self) -> int:
        """Bytes that were read of the files, for people."""
        before = sum(self._sizes[: self.place.file])
        return before if self._open is None else min(before + self._open.done_bytes, self.bytes)

    def next(self) -> Item | None:
        """Return the next item; None at the end. Raises CorpusError."""
        if self._items is None:
            self._items = self._read()
        return next(self._items, None)

    def _read(self) -> Iterator[Item]:
        place, source = self.place, self._source
        while place.file < len(source.files):
            file = source.files[place.file]
            self._open = _OpenedFile(file)
            with unchanged(file.path) if isinstance(file, LocalFile) else contextlib.nullcontext():
                if not place.is_read:
                    yield from self._items_of(file)
            self._open = None
            place.file, place.row, place.byte, place.is_read = place.file + 1, 0, 0, False
        self.counts.check()
        place.is_done = True

    def _items_of(self, file: SourceFile) -> Iterator[Any]:
        if self._source.is_dialogues:
            return self._dialogues(file)
        return self._plain(file) if file.format == "text" else self._rows(file)

    def _rows(self, file: SourceFile) -> Iterator[Cut]:
        """Yield the chunks of each row's text."""
        place, source = self.place, self._source
        read, unit = (jsonl_rows, "line") if file.format == "jsonl" else (parquet_rows, "row")
        assert self._open is not None
        rows = read(self._open, source.column, place.row)
        for number, text in texts(rows, f"{self._where(file)}{unit}", self.counts, source.is_hub):
            context = held = ""
            for start in range(0, len(text), PIECE_CHARACTERS):
                held += text[start : start + PIECE_CHARACTERS]
                ends = start + PIECE_CHARACTERS >= len(text)
                end = len(held) if ends else border(held)
                cut = Cut(context, held[:end], begins=start == 0, ends=ends)
                context, held = cut.after, held[end:]
                place.row = number
                place.characters += len(cut.text)
                place.is_between = ends
                yield cut

    def _plain(self, file: SourceFile) -> Iterator[Cut]:
        """Yield the pieces of a text file, a document."""
        place, decoder = self.place, codecs.getincrementaldecoder("utf-8")()
        assert self._open is not None
        begins = not place.byte
        try:
            with self._open.open("rb") as raw:
                raw.seek(place.byte)
                while True:
                    data = raw.read(max(LEAST_PIECE_BYTES, min(MOST_PIECE_BYTES, place.byte // PIECES)))
                    text = decoder.decode(data, final=not data)
                    if begins and place.byte == 0:
                        text = text.removeprefix("\ufeff")
                    place.byte += len(data)
                    place.held += text
                    if data and not place.held:
                        continue
                    if not data and not place.held and begins:
                        return  # no text
                    end = border(place.held) if data else len(place.held)
                    cut = Cut(place.context, place.held[:end], begins, ends=not data)
                    pending = len(decoder.getstate()[0])
                    place.held, place.context, begins = place.held[end:], cut.after, False
                    place.is_read = not data
                    place.characters += len(cut.text)
                    place.is_between = not pending
                    yield cut
                    if not data:
                        return
        except UnicodeDecodeError as error:
            raise not_text(file, error) from error
        except OSError as error:
            raise unreadable_text(file, error) from error

    def _dialogues(self, file: SourceFile) -> Iterator[Dialogue]:
        place, counts, source = self.place, self.counts, self._source
        assert self._open is not None
        found, unit = dialogue_rows(self._open, file.format, source.column, place.row)
        for number, dialogue in found:
            if source.is_hub and counts.skipped == counts.rows == SURE_ROWS:
                counts.check(is_whole=False)
            counts.rows += 1
            where = f"{self._where(file)}{unit} {number:,}"
            place.row = number
            if not isinstance(dialogue, Unusable):
                place.characters += sum(map(characters, dialogue.messages))
                yield dialogue._replace(place=where, may_skip=source.is_hub)
            elif source.is_hub:
                skip(counts, where, dialogue.why)
            else:
                raise broken(counts, where, dialogue.why)

    def _where(self, file: SourceFile) -> str:
        """Return the beginning of a row's place: the file, if the source has several."""
        return f"{one_line(printable(f'{file}'))}, " if len(self._source.files) > 1 or self._source.is_hub else ""


class TextMix(Generic[Item]):
    """Several sources, mixed as they are read.

    Args:
        sources: in the author's order.
        size: characters of an item.
        ends: whether a document ends with it.
        saved: ``state`` of an earlier mix.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        size: Callable[[Item], int],
        ends: Callable[[Item], bool],
        saved: dict[str, Any] | None = None,
    ) -> None:
        states = saved["sources"] if saved else [None] * len(sources)
        self.readers: list[SourceReader[Item]] = [
            SourceReader(source, state) for source, state in zip(sources, states, strict=True)
        ]
        self.size: Callable[[Item], int] = size
        self._ends: Callable[[Item], bool] = ends
        self._current: int | None = saved["current"] if saved else None
        self._taken: int = saved["taken"] if saved else 0

    def state(self) -> dict[str, Any] | None:
        """Return where reading can go on; None if it cannot go on from here."""
        if not all(each.place.is_between for each in self.readers):
            return None
        return {
            "sources": [each.state() for each in self.readers],
            "current": self._current,
            "taken": self._taken,
        }

    @property
    def share(self) -> float:
        """Share of the text that was taken, roughly, and the same on every machine."""
        taken = sum(each.place.characters for each in self.readers)
        return min(1.0, taken / max(1, sum(each.bytes for each in self.readers)))

    @property
    def done_share(self) -> float:
        """Share of all bytes that were read."""
        return sum(each.done_bytes for each in self.readers) / max(1, sum(each.bytes for each in self.readers))

    def __iter__(self) -> Iterator[Taken[Item]]:
        while True:
            number = self._chosen()
            if number is None:
                return
            item = self.readers[number].next()
            if item is None:
                self._current = None
                continue
            self._taken += self.size(item)
            self._current = None if self._ends(item) or self._taken >= MIXED_CHARACTERS else number
            if self._current is None:
                self._taken = 0
            yield Taken(item, number)

    def _chosen(self) -> int | None:
        if self._current is not None:
            return self._current
        left = [number for number, each in enumerate(self.readers) if not each.place.is_done]
        return min(left, key=lambda number: (self.readers[number].share, number), default=None)


class _OpenedFile:
    """File of rows that tells how far it was read."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._raw: Any = None

    def __str__(self) -> str:
        return str(self._file)

    @property
    def done_bytes(self) -> int:
        with contextlib.suppress(ValueError, OSError):  # closed
            return int(self._raw.tell()) if self._raw is not None else 0
        return 0

    def open(self, mode: str = "rb") -> Any:
        self._raw = self._file.open("rb")
        return self._raw


def total_counts(readers: Sequence[SourceReader[Any]]) -> TextCounts:
    """Return rows and skipped rows of all sources together."""
    found = TextCounts()
    for each in readers:
        found.rows += each.counts.rows
        found.skipped += each.counts.skipped
        found.examples += each.counts.examples[: MOST_EXAMPLES - len(found.examples)]
    return found
