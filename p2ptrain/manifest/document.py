"""The two written forms of a manifest: commented TOML for people, canonical JSON for digests and signatures.

Canonical JSON gives equal manifests equal bytes on every machine: sorted keys, no white space, ASCII, every field
present, integers without a fraction, and floats as Python's shortest repr that reads back to the same value.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from p2ptrain.base.errors import ManifestError
from p2ptrain.base.ids import PROTOCOL_VERSION, RunId
from p2ptrain.framing import MAX_MANIFEST_BYTES
from p2ptrain.manifest.faults import shown, validated
from p2ptrain.manifest.schema import Manifest
from p2ptrain.manifest.section import Section

INSTALL_THEIRS = "Install the p2ptrain version of the run's author; peers of different versions cannot exchange."
"""Remedy for a manifest of another p2ptrain version."""

_HEADER = """\
# The manifest of a p2ptrain run. All peers of the run share it, byte for byte.
# Edit it, then sign it with `p2ptrain sign`. Any later change makes another run.
# `p2ptrain docs` prints where docs/ is.
"""

_COMMENT_WIDTH = 110


def canonical_json(data: Mapping[str, Any]) -> bytes:
    """Encode ``data`` as canonical JSON."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def canonical_bytes(manifest: Manifest) -> bytes:
    """Return the bytes that are digested and signed."""
    return canonical_json(manifest.model_dump())


def run_id(manifest: Manifest) -> RunId:
    """Return the SHA-256 of the canonical bytes, in hexadecimal."""
    return RunId(hashlib.sha256(canonical_bytes(manifest)).hexdigest())


def parse_toml(text: str) -> Manifest:
    """Parse the text of a ``manifest.toml``. Raises ManifestError with one line per problem."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise ManifestError(
            f"The manifest has {len(text):,} characters, but at most {MAX_MANIFEST_BYTES:,} are allowed.",
            "Check that it is the right file; `p2ptrain init` writes one of about 8,000 characters.",
        )
    try:
        data = read_toml(text)
    except ValueError as error:
        raise ManifestError(f"The manifest is not valid TOML: {error}.", "Correct that line.") from None
    return parse_data(data)


def read_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError with the reason, also for what breaks the parser."""
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))  # some editors begin with a byte order mark
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # int() accepts at most 4,300 digits
        raise ValueError("a number has thousands of digits") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_data(data: Mapping[str, Any]) -> Manifest:
    """Check plain data against the protocol version, then the schema. Raises ManifestError."""
    _refuse_other_protocol(data)
    return validated(data)


def with_changes(manifest: Manifest, changes: Mapping[str, Any]) -> Manifest:
    """Return a checked copy with fields replaced by dotted path, such as ``{"outer.inner_steps": 20}``.

    Raises ManifestError.
    """
    data = manifest.model_dump()
    for path, value in changes.items():
        table = data
        *parents, field = path.split(".")
        for parent in parents:
            table = table.setdefault(parent, {})
        table[field] = value
    return parse_data(data)


def differences(before: Manifest, after: Manifest) -> list[str]:
    """Return one line for each field that differs, with both values."""
    old, new = (dict(_flat(manifest.model_dump())) for manifest in (before, after))
    return [
        f"{path}: {shown(old[path]) if path in old else 'absent'} -> {shown(new[path]) if path in new else 'absent'}"
        for path in sorted(old.keys() | new.keys())
        if path not in old or path not in new or old[path] != new[path]
    ]


def render_toml(manifest: Manifest, note: str = "") -> str:
    """Write the manifest as TOML with every field's description above it; ``parse_toml`` reads it.

    Args:
        note: text for a comment below the header.
    """
    comment = "".join(f"{line}\n" for line in _comment(note))
    return _HEADER + comment + "".join(_table(name, getattr(manifest, name)) for name in Manifest.model_fields)


def _refuse_other_protocol(data: Mapping[str, Any]) -> None:
    """Raise ManifestError for another protocol version, before the schema rejects that version's fields."""
    run = data.get("run")
    protocol = run.get("protocol") if isinstance(run, Mapping) else None
    if isinstance(run, Mapping) and type(protocol) is int and protocol != PROTOCOL_VERSION:
        raise ManifestError(
            f"run.protocol: the run uses protocol version {protocol}, this p2ptrain uses {PROTOCOL_VERSION}.",
            INSTALL_THEIRS,
        )


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _table(path: str, section: Section) -> str:
    lines = ["", *_comment(type(section).__doc__ or ""), f"[{path}]"]
    nested = ""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            nested += _table(f"{path}.{name}", value)
        elif value is not None:
            lines += field_lines(field, name, value)
    return "\n".join(lines) + "\n" + nested


def field_lines(field: FieldInfo, name: str, value: bool | int | float | str | list[str]) -> list[str]:
    """Write one field as TOML, with its description as a comment above it."""
    return [*_comment(field.description or ""), f"{name} = {_toml_value(value)}"]


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(" ".join(text.split()), _COMMENT_WIDTH)]


def _toml_value(value: bool | int | float | str | list[str]) -> str:
    """Write a value; JSON and TOML agree on the short ASCII strings of a manifest, long integers get digit groups."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}" if value >= 10_000 else str(value)
    return json.dumps(value)
