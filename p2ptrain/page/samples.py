"""Texts that the model wrote over a run: the first, the newest, and some between them, evenly over its tokens. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_SAMPLES = 12
"""Maximum texts that are kept, the first and the newest included: as many as lines of the chart's legend."""


@dataclass(frozen=True, slots=True)
class SampleText:
    at: float
    peer: str
    step: int
    prompt: str
    text: str
    tokens: float | None = None
    """Tokens of all peers at that time; None: unknown."""


@dataclass(slots=True)
class SampleHistory:
    texts: list[SampleText] = field(default_factory=list)
    """Texts from the first to the newest."""

    def add(self, sample: SampleText) -> None:
        """Add the newest text. If there are too many, drop the one whose neighbours are closest together."""
        texts = self.texts
        if texts and texts[-1].text == sample.text:
            return
        texts.append(sample)
        if len(texts) > MOST_SAMPLES:
            gaps = {at: (texts[at + 1].tokens or 0) - (texts[at - 1].tokens or 0) for at in range(1, len(texts) - 1)}
            del texts[min(gaps, key=lambda at: (gaps[at], at))]

    def forget(self, peer: str) -> None:
        """Remove the texts of a peer whose owner does not share them any more."""
        self.texts = [each for each in self.texts if each.peer != peer]
