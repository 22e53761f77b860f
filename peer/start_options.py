"""Options of a peer that its home remembers, so that ``p2ptrain peer --home HOME`` alone starts the same peer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from p2ptrain.net.start_options import NodeOptions, OptionsFile
from p2ptrain.swarm import keeping
from peer.owner.settings import Settings, device_name, nickname_text

SETTING_OF = {"device": "device", "nickname": "nickname", "share": "share_figures"}
"""Options that override a setting. A setting that is edited later takes precedence over the saved option."""


def _kept(text: str) -> str:
    if text != "all":
        keeping.parse(text)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions(NodeOptions):
    """Options that are remembered; None: not given."""

    device: Annotated[str, AfterValidator(device_name)] | None = None
    nickname: Annotated[str, AfterValidator(nickname_text)] | None = None
    share: bool | None = None
    """Share this peer's figures with bootstraps, whatever the settings say."""
    keep: Annotated[str, AfterValidator(_kept)] | None = None
    """Keep these fragments for others, and do not train."""


class StartFile:
    """The file of a peer's home."""

    def __init__(self, home: Path) -> None:
        self._file = OptionsFile(home, StartOptions)
        self.path = self._file.path

    def load(self, settings: Settings) -> StartOptions:
        """Return the saved options, without those whose setting was edited since. Raises HomeError if it is faulty."""
        options, before = self._file.load()
        edited = [name for name, setting in SETTING_OF.items() if before.get(setting) != getattr(settings, setting)]
        return replace(options, **dict.fromkeys(edited))

    def save(self, options: StartOptions, settings: Settings) -> None:
        """Save options for the next start, readable by their owner alone. Raises HomeError."""
        self._file.save(options, {setting: getattr(settings, setting) for setting in SETTING_OF.values()})
