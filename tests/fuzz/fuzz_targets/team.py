"""Targets for what the ranks of a team tell each other: turns, frames, requests to a shard, and its answers."""

from __future__ import annotations

import struct

import torch

from fuzz_targets.common import Target, refusing
from p2ptrain import codec
from p2ptrain.base.errors import RemoteError, TeamError
from p2ptrain.team.connection import Blob, TeamFrame, read_frame, write_frame
from p2ptrain.team.lan_messages import (
    BeatMessage,
    EndMessage,
    JoinMessage,
    PlanMessage,
    ReadyMessage,
    RefusalMessage,
    ReportMessage,
    WelcomeMessage,
    decode_control,
)
from p2ptrain.team.requests import (
    CheckRequest,
    ExchangeRequest,
    FitRecord,
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
    decode_request,
)
from p2ptrain.team.sealed import Purpose, decode_hello
from p2ptrain.team.shard import LocalShard
from p2ptrain.team.shard_server import answered
from p2ptrain.team.store import StoreAnswer, StoreContent, StoreRequest, decode_store_answer, decode_store_request
from p2ptrain.team.turn import (
    AdoptionRecord,
    DisplacementRecord,
    RoundRecord,
    TeamRecord,
    Turn,
    decode_turn,
    encode_turn,
)
from p2ptrain.train.payloads import Payloads, Snapshot

MOST_BYTES = 4096
SPAN = SpanRecord(fragment=1, start=0, stop=64)


def framed(record: TeamRecord, *blobs: Blob) -> bytes:
    data = bytearray()
    write_frame(TeamFrame(record.model_dump_json().encode(), blobs), data.extend)
    return bytes(data)


def read(data: bytes) -> TeamFrame:
    """Read a frame that must take all these bytes."""
    left = bytearray(data)

    def receive(size: int) -> bytearray:
        if size > len(left):
            raise RemoteError("the connection has ended")
        taken = left[:size]
        del left[:size]
        return taken

    frame = read_frame(receive, MOST_BYTES)
    if left:
        raise RemoteError("more bytes follow")
    return frame


def shard() -> LocalShard:
    """Return a shard with two fragments and two open exchanges, of which the first has been encoded."""
    payloads = Payloads([32, 64], codec.get("modular4", 32), None)
    parts = torch.arange(32.0), torch.ones(64)
    payloads.publish(Snapshot(1, parts, parts, (0, 0)))
    made = LocalShard(payloads, patience_s=0.0)
    for exchange in (1, 2):
        made.open(exchange, 0, [0], [])
    made.encode(1, made.proposals(1), made.proposals(2))
    return made


@refusing(TeamError)
def turn(data: bytes) -> None:
    found = decode_turn(data)
    assert decode_turn(encode_turn(found)) == found


@refusing(RemoteError)
def team_frame(data: bytes) -> None:
    frame = read(data)
    assert sum(map(len, frame.blobs)) <= MOST_BYTES
    again = bytearray()
    write_frame(frame, again.extend)
    assert again == data


@refusing(RemoteError)
def shard_request(data: bytes) -> None:
    frame = read(data)
    request = decode_request(frame.body)
    assert decode_request(request.model_dump_json().encode()) == request
    decode_answer(answered(shard(), frame).body)


@refusing(RemoteError)
def shard_answer(data: bytes) -> None:
    answer = decode_answer(read(data).body)
    [each.fit() for each in answer.fits]


@refusing(RemoteError)
def lan_hello(data: bytes) -> None:
    decode_hello(data)


@refusing(RemoteError)
def lan_message(data: bytes) -> None:
    message = decode_control(read(data).body)
    assert decode_control(message.model_dump_json().encode()) == message


@refusing(RemoteError)
def store_request(data: bytes) -> None:
    frame = read(data)
    content = StoreContent(most_wait_s=0.0)
    content.answered(StoreRequest(op="set", keys=["a"]), [b"1"])
    decode_store_answer(content.answered(decode_store_request(frame), frame.blobs)[0].model_dump_json().encode())


