"""``HOME/start.json``: options of earlier starts, so that a peer or bootstrap starts alike from its home alone.

Options of the command line take precedence and are saved in turn. The file may hold the page's token, so only its owner
may read it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError
from p2ptrain.base.text import printable
from p2ptrain.page.listen_address import ListenAddress

START_FILE = "start.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Options of peers and bootstraps that are remembered; None: not given."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    weights: Path | None = None
    """File or folder of the initial weights, if the manifest names their digests."""
    listen: tuple[str, ...] | None = None
    announce: tuple[str, ...] | None = None
    local: bool | None = None
    """Listen on loopback and announce that: the whole swarm is on this machine."""
    relay: bool | None = None
    """Relay the traffic of peers that nobody can dial, within limits."""
    page: str | None = None
    """Address of the page, [HOST:]PORT."""
    page_token: str | None = None
    page_hosts: str | None = None
    """Host names by which the page may be opened, separated by commas."""

    @property
    def page_address(self) -> ListenAddress | None:
        """Listen address of the page; None: no page. Raises UserError if ``page`` is not an address."""
        return (
            None if self.page is None else ListenAddress.parse(self.page, self.page_token or "", self.page_hosts or "")
        )

    def words(self) -> list[str]:
        """Return the options as words of a command line, without the token."""
        words: list[str] = []
        for name in names(type(self)):
            value, option = getattr(self, name), f"--{name.replace('_', '-')}"
            if name == "page_token" or value is None:
                continue
            if isinstance(value, bool):
                words.append(option if value else f"--no-{option[2:]}")
            else:
                for each in value if isinstance(value, tuple) else [value]:
                    words += [option, str(each)]
        return words


Saved = TypeVar("Saved", bound=NodeOptions)
Given = TypeVar("Given", bound=NodeOptions)


def names(kind: type[NodeOptions]) -> tuple[str, ...]:
    """Return the names of the options that a class declares."""
    return tuple(field.name for field in fields(kind))


class OptionsFile(Generic[Saved]):
    """The file of one home.

    Args:
        kind: class of the options that it holds.
    """

    def __init__(self, home: Path, kind: type[Saved]) -> None:
        self.path = home / START_FILE
        self._kind = kind

    def load(self) -> Saved:
        """Return the saved options. Raises HomeError if the file is faulty."""
        remedy = "Delete it, and give the options again."
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            return TypeAdapter(self._kind).validate_json(json.dumps(document["options"]))
        except FileNotFoundError:
            return self._kind()
        except OSError as error:
            raise HomeError(f"{self.path} cannot be read: {error.strerror}.", files.remedy(error, "")) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "options"
            raise HomeError(f"{self.path} is faulty: {printable(where)}: {first['msg']}.", remedy) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise HomeError(f"{self.path} is faulty: it is not a file of start options.", remedy) from None

    def save(self, options: Saved) -> None:
        """Save options for the next start, readable by their owner alone. Raises HomeError."""
        given = {name: getattr(options, name) for name in names(self._kind)}
        document = {"options": {name: value for name, value in given.items() if value is not None}}
        data = json.dumps(to_jsonable_python(document), indent=1).encode() + b"\n"
        try:
            files.replace(self.path, data, mode=0o600)
        except OSError as error:
            raise HomeError(f"{self.path} cannot be written: {error.strerror}.", files.remedy(error, "")) from error


def merged(given: Given, saved: NodeOptions) -> Given:
    """Return the given options, completed with saved ones. Paths become absolute, for starts in another directory."""
    missing = {name: getattr(saved, name) for name in names(type(saved)) if getattr(given, name) is None}
    options = replace(given, **missing)
    return options if options.weights is None else replace(options, weights=options.weights.absolute())
