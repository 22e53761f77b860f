"""Readable schema errors: one line per problem, with the field, the value and the nearest valid name.

pydantic reports a location, a type and a message for each error. This module turns the report into lines, and for
manifests into one ``ManifestError``. Names and values may be untrusted, so they are shortened and made printable.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from p2ptrain.base.errors import ManifestError
from p2ptrain.manifest.schema import Manifest
from p2ptrain.manifest.section import Section

_MAX_LINES = 20  # Fits on a screen, and bounds the work for a hostile manifest. Guess: count errors in real edits.
_MAX_SHOWN = 60  # Characters of a name or value. Guess: measure the values in real error messages.
_TAGGED_SECTIONS = (
    "model",
    "model.init",
    "tokenizer",
    "corpus",
)  # pydantic adds the chosen variant to their locations.


def validated(data: Mapping[str, Any]) -> Manifest:
    """Build a manifest from plain data. Raises ManifestError that lists all problems."""
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        remedy = "Correct these fields, or the options that set them."
        raise ManifestError("\n".join(error_lines(error, Manifest, _TAGGED_SECTIONS)), remedy) from None


def error_lines(error: ValidationError, root: type[Section], tagged: Collection[str] = ()) -> list[str]:
    """Return one line per problem; at most ``_MAX_LINES`` and a count of the others.

    Args:
        error: pydantic's report.
        root: the validated section type.
        tagged: sections with variants, whose names pydantic adds to the locations.
    """
    entries = _merged(error.errors(include_url=False))
    lines = [line for entry in entries[:_MAX_LINES] for line in _lines(entry, root, tagged)]
    if len(entries) > _MAX_LINES:
        lines.append(f"and {len(entries) - _MAX_LINES} more")
    return lines


def _merged(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Merge the entries of a field with several lists of literals, which pydantic reports separately."""
    found: dict[Any, dict[str, Any]] = {}
    for number, entry in enumerate(entries):
        if entry["type"] != "literal_error":
            found[number] = dict(entry)
            continue
        place = tuple(part for part in entry["loc"] if not str(part).startswith("literal["))
        first = found.setdefault(place, {**entry, "loc": place, "ctx": {"expected": ""}})
        words = [*re.findall("'[^']+'", first["ctx"]["expected"]), *re.findall("'[^']+'", entry["ctx"]["expected"])]
        expected = " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
        first.update(ctx={"expected": expected}, msg=f"Input should be {expected}")
    return list(found.values())


