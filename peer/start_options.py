"""``HOME/start.json``: options of earlier starts, so that ``p2ptrain peer --home HOME`` alone starts the same peer.

Options of the command line take precedence and are saved in turn. The file may hold the page's token, so only its owner
may read it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError
from p2ptrain.base.text import printable
from p2ptrain.page.listen_address import ListenAddress
from peer.owner.settings import Settings, device_name, nickname_text

START_FILE = "start.json"

SETTING_OF = {"device": "device", "nickname": "nickname", "share": "share_figures"}
"""Options that override a setting. A setting that is edited later takes precedence over the saved option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """Options that are remembered; None: not given."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    device: Annotated[str, AfterValidator(device_name)] | None = None
    nickname: Annotated[str, AfterValidator(nickname_text)] | None = None
    data: Path | None = None
    """File of the corpus, if the manifest names one by digest."""
    tokenizer: Path | None = None
    """The tokenizer.json, if the manifest names one by digest."""
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
    share: bool | None = None
    """Share this peer's figures with bootstraps, whatever the settings say."""

    @property
    def page_address(self) -> ListenAddress | None:
        """Listen address of the page; None: no page. Raises UserError if ``page`` is not an address."""
        return (
            None if self.page is None else ListenAddress.parse(self.page, self.page_token or "", self.page_hosts or "")
        )

    def words(self) -> list[str]:
        """Return the options as words of a command line, without the token."""
        words: list[str] = []
        for name in NAMES:
            value, option = getattr(self, name), f"--{name.replace('_', '-')}"
            if name == "page_token" or value is None:
                continue
            if isinstance(value, bool):
                words.append(option if value else f"--no-{name}")
            else:
                for each in value if isinstance(value, tuple) else [value]:
                    words += [option, str(each)]
        return words


NAMES = tuple(field.name for field in fields(StartOptions))
Options = TypeVar("Options", bound=StartOptions)


class StartFile:
    """The file of one home."""

    def __init__(self, home: Path) -> None:
        self.path = home / START_FILE

    def load(self, settings: Settings) -> StartOptions:
        """Return the saved options, without those whose setting was edited since. Raises HomeError if it is faulty."""
        remedy = "Delete it, and give the peer's options again."
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            options = TypeAdapter(StartOptions).validate_json(json.dumps(document["options"]))
            before = TypeAdapter(dict[str, str | bool]).validate_python(document["settings"])
        except FileNotFoundError:
            return StartOptions()
        except OSError as error:
            raise HomeError(f"{self.path} cannot be read: {error.strerror}.", "Check its permissions.") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "options"
            raise HomeError(f"{self.path} is faulty: {printable(where)}: {first['msg']}.", remedy) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise HomeError(f"{self.path} is faulty: it is not a file of start options.", remedy) from None
        edited = [name for name, setting in SETTING_OF.items() if before.get(setting) != getattr(settings, setting)]
        return replace(options, **dict.fromkeys(edited))

    def save(self, options: StartOptions, settings: Settings) -> None:
        """Save options for the next start, readable by their owner alone. Raises HomeError."""
        document: dict[str, Any] = {
            "options": {name: getattr(options, name) for name in NAMES if getattr(options, name) is not None},
            "settings": {setting: getattr(settings, setting) for setting in SETTING_OF.values()},
        }
        data = json.dumps(to_jsonable_python(document), indent=1).encode() + b"\n"
        try:
            files.replace(self.path, data, mode=0o600)
        except OSError as error:
            raise HomeError(f"{self.path} cannot be written: {error.strerror}.", files.remedy(error)) from error


def merged(given: Options, saved: StartOptions) -> Options:
    """Return the given options, completed with saved ones. Paths become absolute, for starts in another directory."""
    missing = {name: getattr(saved, name) for name in NAMES if getattr(given, name) is None}
    options = replace(given, **missing)
    paths = {name: path.absolute() for name in ("data", "tokenizer") if (path := getattr(options, name)) is not None}
    return replace(options, **paths)
