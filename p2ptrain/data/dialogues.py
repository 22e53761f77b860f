"""Dialogues of jsonl and parquet files: the messages of every row, checked.

A message has a ``role`` and a ``content``: text, null, or a list of parts ``{"type": "text", "text": …}``. Its other
fields, and the list ``tools`` of its row, are for the chat template, as in ``apply_chat_template`` of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from p2ptrain.base.errors import CorpusError
from p2ptrain.base.text import one_line, printable
from p2ptrain.data.chat_template import Dialogue
from p2ptrain.data.rows import (
    TextCounts,
    Unusable,
    jsonl_values,
    kind_of,
    names,
    parquet_types,
    parquet_values,
)
from p2ptrain.data.unpacking import RowFile

ROLES = ("system", "user", "assistant", "tool")

MOST_DEPTH = 50
"""Maximum depth of the lists and objects in a message."""

UNCOUNTED = ("weight", "train", "training", "loss")
"""Fields that keep a message from being learned if they are 0 or false: ``weight`` of OpenAI and Mistral, ``train`` and
``training`` of axolotl, ``loss`` of ms-swift."""

DEFAULT_MESSAGES = "messages"
"""Column of the messages: the usual name on the hub."""

TOOLS = "tools"
"""Column of the tools, as TRL and OpenAI have it."""

_REMEDY = "Correct or remove that row."


class BrokenRowError(CorpusError):
    """A row of a file has no usable dialogue; the remedy is for the corpus of a run."""


def has_messages(path: RowFile, file_format: str, column: str) -> bool:
    """Return whether the first row of a jsonl or parquet file has a list there. Raises CorpusError if unreadable."""
    if file_format == "parquet":
        kind = parquet_types(path).get(column)
        return kind is not None and _is_messages(kind)
    first = next(jsonl_values(path, lambda row: row), None)
    return first is not None and isinstance(first[1], Mapping) and isinstance(first[1].get(column), list)


def has_column(path: RowFile, file_format: str, column: str) -> bool:
    """Return whether a jsonl file's first row, or a parquet file, has a column. Raises CorpusError if unreadable."""
    if file_format == "parquet":
        return column in parquet_types(path)
    first = next(jsonl_values(path, lambda row: row), None)
    return first is not None and isinstance(first[1], Mapping) and column in first[1]


def broken(counts: TextCounts, place: str, why: str) -> BrokenRowError:
    return BrokenRowError(f"{counts.where}, {place}: {why}.", _REMEDY)


def dialogue_rows(
    file: RowFile, file_format: str, column: str, after: int = 0
) -> tuple[Iterator[tuple[int, Dialogue | Unusable]], str]:
    """Return the rows of a file after one, and what their numbers count."""
    if file_format == "jsonl":
        return jsonl_values(file, lambda row: dialogue_of_row(row, column), after), "line"

    def take(value: Any, tools: Any) -> Dialogue | Unusable:
        return _from_arrow(value, tools, column)

    return parquet_values(file, column, _check_messages, take, after, beside=TOOLS), "row"


def dialogue_of_row(row: object, column: str) -> Dialogue | Unusable:
    """Return the dialogue of one decoded row, or the reason why it has none."""
    if not isinstance(row, Mapping):
        return Unusable(f"{kind_of(row)} instead of an object")
    if column not in row:
        return Unusable(f"no field {column!r}, but {names(row) or 'no field at all'}")
    return dialogue_of(row[column], column, row.get(TOOLS))


def dialogue_of(value: object, column: str, tools: object = None) -> Dialogue | Unusable:
    """Return checked messages, the last of which is the assistant's, or the reason why there are none."""
    if not isinstance(value, list):
        return Unusable(f"the field {column!r} is {kind_of(value)}, not a list of messages")
    if not value:
        return Unusable(f"the field {column!r} has no messages")
    messages: list[dict[str, Any]] = []
    for number, each in enumerate(value, 1):
        message = _message(each)
        if isinstance(message, Unusable):
            return Unusable(f"message {number} {message.why}")
        messages.append(message)
    if messages[-1]["role"] != "assistant":
        return Unusable(f"the last message has the role {messages[-1]['role']!r}, not 'assistant'")
    found = _tools(tools)
    if isinstance(found, Unusable):
        return found
    uncounted = [
        place
        for place, each in enumerate(messages)
        if each["role"] == "assistant" and any(each.get(name, 1) in (0, False) for name in UNCOUNTED)
    ]
    return Dialogue("", messages, found, uncounted)


