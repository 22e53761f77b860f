"""Rendezvous of a team on several computers: ``torch.distributed.Store`` whose content only the leader holds.

torch's own TCPStore listens on all interfaces and asks nobody who they are. Here every rank reads and writes over its
authenticated line to the leader, within limits and deadlines. A store serves one generation and ends with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, Literal

import torch.distributed as dist
from pydantic import Field, ValidationError

from p2ptrain.base.errors import NetworkError, RemoteError, TeamError
from p2ptrain.team.connection import RankConnection, ReceivedFrame, TeamFrame
from p2ptrain.team.turn import TeamRecord
from p2ptrain.train.team_group import RENDEZVOUS_TIMEOUT

MOST_KEYS = 16_384
"""gloo needs one for each rank and group."""
MOST_VALUE_BYTES = 1 << 16
MOST_STORED_BYTES = 1 << 26
MOST_KEYS_AT_ONCE = 1024
MARGIN_S = 10.0
"""Seconds in which a request and its answer cross the line, beside the wait: as long as silence may last on it
(``lan_messages.SILENCE_S``)."""

Key = Annotated[str, Field(max_length=512)]


class StoreRequest(TeamRecord):
    """One call of a store's method; the values of ``set`` and ``compare_set`` are blobs."""

    op: Literal["set", "get", "add", "wait", "check", "delete", "count", "compare_set"]
    keys: Annotated[list[Key], Field(max_length=MOST_KEYS_AT_ONCE)] = Field(default_factory=list)
    number: Annotated[int, Field(ge=-(2**62), le=2**62)] = 0
    wait_s: Annotated[float, Field(ge=0)] = 0.0


class StoreAnswer(TeamRecord):
    """Result of a request; a value that was asked for is a blob."""

    failure: Annotated[str, Field(max_length=500)] = ""
    number: int = 0


def decode_store_request(frame: ReceivedFrame) -> StoreRequest:
    """Return a request whose keys and blobs are as many as its method takes. Raises RemoteError."""
    try:
        request = StoreRequest.model_validate_json(frame.body)
    except ValidationError as error:
        raise RemoteError(f"not a request to a store: {error.error_count()} fields are invalid") from None
    keys, blobs = _COUNTS[request.op]
    if (keys is not None and len(request.keys) != keys) or len(frame.blobs) != blobs:
        raise RemoteError(f"{request.op} with {len(request.keys)} keys and {len(frame.blobs)} values")
    return request


_COUNTS: dict[str, tuple[int | None, int]] = {
    "set": (1, 1),
    "get": (1, 0),
    "add": (1, 0),
    "wait": (None, 0),
    "check": (None, 0),
    "delete": (1, 0),
    "count": (0, 0),
    "compare_set": (1, 2),
}
"""Keys, or any number of them, and blobs of each method."""


def decode_store_answer(body: bytes) -> StoreAnswer:
    """Return an answer. Raises RemoteError."""
    try:
        return StoreAnswer.model_validate_json(body)
    except ValidationError as error:
        raise RemoteError(f"not an answer of a store: {error.error_count()} fields are invalid") from None


class StoreContent:
    """Content of one generation's store, in the leader's memory. Any thread may call it.

    Args:
        most_wait_s: longest wait of any call.
    """

    def __init__(self, most_wait_s: float) -> None:
        self.most_wait_s = most_wait_s
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False

    def close(self) -> None:
        """End all waits. Safe to call twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def answered(self, request: StoreRequest, blobs: Sequence[bytes | bytearray]) -> tuple[StoreAnswer, list[bytes]]:
        """Perform a request. Raises RemoteError beyond a limit."""
        with self._changed:
            match request.op:
                case "set":
                    self._put(request.keys[0], bytes(blobs[0]))
                case "get":
                    if not self._wait(request):
                        return self._late(request), []
                    return StoreAnswer(), [self._values[request.keys[0]]]
                case "wait":
                    return (StoreAnswer() if self._wait(request) else self._late(request)), []
                case "check":
                    return StoreAnswer(number=int(self._has(request.keys))), []
                case "add":
                    try:
                        number = int(self._values.get(request.keys[0], b"0")) + request.number
                    except ValueError:
                        raise RemoteError("add to a value that is not a number") from None
                    self._put(request.keys[0], str(number).encode())
                    return StoreAnswer(number=number), []
                case "delete":
                    found = self._values.pop(request.keys[0], None)
                    self._bytes -= len(found or b"")
                    return StoreAnswer(number=int(found is not None)), []
                case "count":
                    return StoreAnswer(number=len(self._values)), []
                case "compare_set":
                    key, (expected, wanted) = request.keys[0], map(bytes, blobs)
                    if self._values.get(key, b"") == expected:
                        self._put(key, wanted)
                    return StoreAnswer(), [self._values.get(key, expected)]
        return StoreAnswer(), []

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _wait(self, request: StoreRequest) -> bool:
        """Wait until all keys are set; return whether they are."""
        wait_s = min(request.wait_s, self.most_wait_s)
        self._changed.wait_for(lambda: self._is_closed or self._has(request.keys), wait_s)
        return not self._is_closed and self._has(request.keys)

    def _late(self, request: StoreRequest) -> StoreAnswer:
        missing = [key for key in request.keys if key not in self._values]
        what = "the generation has ended" if self._is_closed else f"{len(missing)} ranks did not come in time"
        return StoreAnswer(failure=f"{RENDEZVOUS_TIMEOUT}: {what}")

    def _put(self, key: str, value: bytes) -> None:
        added = len(value) - len(self._values.get(key, b""))
        if len(value) > MOST_VALUE_BYTES or self._bytes + added > MOST_STORED_BYTES:
            raise RemoteError(f"a value of {len(value)} bytes is beyond the limits")
        if key not in self._values and len(self._values) >= MOST_KEYS:
            raise RemoteError(f"more than {MOST_KEYS} keys")
        self._values[key] = value
        self._bytes += added
        self._changed.notify_all()


def serve_store(content: StoreContent, connection: RankConnection) -> None:
    """Answer one rank's requests until its line ends, which closes it."""
    try:
        with suppress(NetworkError, RemoteError):
            while True:
                frame = connection.receive(MARGIN_S, begins_any_time=True)
                answer, blobs = content.answered(decode_store_request(frame), frame.blobs)
                connection.send(TeamFrame(answer.model_dump_json().encode(), blobs), MARGIN_S)
    finally:
        connection.close()


