"""A donor's weights are compared with others' copies, and completed from them when it breaks off; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgpack
import pytest
import torch

from p2ptrain.codec import get
from p2ptrain.errors import NetworkError, RemoteError
from p2ptrain.framing import FrameKind
from p2ptrain.ids import PeerId
from p2ptrain.net import virtual_time
from p2ptrain.net.copies import EACH, Copies, Gatherer
from p2ptrain.net.driver import at_once
from p2ptrain.net.memory import MemoryNetwork
from p2ptrain.ports import Link
from p2ptrain.telemetry import MemoryLog
from p2ptrain.train.payloads import Payloads, Snapshot

ME, GIVER, A, B, C = (PeerId(name) for name in ("me", "giver", "a", "b", "c"))
F, N = 4, 5000
COMMON = [torch.randn(N, generator=torch.Generator().manual_seed(number)) for number in range(F)]
Weights = list[torch.Tensor]


def honest(seed: int) -> Weights:
    """3 % off the others."""
    random = torch.Generator().manual_seed(1000 + seed)
    return [part + 0.03 * torch.randn(N, generator=random) for part in COMMON]


def negated() -> Weights:
    return [-part for part in COMMON]


def as_bytes(weights: Weights) -> list[bytearray]:
    return [bytearray(part.numpy().tobytes()) for part in weights]


async def silence(link: Link) -> None:
    await asyncio.sleep(1e6)


def gathered(
    given: Weights, others: Mapping[PeerId, Weights | Callable[[Link], Awaitable[None]] | None], notebook: MemoryLog
) -> tuple[list[bytearray], float]:
    """What becomes of what the giver gave; of the others, some answer by hand, and None is not there at all."""

    async def main() -> tuple[list[bytearray], float]:
        loop = asyncio.get_running_loop()
        network = MemoryNetwork(0.05)
        for peer, what in others.items():
            if isinstance(what, list):
                payloads = Payloads([N] * F, get("fp32", 1024), None)
                payloads.publish(Snapshot(1, tuple(what), tuple(what)))
                await network.transport(peer).listen(Copies(payloads, at_once, loop.time).answer)
            elif what is not None:
                await network.transport(peer).listen(what)
        gatherer = Gatherer(network.transport(ME).open, [4 * N] * F, at_once, notebook)
        whole = await gatherer.complete(GIVER, as_bytes(given), dict.fromkeys([GIVER, *others], ()))
        return whole, loop.time()

    return virtual_time.run(main())


@pytest.fixture
def notebook() -> MemoryLog:
    return MemoryLog()


def test_weights_that_another_confirms_are_taken_to_the_bit(notebook):
    given = honest(0)
    whole, seconds = gathered(given, {A: honest(1), B: honest(2)}, notebook)
    assert whole == as_bytes(given)
    assert notebook.kinds() == []
    assert seconds < 2.0


def test_a_donor_that_two_others_contradict_broke_the_protocol(notebook):
    with pytest.raises(RemoteError, match="far from those of others"):
        gathered(negated(), {A: honest(1), B: honest(2)}, notebook)


def test_a_donor_whose_weights_are_no_numbers_is_contradicted_too(notebook):
    with pytest.raises(RemoteError, match="far from those of others"):
        gathered([torch.full((N,), float("nan"))] * F, {A: honest(1), B: honest(2)}, notebook)


def test_one_of_three_that_contradicts_an_honest_donor_is_overruled(notebook):
    given = honest(0)
    whole, _ = gathered(given, {A: negated(), B: honest(2)}, notebook)
    assert whole == as_bytes(given)


def test_of_two_words_neither_is_believed_and_nobody_is_blamed(notebook):
    with pytest.raises(NetworkError, match="far apart"):
        gathered(honest(0), {A: negated()}, notebook)


def test_a_piece_is_sent_as_it_lies_in_memory():
    """On the event loop a copy of a fragment for each stranger who asks would hold up everybody else."""
    weights, sent = honest(0), []

    class Asking:
        """A link on which somebody asks for a fragment."""

        peer = A

        async def receive(self):
            return FrameKind.MESSAGE, msgpack.packb(["piece", 2])

        async def send(self, kind, body):
            sent.append((kind, body))

    payloads = Payloads([N] * F, get("fp32", 1024), None)
    payloads.publish(Snapshot(1, tuple(weights), tuple(weights)))
    virtual_time.run(Copies(payloads, at_once, lambda: 0.0).answer(Asking()))
    body = b"".join(chunk for kind, chunk in sent if kind == FrameKind.CHUNK)
    assert body == weights[2].numpy().tobytes()
    first = torch.frombuffer(sent[0][1], dtype=torch.float32)
    assert first.data_ptr() == weights[2].data_ptr()


@pytest.mark.parametrize("came", [1, 3])
def test_a_donor_that_breaks_off_costs_its_unfinished_fragments_alone(came, notebook):
    given = honest(0)[:came]
    whole, _ = gathered(given, {A: honest(1), B: honest(2), C: honest(3)}, notebook)
    assert whole[:came] == as_bytes(given)
    assert len(whole) == F
    for place in range(came, F):
        assert whole[place] in [as_bytes(honest(seed))[place] for seed in (1, 2, 3)]


def test_a_donor_that_breaks_off_and_leaves_nobody_else_gave_nothing(notebook):
    with pytest.raises(NetworkError, match="broke off, and nobody else"):
        gathered(honest(0)[:2], {A: None}, notebook)


def test_where_nobody_else_can_be_asked_it_is_said_and_the_weights_are_taken(notebook):
    given = honest(0)
    whole, _ = gathered(given, {A: None, B: None}, notebook)
    assert whole == as_bytes(given)
    assert notebook.kinds() == ["unconfirmed"]


def test_the_only_other_peer_there_is_is_believed_in_silence(notebook):
    whole, _ = gathered(honest(0), {}, notebook)
    assert whole == as_bytes(honest(0))
    assert notebook.kinds() == []


def test_who_takes_the_question_and_says_nothing_is_waited_for_no_longer_than_its_deadline(notebook):
    given = honest(0)
    whole, seconds = gathered(given, {A: silence, B: honest(2), C: silence}, notebook)
    assert whole == as_bytes(given)
    assert seconds <= 130.0


def test_questions_that_are_none_are_offences_and_floods_are_rationed():
    async def main() -> tuple[int, int]:
        network, loop = MemoryNetwork(0.01), asyncio.get_running_loop()
        payloads = Payloads([N] * F, get("fp32", 1024), None)
        payloads.publish(Snapshot(1, tuple(honest(1)), tuple(honest(1))))
        copies, offences, rationed = Copies(payloads, at_once, loop.time), 0, 0

        async def answer(link: Link) -> None:
            nonlocal offences, rationed
            try:
                await copies.answer(link)
            except RemoteError:
                offences += 1
            except NetworkError:
                rationed += 1

        await network.transport(A).listen(answer)

        async def ask(body: bytes) -> None:
            link = await network.transport(ME).open(A)
            await link.send(FrameKind.MESSAGE, body)
            await asyncio.sleep(0.1)
            await link.close()

        nonsense = [["piece", F], ["piece", -1], ["sketch", 0, 2**63], ["sketch", 0], {}, "piece", ["piece", "0"]]
        for question in nonsense:
            await ask(msgpack.packb(question))
        await ask(b"\xc1")
        for _ in range(int(EACH.burst) + 50):
            await ask(msgpack.packb(["sketch", 0, 7]))
        return offences, rationed

    offences, rationed = virtual_time.run(main())
    assert offences == 8
    assert 45 <= rationed <= 50
