"""Options with which a peer starts; its home remembers them, so that ``p2ptrain peer --home HOME`` starts it again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from p2ptrain.base.device_names import DEVICES_NAME, DEVICES_WORDS
from p2ptrain.manifest import JoinLink
from p2ptrain.net.start_options import NodeOptions
from p2ptrain.swarm import keeping
from p2ptrain.wire import MAX_NICKNAME_CHARS, is_nickname
from peer.options import MIN_TEXT_GB
from peer.owner.settings import CompileMode
from peer.trackers import tracker_name

MAX_STAGES = 64
MOST_RANKS = 256
"""Maximum of ``--team``."""


def device_name(text: str) -> str:
    """Return the valid names of one or several devices. Raises ValueError."""
    if not DEVICES_NAME.fullmatch(text):
        raise ValueError(f"devices are {DEVICES_WORDS}")
    return text


def _nickname(text: str) -> str:
    if not is_nickname(text):
        raise ValueError(f"a nickname has at most {MAX_NICKNAME_CHARS} printable characters")
    return text


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
    nickname: Annotated[str, AfterValidator(_nickname)] | None = None
    share: bool | None = None
    """Share this peer's figures with bootstraps."""
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


@dataclass(frozen=True, slots=True)
class PeerOptions(StartOptions):
    """Options of one start, with what the owner's settings allow; none changes the algorithm."""

    link: JoinLink | None
    home: Path | None = None
    forget: bool = False
    """Use only the options of this start."""
    verbose: bool = False
    """Print every exchange."""
    memory_bytes: float = math.inf
    """Host memory that the peer plans with."""
    compile: CompileMode = "auto"
    punch: bool = True
    """Whether p2pd may punch holes through the router."""
