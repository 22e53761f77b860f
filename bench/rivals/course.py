"""What is run, and what is written of a run. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

RivalName = Literal["swarm", "diloco", "averager"]
RIVALS: tuple[RivalName, ...] = ("swarm", "diloco", "averager")

ENDLESS_TOKENS = 10**9
"""Nobody may reach the run's end: the time is what ends it."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model, and how long it is watched."""

    preset: str
    changes: Mapping[str, Any]
    """Of its manifest."""
    calm_s: float
    """From second 0, when all train, to the kill."""
    wounded_s: float
    """From there to the newcomer."""
    healing_s: float
    """From there to the end."""


_TIMED = {"run.tokens_per_peer": ENDLESS_TOKENS, "training.schedule": "constant"}
SIZES: Mapping[str, Size] = {
    "demo": Size("demo", _TIMED, 90.0, 45.0, 60.0),
    # One sequence an inner step and eight steps an outer step: what two cores can do for eight peers.
    "llama-15m": Size(
        "llama-15m",
        {
            **_TIMED,
            "training.warmup_tokens": 5_000,
            "training.sequences_per_step": 1,
            "outer.inner_steps": 8,
            "outer.fragments": 1,
            "outer.fragments_per_exchange": 1,
        },
        240.0,
        120.0,
        120.0,
    ),
}
RECIPES: Mapping[RivalName, Mapping[str, Any]] = {
    "swarm": {},
    # Its pseudo-gradients in int8; learning rate and momentum as docs/RESULTS.md tuned them.
    "diloco": {
        "outer.recipe": "diloco",
        "outer.topology": "complete",
        "outer.partners": 1,
        "outer.exchanges_per_step": 0,
        "outer.learning_rate": 0.4,
        "outer.momentum": 0.8,
        "codec.gradients": "int8",
    },
    "averager": {},
}


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    rival: RivalName
    size: str
    peers: int
    seed: int
    hurry: float = 1.0
    """By what all times are divided: to see that it works."""

    @property
    def name(self) -> str:
        return f"{self.rival}-{self.size}-{self.peers}-seed{self.seed}"


@dataclass(slots=True)
class Course:
    """How it went; times in seconds since 1970, as event logs count."""

    case: Case
    zero: float = 0.0
    """Everybody trained."""
    victim: str = ""
    killed: float = 0.0
    newcomer: str = ""
    came: float = 0.0
    ended: float = 0.0
    traffic: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """By peer: when, and the bytes that its line had carried upward by then."""
    troubles: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Course:
        traffic = {who: [(at, sent) for at, sent in seen] for who, seen in document["traffic"].items()}
        return cls(**{**document, "case": Case(**document["case"]), "traffic": traffic})
