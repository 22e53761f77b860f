"""Shard of another rank, reached over its connection to the leader."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.swarm.download_plan import Span
from p2ptrain.team.connection import Blob, RankConnection, TeamFrame
from p2ptrain.team.requests import (
    CheckRequest,
    ExchangeRequest,
    JudgeRequest,
    OpenRequest,
    OpenSlowRequest,
    PendingRecord,
    PieceRequest,
    ShardAnswer,
    SketchRequest,
    SpanRecord,
    ZeroRequest,
    decode_answer,
)
from p2ptrain.team.shard import PendingExchange
from p2ptrain.team.turn import TeamRecord
from p2ptrain.train.widths import Fit, WidthFeedback

ANSWERED_S = 120.0
"""Deadline of one request: more than ``shard.PATIENCE_S`` and the encoding of a rank's fragments. Guess: the encoding
times of large shards would settle it."""


class RemoteShard:
    """``Shard`` of another rank. Any thread may call it; requests follow each other. Owns the connection."""

    def __init__(self, rank: int, connection: RankConnection, deadline_s: float = ANSWERED_S) -> None:
        self._rank = rank
        self._connection = connection
        self._deadline_s = deadline_s
        self._asking = threading.Lock()

    def close(self) -> None:
        """End the connection. Safe to call twice."""
        self._connection.close()

    def open(self, exchange: int, turn: int, fragments: Sequence[int], pending: Sequence[PendingExchange]) -> None:
        records = [
            PendingRecord(
                serial=each.serial,
                exchange=each.exchange,
                share=each.share,
                clip_radius=each.clip_radius if math.isfinite(each.clip_radius) else None,
            )
            for each in pending
        ]
        self._ask(OpenRequest(exchange=exchange, turn=turn, fragments=list(fragments), pending=records))

    def proposals(self, exchange: int) -> Sequence[bytes]:
        _, blobs = self._ask(ExchangeRequest(op="proposals", exchange=exchange))
        return [bytes(blob) for blob in blobs]

    def encode(
        self, exchange: int, mine: Sequence[bytes], theirs: Sequence[bytes | bytearray]
    ) -> tuple[Sequence[bytes], Sequence[float]]:
        answer, blobs = self._ask(ExchangeRequest(op="encode", exchange=exchange), [*mine, *theirs])
        return [bytes(blob) for blob in blobs], answer.norms

    def compare(self, exchange: int, theirs: Sequence[bytes | bytearray]) -> tuple[Sequence[float], Sequence[Fit]]:
        answer, _ = self._ask(ExchangeRequest(op="compare", exchange=exchange), theirs)
        return answer.norms, [each.fit() for each in answer.fits]

    def judge(self, exchange: int, verdict: WidthFeedback) -> None:
        self._ask(JudgeRequest(exchange=exchange, verdict=verdict.name))

    def open_slow(self, donation: int, turn: int) -> None:
        self._ask(OpenSlowRequest(donation=donation, turn=turn))

    def piece(self, donation: int, span: Span) -> bytes | memoryview:
        return self._one_blob(PieceRequest(op="piece", number=donation, span=_record(span)))

    def sketch(self, span: Span, seed: int) -> bytes:
        return bytes(self._one_blob(SketchRequest(download=None, span=_record(span), seed=seed)))

    def are_zero(self) -> bool:
        return self._ask(ZeroRequest())[0].are_zero

    def store(self, download: int, span: Span, piece: bytes | bytearray | memoryview) -> None:
        self._ask(PieceRequest(op="store", number=download, span=_record(span)), [piece])

    def sketch_stored(self, download: int, span: Span, seed: int) -> bytes:
        return bytes(self._one_blob(SketchRequest(download=download, span=_record(span), seed=seed)))

    def check(self, download: int) -> None:
        self._ask(CheckRequest(download=download))

    def _one_blob(self, request: TeamRecord) -> memoryview:
        _, blobs = self._ask(request)
        if len(blobs) != 1:
            raise NetworkError(f"rank {self._rank} answered with {len(blobs)} blobs instead of one")
        return memoryview(blobs[0])

    def _ask(self, request: TeamRecord, blobs: Sequence[Blob] = ()) -> tuple[ShardAnswer, Sequence[Blob]]:
        try:
            with self._asking:
                self._connection.send(TeamFrame(request.model_dump_json().encode(), blobs), self._deadline_s)
                frame = self._connection.receive(self._deadline_s)
            answer = decode_answer(frame.body)
        except (NetworkError, RemoteError) as error:
            raise NetworkError(f"rank {self._rank} of this peer: {error}") from error
        match answer.failure:
            case "":
                return answer, frame.blobs
            case "network":
                raise NetworkError(f"rank {self._rank} of this peer: {answer.reason}")
            case "remote":
                raise RemoteError(answer.reason)
            case "value":
                raise ValueError(answer.reason)


def _record(span: Span) -> SpanRecord:
    return SpanRecord(fragment=span.fragment, start=span.start, stop=span.stop)
