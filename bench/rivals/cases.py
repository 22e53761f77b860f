"""Cases that are run, and the record of a run. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

RivalName = Literal["swarm", "diloco", "averager"]
RIVALS: tuple[RivalName, ...] = ("swarm", "diloco", "averager")

ENDLESS_TOKENS = 10**9
"""More tokens than any run uses, since time ends a run."""


@dataclass(frozen=True, slots=True)
class RivalSize:
    """Model, and the times of a run."""

    preset: str
    changes: Mapping[str, Any]
    """Changes of the preset's manifest."""
    warmup_tokens: int
    """Warm-up in tokens of each peer."""
    calm_s: float
    """Time from second 0, when all train, to the kill."""
    wounded_s: float
    """Time from the kill to the newcomer."""
    healing_s: float
    """Time from the newcomer to the end."""


_TIMED = {"run.tokens": ENDLESS_TOKENS, "training.schedule": "constant"}
SIZES: Mapping[str, RivalSize] = {
    "demo": RivalSize("demo", _TIMED, 60_000, 90.0, 45.0, 60.0),
    # One sequence an inner step and eight steps an outer step: what two cores can do for eight peers.
    "llama-15m": RivalSize(
        "llama-15m",
        {
            **_TIMED,
            "training.sequences_per_step": 1,
            "outer.inner_steps": 8,
            "outer.fragments": 1,
            "outer.fragments_per_exchange": 1,
        },
        5_000,
        240.0,
        120.0,
        120.0,
    ),
}
RECIPES: Mapping[RivalName, Mapping[str, Any]] = {
    "swarm": {},
    # Pseudo-gradients in int8. The presets' learning rate and momentum were the better of two pairs for it with Muon
    # (our measurement: one run each).
    "diloco": {
        "outer.recipe": "diloco",
        "outer.topology": "complete",
        "outer.partners": 1,
        "outer.exchanges_per_step": 0,
        "codec.gradients": "int8",
    },
    "averager": {},
}


@dataclass(frozen=True, slots=True)
class RivalCase:
    """One run."""

    rival: RivalName
    size: str
    peers: int
    seed: int
    hurry: float = 1.0
    """Divisor of all times, for a trial."""

    @property
    def name(self) -> str:
        return f"{self.rival}-{self.size}-{self.peers}-seed{self.seed}"

    def manifest_changes(self) -> dict[str, Any]:
        """Return the changes of the preset's manifest for this run."""
        size = SIZES[self.size]
        return {
            **size.changes,
            **RECIPES[self.rival],
            "training.warmup_tokens": size.warmup_tokens * self.peers,
            "run.seed": self.seed,
            "run.name": self.name,
            "admission.policy": "open",
        }


@dataclass(slots=True)
class RivalRecord:
    """Record of a run; times in seconds since the epoch."""

    case: RivalCase
    zero: float = 0.0
    """Time when all peers trained."""
    victim: str = ""
    killed: float = 0.0
    newcomer: str = ""
    came: float = 0.0
    ended: float = 0.0
    traffic: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Time and bytes sent so far, by peer."""
    troubles: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> RivalRecord:
        traffic = {who: [(at, sent) for at, sent in seen] for who, seen in document["traffic"].items()}
        return cls(**{**document, "case": RivalCase(**document["case"]), "traffic": traffic})