def characters(value: object) -> int:
    """Return how many characters a decoded JSON value has: those of its texts and names, and one for each other."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(characters(each) + (name not in ("role", "content")) * len(name) for name, each in value.items())
    return sum(map(characters, value)) if isinstance(value, list) else 1


def dialogue_size(dialogue: Dialogue) -> int:
    """Return about how many characters the text of a dialogue has."""
    return sum(characters(each) + 256 for each in dialogue.messages) + characters(dialogue.tools)


def _message(value: object) -> dict[str, Any] | Unusable:
    if not isinstance(value, Mapping):
        return Unusable(f"is {kind_of(value)}, not an object with role and content")
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        found = f"the role {one_line(role, 40)!r}" if isinstance(role, str) else "no role"
        return Unusable(f"has {found}, and may have {', '.join(ROLES)}")
    others = {name: each for name, each in value.items() if each is not None and name != "content"}
    text = _content(content)
    if text is None and (content is not None or role != "assistant" or others.keys() <= {"role", *UNCOUNTED}):
        return Unusable(f"has {kind_of(content)} as its content, not text")
    for name, each in (("content", text), *others.items()):
        if why := _not_writable(each):
            return Unusable(f"has {why} in its {one_line(name, 40)}")
    return {**others, "content": text}


def _tools(value: object) -> list[Any] | Unusable | None:
    """Return the tools of a row: a list, or a list that is written as text, as parquet files often have it."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            return Unusable(f"the field {TOOLS!r} is text that is not JSON")
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        return Unusable(f"the field {TOOLS!r} is {kind_of(value)}, not a list")
    return Unusable(f"the field {TOOLS!r} has {why}") if (why := _not_writable(value)) else value


def _not_writable(value: object, depth: int = MOST_DEPTH) -> str:
    """Return why a decoded JSON value cannot be given to a template; "" if it can."""
    if isinstance(value, str):
        return "" if value.isascii() or _is_encodable(value) else "half of a surrogate pair"
    if value is None or isinstance(value, (bool, int, float)):
        return ""
    if not isinstance(value, (Mapping, list)):
        return f"a {type(value).__name__}, which JSON lacks,"
    if not depth:
        return f"more than {MOST_DEPTH} lists and objects in each other"
    parts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    return next((why for each in parts if (why := _not_writable(each, depth - 1))), "")


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _content(value: object) -> str | None:
    """Return the text of a content, which may be a list of text parts; None if it is something else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    parts = [each.get("text") if isinstance(each, Mapping) and each.get("type") == "text" else None for each in value]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]


def _check_messages(kind: Any, column: str, file: RowFile) -> None:
    """Raise CorpusError unless an Arrow type is a list of structures."""
    if not _is_messages(kind):
        raise CorpusError(
            f"The column {column!r} of {printable(f'{file}')} holds {one_line(str(kind), 80)}, not messages.",
            "Name the column with the messages: p2ptrain init --text-field COLUMN",
        )


def _is_messages(kind: Any) -> bool:
    """Return whether an Arrow type is a list of structures."""
    import pyarrow.types as types

    return (types.is_list(kind) or types.is_large_list(kind)) and types.is_struct(kind.value_type)


def _from_arrow(value: Any, tools: Any, column: str) -> Dialogue | Unusable:
    try:
        found = value.as_py(), None if tools is None else tools.as_py()
    except UnicodeDecodeError:
        return Unusable("invalid UTF-8")
    messages, tools = (_without_nulls(each) for each in found)
    return dialogue_of(messages, column, tools)


def _without_nulls(value: Any) -> Any:
    """Leave out what is null of objects: Arrow gives all of a column the same fields."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
