"""A hardened client side of p2pd's persistent connection, which carries the DHT's unary calls.

Each message has the id of its call. The caller chooses that id, the called peer learns it, and p2pd forwards messages
unchecked. In hivemind 1.1.12 a remote peer can therefore end one of our calls, end the task that reads the connection,
print 4 MiB to the owner's terminal, and leak an entry with each call. ``Control`` reads by stricter rules:

- A remote cancel ends only an inbound call of that id. An outbound call ends once.
- An inbound call with an id in use, without a handler, or beyond the limits, is ignored silently.
- An inbound call leaves no state behind, however it ends.
"""

from __future__ import annotations

import asyncio
from uuid import UUID

from google.protobuf.message import DecodeError
from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings import p2pclient
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient, TUnaryHandler
from hivemind.p2p.p2p_daemon_bindings.utils import read_unsigned_varint
from hivemind.proto import p2pd_pb2
from hivemind.utils.asyncio import cancel_task_if_running

from p2ptrain.base.errors import RemoteError
from p2ptrain.base.text import one_line

MAX_AT_ONCE = 256
"""Concurrent inbound calls; further ones are ignored. A call takes 1 ms, and all together may ask for 400 keys/s
(``net.dht_protocol``). Guess: measure the concurrent calls at a bootstrap of a full swarm."""
MAX_UNSENT = 256
"""Unsent messages to p2pd beyond which inbound calls are ignored. Guess: measure the queue at a busy bootstrap."""
_ID_BYTES = 16


class Control(ControlClient):
    """Client of p2pd's persistent connection with the rules of this module; ``install`` makes hivemind use it."""

    async def _read_from_persistent_conn(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                raw = await reader.readexactly(await read_unsigned_varint(reader))
            except (asyncio.IncompleteReadError, OSError):
                return
            if self._take(raw):
                await asyncio.sleep(0)  # buffered messages are read without a pause: let other tasks run

    def _take(self, raw: bytes) -> bool:
        """Handle one message and return whether it is an inbound call. Never raises, whatever the message holds."""
        try:
            message = p2pd_pb2.PersistentConnectionResponse.FromString(raw)
        except DecodeError:
            return False
        if len(message.callId) != _ID_BYTES:
            return False
        call, kind = UUID(bytes=message.callId), message.WhichOneof("message")
        if kind == "requestHandling":
            self._begin(call, message.requestHandling)
        elif kind == "cancel":
            cancel_task_if_running(self._handler_tasks.get(call))
        else:
            self._conclude(call, message)
        return bool(kind == "requestHandling")

    def _conclude(self, call: UUID, message: p2pd_pb2.PersistentConnectionResponse) -> None:
        pending = self._pending_calls.get(call)
        if pending is None or pending.done():
            return
        if message.HasField("daemonError"):
            pending.set_exception(P2PDaemonError(one_line(message.daemonError.message)))
        elif message.HasField("callUnaryResponse"):
            answer = message.callUnaryResponse
            if answer.HasField("response"):
                pending.set_result(answer.response)
            else:
                pending.set_exception(P2PHandlerError(one_line(answer.error.decode(errors="replace"))))
        else:
            pending.set_result(None)  # p2pd confirmed the request

    def _begin(self, call: UUID, question: p2pd_pb2.CallUnaryRequest) -> None:
        """Start the handler of an inbound call, unless the call is to be ignored."""
        handler = self.unary_handlers.get(question.proto)
        if handler is None or call in self._handler_tasks or call in self._pending_calls or self._is_busy:
            return
        task = asyncio.create_task(self._answer(call, handler, question))
        self._handler_tasks[call] = task
        task.add_done_callback(lambda _: self._handler_tasks.pop(call, None))

    @property
    def _is_busy(self) -> bool:
        return len(self._handler_tasks) >= MAX_AT_ONCE or self._pending_messages.qsize() >= MAX_UNSENT

    async def _answer(self, call: UUID, handler: TUnaryHandler, question: p2pd_pb2.CallUnaryRequest) -> None:
        try:
            said = p2pd_pb2.CallUnaryResponse(response=await handler(question.data, PeerID(question.peer)))
        except Exception as error:  # an invalid request or our own bug: remote peers get no details
            said = p2pd_pb2.CallUnaryResponse(error=_public_text(error).encode())
        answer = p2pd_pb2.PersistentConnectionRequest(callId=call.bytes, unaryResponse=said)
        if answer.ByteSize() > self.persistent_conn_max_msg_size:
            said = p2pd_pb2.CallUnaryResponse(error=b"the answer is too long")
            answer = p2pd_pb2.PersistentConnectionRequest(callId=call.bytes, unaryResponse=said)
        self._pending_messages.put_nowait(answer)


def install() -> None:
    """Make hivemind's p2pd clients use ``Control``."""
    p2pclient.ControlClient = Control


def _public_text(error: Exception) -> str:
    """Return the error text for a remote peer; internal errors show only their type."""
    return one_line(str(error)) if isinstance(error, RemoteError) else type(error).__name__
