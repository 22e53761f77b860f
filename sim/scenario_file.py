"""Reading of scenario files: TOML, changes from the command line, and errors by field."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from p2ptrain.base.documents import document
from p2ptrain.base.files import cause
from p2ptrain.base.text import printable
from p2ptrain.manifest.document import read_toml
from p2ptrain.manifest.faults import error_lines, shown
from sim.errors import ScenarioError
from sim.scenario import Scenario

S = TypeVar("S", bound=Scenario)

MAX_CHARACTERS = 1 << 20
"""Most characters of a file; a thousand groups take a tenth of it."""

_NUMBERED = re.compile(r"^peers\[(\d+)\]")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,24}")

TESTNET_KEYS = ("partitions", "bootstrap", "begins", "admission", "busy_programs", "text_shards")
"""Fields of a scenario that only a testnet of real peers supports (``lab.scenario``)."""

TESTNET_GROUP_KEYS = (
    "troubles",
    "clock_off_s",
    "router",
    "home",
    "ipv4",
    "ipv6",
    "mtu",
    "copies",
    "packet_loss",
    "returns",
    "amid_exchange",
    "invited",
    "banned_at_s",
    "cores",
    "leaves_every_s",
    "devices",
    "computers",
)
"""Fields of a group that only a testnet supports."""

REMEDY = f"Correct these fields; {document('SIMULATOR.md')} explains all of them."


def load(path: Path, changes: Sequence[str] = ()) -> Scenario:
    """Load the scenario of a file, with ``KEY=VALUE`` changes. Raises ScenarioError."""
    return parse(simulated(read(path, changes)))


def simulated(data: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the testnet's fields that change no simulation. Raises ScenarioError if there are others."""
    data = {key: value for key, value in data.items() if key not in ("limits", "undisturbed")}
    if not isinstance(groups := data.get("peers"), list) or not all(isinstance(group, dict) for group in groups):
        return data
    groups = [{key: value for key, value in group.items() if key != "awaited"} for group in groups]
    faults = [
        f"peers[{place}].{key}" for place, group in enumerate(groups) for key in TESTNET_GROUP_KEYS if key in group
    ]
    faults += [key for key in TESTNET_KEYS if key in data]
    if faults:
        faults = by_name(faults, [group.get("name") for group in groups])
        raise ScenarioError(
            "\n".join(f"{fault}: only p2ptrain testnet supports this" for fault in faults),
            "Run the scenario with p2ptrain testnet --scenario, or leave these fields out.",
        )
    return {**data, "peers": groups}


def parse(data: Mapping[str, Any]) -> Scenario:
    """Validate plain data as a scenario. Raises ScenarioError with one line per error."""
    return parsed(Scenario, data)


def read(path: Path, changes: Sequence[str]) -> dict[str, Any]:
    """Read the plain data of a file, with ``KEY=VALUE`` changes. Raises ScenarioError."""
    name = printable(path)
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{name} cannot be read: {cause(error)}.", "Give the path of a scenario file.") from None
    if len(text) > MAX_CHARACTERS:
        raise ScenarioError(f"{name} is longer than {MAX_CHARACTERS:,} characters.", REMEDY)
    try:
        return changed(read_toml(text), changes)
    except ValueError as error:
        raise ScenarioError(f"{name} is not valid TOML: {error}.", "Correct that line.") from None
    except RecursionError:  # dotted keys nest without recursion of the parser
        raise ScenarioError(f"{name} is not a scenario: it is nested too deeply.", REMEDY) from None


def parsed(schema: type[S], data: Mapping[str, Any]) -> S:
    """Validate plain data by this schema. Raises ScenarioError with one line per error."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        groups = data["peers"] if isinstance(data.get("peers"), list) else []
        names = [group.get("name") if isinstance(group, Mapping) else None for group in groups]
        lines = error_lines(error, schema, ("learner",))
        raise ScenarioError("\n".join(by_name(lines, names)), REMEDY) from None


def by_name(lines: Iterable[str], names: Sequence[object]) -> list[str]:
    """Rename ``peers[0].…`` to ``peers.home.…`` in lines about a group whose name is unique."""
    renamed = []
    for line in lines:
        found = _NUMBERED.match(line)
        name = names[int(found[1])] if found is not None else None
        if found is not None and isinstance(name, str) and _NAME.fullmatch(name) and names.count(name) == 1:
            called = f"peers.{name}"
            line = called + line[found.end() :].replace("; did you mean peers.", f"; did you mean {called}.")
        renamed.append(line)
    return renamed


def changed(data: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Replace fields of plain data: ``outer.inner_steps=20``, ``peers.home.count=9``, ``peers[0].count=9``."""
    copy: dict[str, Any] = deepcopy(dict(data))
    for change in changes:
        _change(copy, change)
    return copy


def _change(table: Any, change: str) -> None:
    key, equals, value = change.partition("=")
    steps = [step for step in key.strip().replace("[", ".[").split(".") if step]  # [0] counts as a step
    if not equals or not steps:
        raise ScenarioError(f"{shown(change)} is not of the form KEY=VALUE.", "Write it as in outer.inner_steps=20.")
    *parents, field = steps
    for parent in parents:
        table = _inside(table, parent, key)
    if not isinstance(table, dict):
        raise _nowhere(key, field)
    table[field] = _value(value.strip())


def _inside(table: Any, step: str, key: str) -> Any:
    """Return a table's section, or the group of this name or number in a list of groups."""
    if isinstance(table, dict):
        return table.setdefault(step, {})
    if isinstance(table, list):
        if step.startswith("[") and step[1:-1].isdecimal() and int(step[1:-1]) < len(table):
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
        return read_toml(f"value = {text}")["value"]
    except ValueError:
        return text
