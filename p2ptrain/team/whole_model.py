"""Whole model of a team on several computers, gathered by its leader for export: fragment by fragment, never in memory.

The result is a checkpoint with the slow weights alone, as one process would have saved them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from p2ptrain.base.errors import NetworkError, RemoteError, TeamError
from p2ptrain.checkpoint import ALONE, Checkpoints, Found, checkpoints_in, write_whole
from p2ptrain.swarm.download_plan import Span
from p2ptrain.team.payloads import TeamPayloads

PIECE_BYTES = 1 << 22
"""Bytes that a rank sends at once: a third of a second on a LAN of 100 Mbit/s."""


def gather(
    directory: Path,
    payloads: TeamPayloads,
    lengths: Sequence[int],
    state: Mapping[str, Any],
    together: Callable[[Callable[[], str]], str],
) -> Path:
    """Write the slow weights of all ranks as one checkpoint, and keep the one before. Raises HomeError and TeamError.

    Args:
        lengths: elements of each fragment; in order they are the whole flat vector.
        state: as for ``Checkpoints.save``.
        together: lets the other ranks wait while the leader does a work.
    """
    known, step = Checkpoints(directory), state["step"]
    known.know(Found(None, ()), set(checkpoints_in(directory)))
    known.prepare(step)
    with known.cleaned(step):

        def write() -> str:
            try:
                return write_whole(directory, step, "slow", sum(lengths), _pieces(payloads, lengths))
            except (NetworkError, RemoteError) as error:
                raise TeamError("gathering the model", str(error)) from error

        digest = together(write)
    return known.conclude(state, {ALONE.file: digest})


def _pieces(payloads: TeamPayloads, lengths: Sequence[int]) -> Iterator[memoryview]:
    """Yield the bytes of all slow weights. Raises NetworkError."""
    slow = payloads.slow()
    for fragment, length in enumerate(lengths):
        size = 4 * length
        for start in range(0, size, PIECE_BYTES):
            yield memoryview(payloads.piece(slow, Span(fragment, start, min(start + PIECE_BYTES, size)))).cast("B")