def _lines(entry: Mapping[str, Any], root: type[Section], tagged: Collection[str]) -> list[str]:
    if not entry["loc"] and entry["type"] == "value_error":  # a rule between fields; its message names them
        return str(entry["ctx"]["error"]).split("\n")
    location = list(entry["loc"]) or [root.__name__.lower()]  # empty if the input is not a table
    tags = _popped_tags(location, tagged)
    path = _path(location)
    name = ".".join(_field_name(part) for part in location if isinstance(part, str))
    match entry["type"]:
        case "extra_forbidden":
            return [f"{path}: unknown {_unit(location, root)}{_suggestion(name, root, tags)}"]
        case "missing":
            return [f"{path}: missing"]
        case "union_tag_not_found":
            return [f"{path}.{_discriminator(entry)}: missing"]
        case "union_tag_invalid":
            tags = [name.strip().strip("'") for name in entry["ctx"]["expected_tags"].split(",")]
            found = str(entry["ctx"]["tag"])
            nearest = difflib.get_close_matches(found, tags, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else f"; it may be {', '.join(tags)}"
            return [f"{path}.{_discriminator(entry)}: {shown(found)} is not known{hint}"]
        case "string_pattern_mismatch":
            return [f"{path}: found {shown(entry['input'])}; wanted: {_field(name, root, tags).description}"]
        case "literal_error":
            return [f"{path}: {_message(entry)}, found {shown(entry['input'])}{_nearest_literal(entry)}"]
        case "value_error":
            return [f"{path}: found {shown(entry['input'])}: {entry['ctx']['error']}"]
        case "model_type" | "model_attributes_type" | "dict_type":
            return [f"{path}: input should be a table of fields, found {shown(entry['input'])}"]
        case "list_type" if _sections(_field(name, root, tags).annotation):
            return [f"{path}: input should be a list of tables of fields, found {shown(entry['input'])}"]
        case "less_than" | "less_than_equal" | "greater_than" | "greater_than_equal":
            bounds = _bounds(_field(name, root, tags)) or _message(entry)
            return [f"{path}: {bounds}, found {shown(entry['input'])}"]
    description = " ".join((_field(name, root, tags).description or "").split())
    _, _, allowed = description.removesuffix(".").partition("Allowed: ")
    rule = f" (allowed: {allowed})" if allowed else ""
    return [f"{path}: {_message(entry)}, found {shown(entry['input'])}{rule}"]


def _popped_tags(location: list[str | int], tagged: Collection[str]) -> list[str]:
    """Remove the names of variants from a location, and return them."""
    return [
        str(location.pop(depth))
        for depth in range(1, len(location))
        if ".".join(map(str, location[:depth])) in tagged and len(location) > depth
    ]


def _bounds(field: FieldInfo) -> str:
    """Describe bounds like ``input should be at least 0 and less than 1``; empty for a field without bounds."""
    bounds = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
    found = [
        f"{word} {getattr(each, kind):g}" if isinstance(getattr(each, kind), float) else f"{word} {getattr(each, kind)}"
        for kind, word in bounds.items()
        for each in (*field.metadata, *_nested_metadata(field.annotation))
        if hasattr(each, kind)
    ]
    return f"input should be {' and '.join(found)}" if found else ""


def _nested_metadata(annotation: Any) -> list[Any]:
    """Return the metadata inside a type such as ``Annotated[float, Field(ge=0)] | None``."""
    found: list[Any] = []
    for argument in get_args(annotation):
        found += argument.metadata if isinstance(argument, FieldInfo) else _nested_metadata(argument)
    return found


def _message(entry: Mapping[str, Any]) -> str:
    return f"{entry['msg'][0].lower()}{entry['msg'][1:]}"


def _nearest_literal(entry: Mapping[str, Any]) -> str:
    nearest = difflib.get_close_matches(str(entry["input"]), re.findall("'([^']+)'", entry["ctx"]["expected"]), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _path(location: Sequence[str | int]) -> str:
    """Write a location like ``peers[0].count``."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{_field_name(part)}" for part in location]
    return "".join(parts).removeprefix(".")


def _discriminator(entry: Mapping[str, Any]) -> str:
    return str(entry["ctx"]["discriminator"]).strip("'")


def _unit(location: Sequence[str | int], root: type[Section]) -> str:
    has_sections = any(_sections(field.annotation) for field in root.model_fields.values())
    return "section" if len(location) == 1 and has_sections else "field"


def _suggestion(path: str, root: type[Section], tags: Collection[str]) -> str:
    """Suggest a valid name: the same word in another table, or the nearest word in the same table.

    At the top level without any of this, list the names.
    """
    table, _, word = path.rpartition(".")
    valid = [(*name.rpartition("."), name) for name, _ in _fields(root, tags)]
    siblings = {sibling: name for home, _, sibling, name in valid if home == table}
    nearest = difflib.get_close_matches(word, siblings, n=1)
    meant = [name for _, _, sibling, name in valid if sibling == word] + [siblings[each] for each in nearest]
    if meant:
        return f"; did you mean {meant[0]}?"
    return "" if table else f"; there are {', '.join(siblings)}"


def _field(name: str, root: type[Section], tags: Collection[str]) -> FieldInfo:
    """Return the field with a dotted name, or an empty field if there is none."""
    return dict(_fields(root, tags)).get(name) or FieldInfo()


def _fields(section: type[Section], tags: Collection[str], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name and schema of every field; of variants only those that ``tags`` choose, if any."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        variants = _sections(field.annotation)
        chosen = [variant for variant in variants if _answers_to(variant, tags)] if len(variants) > 1 else variants
        for variant in chosen or variants:
            yield from _fields(variant, tags, f"{prefix}{name}.")


def _sections(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _sections(argument)]


def _answers_to(variant: type[Section], tags: Collection[str]) -> bool:
    return any(tag in get_args(field.annotation) for field in variant.model_fields.values() for tag in tags)


def _field_name(name: str) -> str:
    """Return a field name unchanged if it is an identifier, otherwise quoted, escaped and shortened."""
    return name if name.isascii() and name.isidentifier() and len(name) <= _MAX_SHOWN else shown(name)


def shown(value: object) -> str:
    """Format a value as one short line of printable ASCII; a shortened string keeps its closing quote."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; deep nesting
        return "a value that is too long to show"
    if len(text) <= _MAX_SHOWN:
        return text
    end = f"…{text[-1]}" if isinstance(value, str) else "…"
    return text[: _MAX_SHOWN - len(end)] + end
