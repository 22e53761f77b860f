"""Division of a token stream into training and held-out sequences: pure arithmetic, the same on every machine.

The stream is cut into up to 64 equal regions, and the last part of every region is held out. A corpus is rarely uniform
(the built-in one is 42 works in alphabetical order; its last twentieth is one comedy), so evenly spaced blocks measure
the whole text, while the tail would measure its last chapter. Blocks are long (eight sequences or more), so that little
held-out text is next to training text.

A sequence is T+1 tokens, T of which are predicted. Neighbours share one token, so every token of a block except the
first is predicted exactly once. No sequence crosses a border::

    region 0                         region 1
    [train train train ... | held ]  [train train train ... | held ]  ...

Packed dialogues are in rows of T tokens that share none: regions and blocks are whole rows (``split_rows``).
"""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.base.errors import CorpusError

MOST_REGIONS = 64
"""Maximum number of regions; more only shorten the held-out blocks. Guess: the variance of the held-out loss would
settle it."""

BLOCK_SEQUENCES = 8
"""Minimum number of sequences per held-out block, if the stream is long enough. Guess: the variance of the held-out
loss would settle it."""

HELD_OUT_TOKENS = 65_536
"""Held-out tokens read for one reported loss: a standard error of about 0.01 nats for bytes; 1 s for the demo model.
Guess: the differences in loss that owners compare."""


@dataclass(frozen=True, slots=True)
class Split:
    """Positions of the sequences in a token stream. All sizes in tokens, all counts per region."""

    sequence_length: int
    regions: int
    region_tokens: int
    train_per_region: int
    held_out_per_region: int
    held_out_offset: int  # from a region's start to its held-out block

    @property
    def train_sequences(self) -> int:
        return self.regions * self.train_per_region

    @property
    def held_out_sequences(self) -> int:
        return self.regions * self.held_out_per_region

    @property
    def train_tokens(self) -> int:
        """Number of tokens that training predicts in one epoch."""
        return self.train_sequences * self.sequence_length

    @property
    def held_out_tokens(self) -> int:
        return self.held_out_sequences * self.sequence_length

    def train_start(self, index: int) -> int:
        """Return the first token of training sequence ``index``; the sequence has ``sequence_length + 1`` tokens."""
        if not 0 <= index < self.train_sequences:
            raise IndexError(f"training sequence {index} of {self.train_sequences}")
        region, place = divmod(index, self.train_per_region)
        return region * self.region_tokens + place * self.sequence_length

    def held_out_start(self, index: int) -> int:
        """Return the first token of held-out sequence ``index``."""
        if not 0 <= index < self.held_out_sequences:
            raise IndexError(f"held-out sequence {index} of {self.held_out_sequences}")
        region, place = divmod(index, self.held_out_per_region)
        return region * self.region_tokens + self.held_out_offset + place * self.sequence_length


def tokens_to_read(held_out_tokens: int, sequence_length: int, most_tokens: int) -> int:
    """Return how many held-out tokens one loss predicts: at most ``most_tokens`` in whole sequences, at least one."""
    return max(1, min(most_tokens, held_out_tokens) // sequence_length) * sequence_length


def split_stream(tokens: int, sequence_length: int, validation_fraction: float) -> Split:
    """Split a stream of ``tokens`` tokens. Raises CorpusError if it is too short for one sequence of each kind."""
    span = sequence_length + 1
    held_out_wanted = int(tokens * validation_fraction)
    regions = min(MOST_REGIONS, max(1, held_out_wanted // (BLOCK_SEQUENCES * span)))
    region_tokens = tokens // regions
    held_out_tokens = max(span, int(region_tokens * validation_fraction))
    train_tokens = region_tokens - held_out_tokens
    if train_tokens < span:
        raise CorpusError(
            f"The corpus is too short: {tokens:,} tokens do not hold one training and one held-out sequence of"
            f" {sequence_length:,} tokens each.",
            f"Use a corpus of at least {2 * span:,} tokens, or a smaller training.sequence_length.",
        )
    return Split(
        sequence_length=sequence_length,
        regions=regions,
        region_tokens=region_tokens,
        train_per_region=(train_tokens - 1) // sequence_length,
        held_out_per_region=(held_out_tokens - 1) // sequence_length,
        held_out_offset=train_tokens,
    )


def split_rows(tokens: int, sequence_length: int, validation_fraction: float) -> Split:
    """Split a stream of rows of ``sequence_length`` tokens each: every sequence of the result is one row.

    Raises CorpusError if there are fewer than two rows.
    """
    rows = tokens // sequence_length
    if rows < 2:
        raise CorpusError(
            f"The corpus is too short: its dialogues fill {rows} of the 2 rows of {sequence_length:,} tokens that a "
            "training and a held-out sequence take.",
            "Use more dialogues, or a smaller training.sequence_length.",
        )
    regions = min(MOST_REGIONS, max(1, int(rows * validation_fraction) // BLOCK_SEQUENCES))
    region_rows = rows // regions
    held_out_rows = max(1, int(region_rows * validation_fraction))
    return Split(
        sequence_length=sequence_length,
        regions=regions,
        region_tokens=region_rows * sequence_length,
        train_per_region=region_rows - held_out_rows,
        held_out_per_region=held_out_rows,
        held_out_offset=(region_rows - held_out_rows) * sequence_length,
    )
