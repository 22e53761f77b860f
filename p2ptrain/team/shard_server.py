"""Shard server: the thread of a rank that answers the leader's requests to its shard."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import assert_never

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.team.connection import Blob, RankConnection, ReceivedFrame, TeamFrame
from p2ptrain.team.requests import (
    LONGEST_REASON,
    CheckRequest,
    ExchangeRequest,
    FitRecord,
    JudgeRequest,
    OpenRequest,
    OpenSlowRequest,
    PieceRequest,
    ShardAnswer,
    ShardRequest,
    SketchRequest,
    ZeroRequest,
    decode_request,
)
from p2ptrain.team.shard import Shard

ANSWER_S = 60.0
"""Deadline for the leader to send a request it has begun, and to take the answer. Guess: the longest payload of a rank
over a slow LAN would settle it."""


class ShardServer:
    """Thread that serves one connection until it ends. Owns the connection."""

    def __init__(self, shard: Shard, connection: RankConnection) -> None:
        self._shard = shard
        self._connection = connection
        self._thread = threading.Thread(target=self._serve, name="shard-server", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the connection and the thread."""
        self._connection.close()
        self._thread.join()

    def _serve(self) -> None:
        try:
            with suppress(NetworkError, RemoteError):
                while True:
                    self._connection.send(
                        answered(self._shard, self._connection.receive(ANSWER_S, begins_any_time=True)), ANSWER_S
                    )
        finally:  # after a bug too: the leader need not wait for an answer
            self._connection.close()


def answered(shard: Shard, question: ReceivedFrame) -> TeamFrame:
    """Return the answer to a frame. Raises RemoteError if it holds no request."""
    request = decode_request(question.body)
    try:
        answer, blobs = _performed(shard, request, question.blobs)
    except NetworkError as error:
        answer, blobs = ShardAnswer(failure="network", reason=str(error)[:LONGEST_REASON]), ()
    except RemoteError as error:
        answer, blobs = ShardAnswer(failure="remote", reason=str(error)[:LONGEST_REASON]), ()
    except (ValueError, IndexError) as error:
        answer, blobs = ShardAnswer(failure="value", reason=str(error)[:LONGEST_REASON]), ()
    return TeamFrame(answer.model_dump_json().encode(), blobs)


def _performed(shard: Shard, request: ShardRequest, blobs: Sequence[bytearray]) -> tuple[ShardAnswer, Sequence[Blob]]:
    match request:
        case OpenRequest():
            shard.open(request.exchange, request.turn, request.fragments, [each.pending() for each in request.pending])
        case ExchangeRequest(op="proposals"):
            return ShardAnswer(), shard.proposals(request.exchange)
        case ExchangeRequest(op="encode"):
            half = len(blobs) // 2
            parts, norms = shard.encode(request.exchange, [bytes(each) for each in blobs[:half]], blobs[half:])
            return ShardAnswer(norms=list(norms)), parts
        case ExchangeRequest():
            norms, fits = shard.compare(request.exchange, blobs)
            records = [
                FitRecord(
                    sketched=fit.sketched,
                    unexplained=fit.unexplained,
                    blocks=fit.blocks,
                    wrapped=fit.wrapped,
                    is_known=fit.is_known,
                )
                for fit in fits
            ]
            return ShardAnswer(norms=list(norms), fits=records), ()
        case JudgeRequest():
            shard.judge(request.exchange, request.feedback())
        case OpenSlowRequest():
            shard.open_slow(request.donation, request.turn)
        case PieceRequest(op="piece"):
            return ShardAnswer(), [shard.piece(request.number, request.span.span())]
        case PieceRequest():
            (piece,) = blobs
            shard.store(request.number, request.span.span(), piece)
        case SketchRequest():
            span, download = request.span.span(), request.download
            if download is None:
                return ShardAnswer(), [shard.sketch(span, request.seed)]
            return ShardAnswer(), [shard.sketch_stored(download, span, request.seed)]
        case CheckRequest():
            shard.check(request.download)
        case ZeroRequest():
            return ShardAnswer(are_zero=shard.are_zero()), ()
        case _:
            assert_never(request)
    return ShardAnswer(), ()
