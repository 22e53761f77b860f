"""Options of a peer that its home remembers, so that ``p2ptrain peer --home HOME`` alone starts the same peer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from p2ptrain.net.start_options import NodeOptions, OptionsFile
from p2ptrain.swarm import keeping
from peer.options import MIN_TEXT_GB
from peer.owner.settings import MAX_STAGES, Settings, device_name, nickname_text
from peer.trackers import tracker_name

MOST_RANKS = 256
"""Maximum of ``--team``."""

SETTING_OF = {
    "device": "device",
    "stages": "stages",
    "nickname": "nickname",
    "share": "share_figures",
    "track": "track",
}
"""Options that override a setting. A setting that is edited later takes precedence over the saved option."""


def _kept(text: str) -> str:
    if text != "all":
        keeping.parse(text)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions(NodeOptions):
    """Options that are remembered; None: not given."""

    device: Annotated[str, AfterValidator(device_name)] | None = None
    stages: Annotated[int, Field(ge=1, le=MAX_STAGES)] | None = None
    """Pipeline stages of a peer on several devices."""
    team: Annotated[int, Field(ge=2, le=MOST_RANKS)] | None = None
    """Number of the team's devices, those of other computers included."""
    at: str | None = None
    """Private address on which the ranks of other computers reach this peer, HOST[:PORT]."""
    nickname: Annotated[str, AfterValidator(nickname_text)] | None = None
    share: bool | None = None
    """Share this peer's figures with bootstraps, whatever the settings say."""
    track: Annotated[str, AfterValidator(tracker_name)] | None = None
    """Where this peer's figures go (``peer.trackers``)."""
    mirror: str | None = None
    """Where this computer's owner has the run's text: a folder, a web address, or a data set of the hub."""
    text_gb: Annotated[float, Field(ge=MIN_TEXT_GB, le=1e6)] | None = None
    """Disk cap of all runs' text, which this user's peers share."""
    keep: Annotated[str, AfterValidator(_kept)] | None = None
    """Keep these fragments for others, and do not train."""

    def without_stages(self) -> StartOptions:
        """Return the options for other devices, of which the stages are not known to be a divisor."""
        return replace(self, stages=None)


class StartFile:
    """The file of a peer's home."""

    def __init__(self, home: Path) -> None:
        self._file = OptionsFile(home, StartOptions)
        self.path = self._file.path

    def load(self, settings: Settings) -> StartOptions:
        """Return the saved options, without those whose setting was edited since. Raises HomeError if it is faulty."""
        options, before = self._file.load()
        edited = [name for name, setting in SETTING_OF.items() if before.get(setting) != getattr(settings, setting)]
        found = replace(options, **dict.fromkeys(edited))
        return found.without_stages() if "device" in edited else found

    def save(self, options: StartOptions, settings: Settings) -> None:
        """Save options for the next start, readable by their owner alone. Raises HomeError."""
        self._file.save(options, {setting: getattr(settings, setting) for setting in SETTING_OF.values()})