class _TeamStore(dist.Store):
    """Store whose methods are requests. Methods that wait raise RuntimeError, as torch's stores do.

    torch calls the methods from C++; a Python store needs these alone (torch/csrc/distributed/c10d/init.cpp).
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s

    def _ask(self, request: StoreRequest, *blobs: bytes) -> tuple[StoreAnswer, Sequence[bytes | bytearray]]:
        raise NotImplementedError  # an abstract class needs a metaclass that torch's Store does not have

    def _asked(self, request: StoreRequest, *blobs: bytes) -> tuple[int, list[bytes]]:
        answer, found = self._ask(request, *blobs)
        if answer.failure:
            raise RuntimeError(answer.failure)
        return answer.number, [bytes(each) for each in found]

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def set(self, key: str, value: str | bytes) -> None:
        self._asked(StoreRequest(op="set", keys=[key]), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        _, found = self._asked(StoreRequest(op="get", keys=[key], wait_s=self._timeout_s))
        return found[0]

    def add(self, key: str, amount: int) -> int:
        return self._asked(StoreRequest(op="add", keys=[key], number=amount))[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        wait_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._asked(StoreRequest(op="wait", keys=list(keys), wait_s=wait_s))

    def check(self, keys: list[str]) -> bool:
        return bool(self._asked(StoreRequest(op="check", keys=list(keys)))[0])

    def delete_key(self, key: str) -> bool:
        return bool(self._asked(StoreRequest(op="delete", keys=[key]))[0])

    def num_keys(self) -> int:
        return self._asked(StoreRequest(op="count"))[0]

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        pair = [each.encode() if isinstance(each, str) else bytes(each) for each in (expected_value, desired_value)]
        return self._asked(StoreRequest(op="compare_set", keys=[key]), *pair)[1][0]

    def has_extended_api(self) -> bool:
        return False


class LeaderStore(_TeamStore):
    """Store of the leader's own rank."""

    def __init__(self, content: StoreContent) -> None:
        super().__init__(content.most_wait_s)
        self._content = content

    def _ask(self, request: StoreRequest, *blobs: bytes) -> tuple[StoreAnswer, Sequence[bytes | bytearray]]:
        return self._content.answered(request, blobs)


class RankStore(_TeamStore):
    """Store of another rank, over its line to the leader. Any thread may call it; requests follow each other.

    Args:
        connection: with ``MOST_VALUE_BYTES`` for blobs; owned.
    """

    def __init__(self, connection: RankConnection, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._connection = connection
        self._asking = threading.Lock()

    def close(self) -> None:
        self._connection.close()

    def _ask(self, request: StoreRequest, *blobs: bytes) -> tuple[StoreAnswer, Sequence[bytes | bytearray]]:
        until = time.monotonic() + request.wait_s + MARGIN_S
        try:
            with self._asking:
                self._connection.send(TeamFrame(request.model_dump_json().encode(), blobs), MARGIN_S)
                frame = self._connection.receive(max(until - time.monotonic(), MARGIN_S))
            return decode_store_answer(frame.body), frame.blobs
        except (NetworkError, RemoteError) as error:
            raise TeamError("rendezvous", str(error)) from error
