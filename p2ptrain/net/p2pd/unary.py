"""hivemind's half of the conversation with p2pd, over which the DHT asks and answers, made fit for strangers.

One connection to p2pd carries what we ask others and what they ask us, each message under the id of its call. The
caller chooses that id, and of a call of ours the callee knows it; and p2pd passes their words on as they are. In
hivemind 1.1.12 a stranger could so end a call of ours, the task that reads, and with it all that is heard of p2pd; fill
the owner's terminal with a message of 4 MiB; and leave an entry behind with each call.

``Control`` reads by rules of its own:

- A stranger's cancel ends what that stranger asked of us, and nothing else. A call of ours is ended once.
- An id that is known already begins nothing, nor does a question that nobody here answers. Nothing of it is said.
- Only so many questions are answered at once. What they cost each is limited where they are answered
  (``net.dht_protocol``).
- Whatever becomes of a question, nothing of it stays.
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
from p2ptrain.base.logging_setup import one_line

MOST_AT_ONCE = 256
"""Questions that are answered at once; those beyond are not heard. One takes a millisecond, and all of them together
may ask for 400 keys a second (``net.dht_protocol``). A guess."""
MOST_UNSENT = 256
"""Messages that p2pd has not taken yet, beyond which no question is heard: it is busy, or hangs. A guess."""
_ID_BYTES = 16


class Control(ControlClient):
    """See the module. ``install`` puts it where hivemind makes its own."""

    async def _read_from_persistent_conn(self, reader: asyncio.StreamReader) -> None:
        """Take what p2pd says until it ends."""
        while True:
            try:
                raw = await reader.readexactly(await read_unsigned_varint(reader))
            except (asyncio.IncompleteReadError, OSError):
                return
            if self._take(raw):
                await asyncio.sleep(0)  # what was read ahead is read without a pause: the others have their turn

    def _take(self, raw: bytes) -> bool:
        """Do what one message asks; whether it is a stranger's question. Nothing that it holds is an error of ours."""
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
        """A call of ours was answered, or failed."""
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
            pending.set_result(None)  # p2pd did what it was told

    def _begin(self, call: UUID, question: p2pd_pb2.CallUnaryRequest) -> None:
        """Answer a stranger's question, if we do."""
        handler = self.unary_handlers.get(question.proto)
        if handler is None or call in self._handler_tasks or call in self._pending_calls or self._is_busy:
            return
        task = asyncio.create_task(self._answer(call, handler, question))
        self._handler_tasks[call] = task
        task.add_done_callback(lambda _: self._handler_tasks.pop(call, None))

    @property
    def _is_busy(self) -> bool:
        return len(self._handler_tasks) >= MOST_AT_ONCE or self._pending_messages.qsize() >= MOST_UNSENT

    async def _answer(self, call: UUID, handler: TUnaryHandler, question: p2pd_pb2.CallUnaryRequest) -> None:
        try:
            said = p2pd_pb2.CallUnaryResponse(response=await handler(question.data, PeerID(question.peer)))
        except (
            Exception
        ) as error:  # what they asked has no sense, or we have a bug: neither is told to strangers at length
            said = p2pd_pb2.CallUnaryResponse(error=_told(error).encode())
        answer = p2pd_pb2.PersistentConnectionRequest(callId=call.bytes, unaryResponse=said)
        if answer.ByteSize() > self.persistent_conn_max_msg_size:
            said = p2pd_pb2.CallUnaryResponse(error=b"the answer is too long")
            answer = p2pd_pb2.PersistentConnectionRequest(callId=call.bytes, unaryResponse=said)
        self._pending_messages.put_nowait(answer)


def install() -> None:
    """From now on hivemind's clients of p2pd have a ``Control``."""
    p2pclient.ControlClient = Control


def _told(error: Exception) -> str:
    """What a stranger hears of an error: of our own the kind alone."""
    return one_line(str(error)) if isinstance(error, RemoteError) else type(error).__name__
