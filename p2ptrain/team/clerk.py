"""Clerk: the thread of a rank that answers the leader's requests to its desk."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import assert_never

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.team.desk import Desk
from p2ptrain.team.line import Blob, Line, TeamFrame
from p2ptrain.team.requests import (
    LONGEST_REASON,
    CheckRequest,
    DeskAnswer,
    DeskRequest,
    ExchangeRequest,
    FitRecord,
    JudgeRequest,
    OpenRequest,
    OpenSlowRequest,
    PieceRequest,
    SketchRequest,
    ZeroRequest,
    decode_request,
)

ANSWER_S = 60.0
"""Deadline for the leader to take an answer. Guess: the longest payload of a rank over a slow LAN would settle it."""


class Clerk:
    """Thread that serves one line until it ends. Owns the line."""

    def __init__(self, desk: Desk, line: Line) -> None:
        self._desk = desk
        self._line = line
        self._thread = threading.Thread(target=self._serve, name="clerk", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the line and the thread."""
        self._line.close()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while True:
                self._line.send(answered(self._desk, self._line.receive(None)), ANSWER_S)
        except (NetworkError, RemoteError):
            self._line.close()


def answered(desk: Desk, question: TeamFrame) -> TeamFrame:
    """Return the answer to a frame. Raises RemoteError if it holds no request."""
    request = decode_request(question.body)
    try:
        answer, blobs = _performed(desk, request, question.blobs)
    except NetworkError as error:
        answer, blobs = DeskAnswer(failure="network", reason=str(error)[:LONGEST_REASON]), ()
    except RemoteError as error:
        answer, blobs = DeskAnswer(failure="remote", reason=str(error)[:LONGEST_REASON]), ()
    except (ValueError, IndexError) as error:
        answer, blobs = DeskAnswer(failure="value", reason=str(error)[:LONGEST_REASON]), ()
    return TeamFrame(answer.model_dump_json().encode(), blobs)


def _performed(desk: Desk, request: DeskRequest, blobs: Sequence[Blob]) -> tuple[DeskAnswer, Sequence[Blob]]:
    match request:
        case OpenRequest():
            desk.open(request.exchange, request.turn, request.fragments, [each.pending() for each in request.pending])
        case ExchangeRequest(op="proposals"):
            return DeskAnswer(), desk.proposals(request.exchange)
        case ExchangeRequest(op="encode"):
            half = len(blobs) // 2
            parts, norms = desk.encode(request.exchange, [bytes(each) for each in blobs[:half]], blobs[half:])  # type: ignore[arg-type]
            return DeskAnswer(norms=list(norms)), parts
        case ExchangeRequest():
            norms, fits = desk.compare(request.exchange, blobs)  # type: ignore[arg-type]
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
            return DeskAnswer(norms=list(norms), fits=records), ()
        case JudgeRequest():
            desk.judge(request.exchange, request.feedback())
        case OpenSlowRequest():
            desk.open_slow(request.donation, request.turn)
        case PieceRequest(op="piece"):
            return DeskAnswer(), [desk.piece(request.number, request.span.span())]
        case PieceRequest():
            (piece,) = blobs
            desk.store(request.number, request.span.span(), piece)
        case SketchRequest():
            span, download = request.span.span(), request.download
            if download is None:
                return DeskAnswer(), [desk.sketch(span, request.seed)]
            return DeskAnswer(), [desk.sketch_stored(download, span, request.seed)]
        case CheckRequest():
            desk.check(request.download)
        case ZeroRequest():
            return DeskAnswer(are_zero=desk.are_zero()), ()
        case _:
            assert_never(request)
    return DeskAnswer(), ()
