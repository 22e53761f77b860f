"""Reading of scenario files: TOML, changes from the command line, and errors by field."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from p2ptrain.base.errors import ScenarioError
from p2ptrain.base.files import cause
from p2ptrain.base.text import printable
from p2ptrain.manifest.faults import shown, told
from p2ptrain.sim.scenario import Scenario

S = TypeVar("S", bound=Scenario)

MAX_CHARACTERS = 1 << 20
"""Most characters of a file; a thousand groups take a tenth of it."""

_NUMBERED = re.compile(r"^peers\[(\d+)\]")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,24}")

REMEDY = "Correct these fields; docs/SIMULATOR.md explains all of them."


def load(path: Path, changes: Sequence[str] = ()) -> Scenario:
    """Load the scenario of a file, with ``KEY=VALUE`` changes. Raises ScenarioError."""
    return parse(read(path, changes))


def parse(data: Mapping[str, Any]) -> Scenario:
    """Validate plain data as a scenario. Raises ScenarioError with one line per error."""
    return parsed(Scenario, data)


def read(path: Path, changes: Sequence[str]) -> dict[str, Any]:
    """Read the plain data of a file, with ``KEY=VALUE`` changes. Raises ScenarioError."""
    name = printable(path)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{name} cannot be read: {cause(error)}.", "Give the path of a scenario file.") from None
    if len(text) > MAX_CHARACTERS:
        raise ScenarioError(f"{name} is longer than {MAX_CHARACTERS:,} characters.", REMEDY)
    if text.startswith("\ufeff"):
        raise ScenarioError(f"{name} begins with a byte order mark.", "Save it as UTF-8 without one.")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{name} is not valid TOML: {error}.", "Correct that line.") from None
    except (ValueError, RecursionError):
        raise _beyond_reading(name) from None
    if not data:
        raise ScenarioError(f"{name} holds no settings.", "Give the path of a scenario file.")
    return changed(data, changes)


def parsed(schema: type[S], data: Mapping[str, Any]) -> S:
    """Validate plain data by this schema. Raises ScenarioError with one line per error."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        groups = data.get("peers") if isinstance(data, Mapping) else None
        groups = groups if isinstance(groups, list) else []
        names = [group.get("name") if isinstance(group, Mapping) else None for group in groups]
        raise ScenarioError("\n".join(by_name(told(error, schema, ("learner",)), names)), REMEDY) from None
    except RecursionError:
        raise _beyond_reading("the scenario") from None


def by_name(lines: Iterable[str], names: Sequence[object]) -> list[str]:
    """Rename ``peers[0].…`` to ``peers.home.…`` in lines about a group whose name is unique."""

    return [_by_name(line, names) for line in lines]


def _by_name(line: str, names: Sequence[object]) -> str:
    found = _NUMBERED.match(line)
    name = names[int(found[1])] if found is not None else None
    if found is None or not isinstance(name, str) or not _NAME.fullmatch(name) or names.count(name) > 1:
        return line
    called = f"peers.{name}"
    return called + line[found.end() :].replace("; did you mean peers.", f"; did you mean {called}.")


def changed(data: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Replace fields of plain data: ``outer.inner_steps=20``, ``peers.home.count=9``, ``peers[0].count=9``."""
    try:
        copy: dict[str, Any] = deepcopy(dict(data))
    except RecursionError:
        raise _beyond_reading("the scenario") from None
    for change in changes:
        try:
            _change(copy, change)
        except (ValueError, RecursionError):
            raise _beyond_reading(f"--set {shown(change)}") from None
    return copy


def _change(table: Any, change: str) -> None:
    key, equals, value = change.partition("=")
    if not equals or not key.strip():
        raise ScenarioError(f"{shown(change)} is not of the form KEY=VALUE.", "Write it as in outer.inner_steps=20.")
    *parents, field = _steps(key.strip())
    for parent in parents:
        table = _inside(table, parent, key)
    if not isinstance(table, dict):
        raise _nowhere(key, field)
    table[field] = _value(value.strip())


def _beyond_reading(what: str) -> ScenarioError:
    """Make the error for input that Python itself fails to parse."""
    return ScenarioError(
        f"{what} cannot be read: a key has no name, a number is too long, or lists are nested too deeply.",
        "Correct it; docs/SIMULATOR.md explains all fields, and --set takes KEY=VALUE, as in outer.inner_steps=20.",
    )


def _steps(key: str) -> list[str]:
    """Split a dotted path into its parts; ``[0]`` counts as one."""
    return [part for part in key.replace("[", ".[").split(".") if part]


def _inside(table: Any, step: str, key: str) -> Any:
    """Return a table's section, or the group of this name or number in a list of groups."""
    if isinstance(table, dict):
        return table.setdefault(step, {})
    if isinstance(table, list):
        if step.startswith("[") and step[1:-1].isdigit() and int(step[1:-1]) < len(table):
            return table[int(step[1:-1])]
        for group in table:
            if isinstance(group, dict) and group.get("name") == step:
                return group
        names = [str(group["name"]) for group in table if isinstance(group, dict) and "name" in group]
        there = ", ".join([*names, f"[0] to [{len(table) - 1}]"])
        raise ScenarioError(f"{key}: there is no {step}; there are {there}.", "Use one of these.")
    raise _nowhere(key, step)


def _nowhere(key: str, step: str) -> ScenarioError:
    return ScenarioError(f"{key}: {step} cannot be set: the path leads into a value.", REMEDY)


def _value(text: str) -> Any:
    """Parse a value as TOML; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