@refusing(RemoteError)
def store_answer(data: bytes) -> None:
    decode_store_answer(read(data).body)


def packed_hello(purpose: int) -> bytes:
    return struct.pack(">15sBH16s32s", b"p2ptrain LAN 1\n", purpose, 1, bytes(16), bytes(32))


def targets() -> dict[str, Target]:
    """Return the targets of this module by name."""
    displacement = DisplacementRecord(
        serial=1, exchange=2, owners=[0, 1], share=0.5, clip_radius=None, progress=-3.0, finished=False, follow=0.25
    )
    adoption = AdoptionRecord(adoption=3, step=4, progress=5.0)
    full = Turn(
        number=7, action="advance", peers=2.5, deliveries=[displacement, RoundRecord(step=4), adoption], released=[1, 2]
    )
    pending = PendingRecord(serial=1, exchange=1, share=0.5, clip_radius=1.5)
    proposals = shard().proposals(2)
    requests = (
        framed(OpenRequest(exchange=2, turn=0, fragments=[1, 0], pending=[pending])),
        framed(ExchangeRequest(op="proposals", exchange=2)),
        framed(ExchangeRequest(op="encode", exchange=2), *proposals, *proposals),
        framed(ExchangeRequest(op="compare", exchange=1), bytes(20)),
        framed(JudgeRequest(exchange=1, verdict="FITS")),
        framed(OpenSlowRequest(donation=2, turn=0)),
        framed(PieceRequest(op="piece", number=2, span=SPAN)),
        framed(PieceRequest(op="store", number=2, span=SPAN), bytes(64)),
        framed(SketchRequest(download=None, span=SPAN, seed=3)),
        framed(SketchRequest(download=2, span=SPAN, seed=3)),
        framed(CheckRequest(download=2)),
        framed(ZeroRequest()),
    )
    fit = FitRecord(sketched=1.0, unexplained=float("nan"), blocks=3, wrapped=0.5, is_known=True)
    answers = framed(ShardAnswer(norms=[1.0], fits=[fit])), framed(ShardAnswer(failure="remote", reason="no"), b"x")
    messages = (
        framed(JoinMessage(version="1", run="ab", name="n", device="cpu")),
        framed(WelcomeMessage(rank=1), b"manifest"),
        framed(RefusalMessage(reason="no", remedy="go", is_final=True)),
        framed(ReadyMessage()),
        framed(PlanMessage(meeting="0f" * 16), b"plan"),
        framed(ReportMessage(kind="memory", reason="full")),
        framed(EndMessage(is_final=True)),
        framed(BeatMessage()),
    )
    stored = (
        framed(StoreRequest(op="set", keys=["k"]), b"value"),
        framed(StoreRequest(op="get", keys=["a"], wait_s=1.0)),
        framed(StoreRequest(op="add", keys=["n"], number=-1)),
        framed(StoreRequest(op="wait", keys=["a", "b"])),
        framed(StoreRequest(op="check", keys=[])),
        framed(StoreRequest(op="delete", keys=["a"])),
        framed(StoreRequest(op="count")),
        framed(StoreRequest(op="compare_set", keys=["a"]), b"1", b"2"),
    )
    plain = Turn(number=1, action="settle", peers=1.0)
    return {
        "turn": Target(turn, (encode_turn(full), encode_turn(plain))),
        "team_frame": Target(team_frame, (framed(ZeroRequest(), b"", b"abc"),)),
        "shard_request": Target(shard_request, requests, 5),
        "shard_answer": Target(shard_answer, answers),
        "lan_hello": Target(lan_hello, tuple(map(packed_hello, Purpose))),
        "lan_message": Target(lan_message, messages),
        "store_request": Target(store_request, stored),
        "store_answer": Target(store_answer, (framed(StoreAnswer(failure="no", number=-3), b"x"),)),
    }
