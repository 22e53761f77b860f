"""Pieces of the host vector that ranks on other computers train, and their way over the network."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from p2ptrain.train.ranks import Ranks
from p2ptrain.trainer.host_vector import HostVector

ALL = slice(0, sys.maxsize)


@dataclass(frozen=True, slots=True)
class RemotePieces:
    """One rank's part in moving them, a collective of rank 0 and the ranks that have some; others do nothing."""

    ranks: Ranks | None
    """None: this process is alone, and there are no pieces."""
    pieces: Mapping[int, slice]
    """Pieces of the host vector by the rank that trains them."""
    host: HostVector | None
    """Rank 0's; None: of another computer."""
    copies: Sequence[Tensor]
    """This rank's own vectors of its piece."""

    def fetch(self, numbers: range, within: slice = ALL) -> None:
        """Copy some of the host vectors to the ranks, where these are ``within``."""
        if (ranks := self.ranks) is None:
            return
        for rank, piece in self.pieces.items():
            begin, end = max(piece.start, within.start), min(piece.stop, within.stop)
            for number in numbers if begin < end else ():
                if ranks.rank == 0 and self.host is not None:
                    ranks.send_to(self.host.vector(number)[begin:end], rank)
                elif ranks.rank == rank:
                    ranks.receive_from(self.copies[number][begin - piece.start : end - piece.start], 0)

    def bring(self, numbers: range) -> None:
        """Copy the ranks' vectors to some of the host vectors, of the first replica: the others have the same."""
        if (ranks := self.ranks) is None:
            return
        for rank, piece in self.pieces.items():
            for number in numbers if ranks.mesh.replica(rank) == 0 else ():
                if ranks.rank == 0 and self.host is not None:
                    ranks.receive_from(self.host.vector(number)[piece], rank)
                elif ranks.rank == rank:
                    ranks.send_to(self.copies[number], 0)
