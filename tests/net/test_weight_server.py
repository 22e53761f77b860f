"""Weight server: one snapshot per stream, rate limits; in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

import msgpack
import pytest
import torch
import virtual_time
from donors import F, N, Weights, honest, published
from memory_network import MemoryNetwork

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId
from p2ptrain.framing import FrameKind
from p2ptrain.host.payloads import Snapshot
from p2ptrain.host.sketch import SKETCH_BYTES, sketch
from p2ptrain.net import weight_server as copies_module
from p2ptrain.net.driver import at_once
from p2ptrain.net.payload import receive_payload
from p2ptrain.net.rpc import send_message
from p2ptrain.net.throttle import Throttles
from p2ptrain.net.weight_server import EACH, LONGEST_S, MAX_PINNED, SHARED_S, WeightServer
from p2ptrain.ports import Link

ME, A, B = PeerId("me"), PeerId("a"), PeerId("b")


def as_bytes(weights: Weights) -> list[bytes]:
    return [part.numpy().tobytes() for part in weights]


async def asked(link: Link, *questions: list[object]) -> list[bytes]:
    answers = []
    for question in questions:
        await send_message(link, question)
        size = SKETCH_BYTES if question[0] == "sketch" else 4 * N
        answers.append(bytes((await receive_payload(link, [size]))[0]))
    return answers


def test_a_piece_is_sent_as_it_lies_in_memory():
    """Check that sending copies nothing: copies of fragments on the event loop would delay everything else."""
    weights, sent, questions = honest(1), [], [["piece", 2], ["enough"]]

    class Asking:
        """A link on which a peer requests a fragment."""

        peer = A

        async def receive(self):
            return FrameKind.MESSAGE, msgpack.packb(questions.pop(0))

        async def send(self, kind, body):
            sent.append((kind, body))

    virtual_time.run(WeightServer(published(weights), at_once, lambda: 0.0).answer(Asking()))
    body = b"".join(chunk for kind, chunk in sent if kind == FrameKind.CHUNK)
    assert body == weights[2].numpy().tobytes()
    first = torch.frombuffer(sent[0][1], dtype=torch.float32)
    assert first.data_ptr() == weights[2].data_ptr()


def test_all_pieces_of_a_stream_are_of_one_snapshot():
    async def main() -> tuple[list[bytes], list[bytes]]:
        network, payloads = MemoryNetwork(0.01), published(honest(1))
        await network.transport(A).listen(WeightServer(payloads, at_once, asyncio.get_running_loop().time).answer)
        link = await network.transport(ME).open(A)
        early = await asked(link, ["piece", 0])
        payloads.publish(Snapshot(2, tuple(honest(2)), tuple(honest(2))))
        early += await asked(link, ["piece", 1])
        await send_message(link, ["enough"])
        late = await asked(await network.transport(ME).open(A), ["piece", 0], ["piece", 1])
        return early, late

    early, late = virtual_time.run(main())
    for answers, weights in ((early, honest(1)), (late, honest(2))):
        assert answers == as_bytes(weights)[:2]


def test_sketches_are_of_what_we_have_now_whoever_takes_older_pieces():
    """Check that sketches are current: an open stream would make newcomers compare with old weights."""

    async def main() -> list[bytes]:
        network, payloads = MemoryNetwork(0.01), published(honest(1))
        await network.transport(A).listen(WeightServer(payloads, at_once, asyncio.get_running_loop().time).answer)
        link = await network.transport(ME).open(A)
        await asked(link, ["piece", 0])
        payloads.publish(Snapshot(2, tuple(honest(2)), tuple(honest(2))))
        return await asked(link, ["sketch", 2, 7])

    assert virtual_time.run(main()) == [sketch(honest(2)[2], 7)]


@pytest.mark.parametrize(("pause_s", "is_answered"), [(0.9 * SHARED_S, True), (1.1 * SHARED_S, False)])
def test_nobody_is_given_weights_that_others_have_kept_for_long(pause_s: float, is_answered: bool):
    """Check that a new stream is refused while others hold an old snapshot; a promised one always gets the newest."""

    async def main() -> tuple[bool, list[bytes]]:
        network, payloads = MemoryNetwork(0.01), published(honest(0))
        copies = WeightServer(payloads, at_once, asyncio.get_running_loop().time)
        await network.transport(A).listen(copies.answer)
        for seed in range(2):
            payloads.publish(Snapshot(seed, tuple(honest(seed)), tuple(honest(seed))))
            link = await network.transport(PeerId(f"asker {seed}")).open(A)
            await asked(link, ["piece", 0])
        await asyncio.sleep(pause_s)
        payloads.publish(Snapshot(2, tuple(honest(2)), tuple(honest(2))))
        try:
            answered = await asked(await network.transport(ME).open(A), ["piece", 0]) == [as_bytes(honest(1))[0]]
        except NetworkError:
            answered = False
        await network.transport(B).listen(copies.give)
        return answered, await asked(await network.transport(ME).open(B), ["piece", 0])

    answered, accepted = virtual_time.run(main())
    assert (answered, accepted) == (is_answered, [as_bytes(honest(2))[0]])


def test_a_stream_ends_however_little_it_asks_for():
    async def main() -> float:
        network, loop = MemoryNetwork(0.01), asyncio.get_running_loop()
        await network.transport(A).listen(WeightServer(published(honest(1)), at_once, loop.time).answer)
        link = await network.transport(ME).open(A)
        with contextlib.suppress(NetworkError):
            while loop.time() < 2 * LONGEST_S:
                await asked(link, ["sketch", 0, 7])
                await asyncio.sleep(60.0)
        return loop.time()

    assert virtual_time.run(main()) == pytest.approx(LONGEST_S, abs=61.0)


@pytest.mark.parametrize("order", [1, -1], ids=["oldest first", "youngest first"])
def test_no_more_than_two_snapshots_are_kept_for_askers(order: int):
    async def main() -> tuple[list[list[bytes]], int, int]:
        network, payloads = MemoryNetwork(0.01), published(honest(0))
        copies = WeightServer(payloads, at_once, asyncio.get_running_loop().time)
        await network.transport(A).listen(copies.answer)
        answers, links = [], []
        for seed in range(4):
            payloads.publish(Snapshot(seed, tuple(honest(seed)), tuple(honest(seed))))
            links.append(await network.transport(PeerId(f"asker {seed}")).open(A))
            answers.append(await asked(links[-1], ["piece", 0]))
        kept = len(copies._pins)
        for link in links[::order]:
            await send_message(link, ["enough"])
        await asyncio.sleep(1.0)
        return answers, kept, len(copies._pins)

    answers, kept, left = virtual_time.run(main())
    assert answers == [[as_bytes(honest(seed))[0]] for seed in (0, 1, 1, 1)]
    assert (kept, left) == (2, 0)


def test_a_stream_that_stays_open_keeps_no_weights_beside_those_two():
    """Check that between two requests only pinned snapshots are held: each is as large as the model."""

    async def main() -> int:
        network, payloads = MemoryNetwork(0.01), published(honest(0))
        copies = WeightServer(payloads, at_once, asyncio.get_running_loop().time)
        await network.transport(A).listen(copies.answer)
        links = [await network.transport(PeerId(f"asker {number}")).open(A) for number in range(6)]
        old = []
        for round_ in range(2):
            for number, link in enumerate(links):
                seed = 10 * round_ + number
                weights = tuple(honest(seed))
                old.append(weakref.ref(weights[0]))
                payloads.publish(Snapshot(seed, weights, weights))
                del weights
                await asked(link, ["piece", round_] if number < 2 else ["sketch", 0, 7])
        payloads.publish(Snapshot(99, tuple(honest(99)), tuple(honest(99))))
        gc.collect()
        return sum(each() is not None for each in old)

    assert virtual_time.run(main()) == MAX_PINNED


def test_who_reads_slowly_is_not_waited_for_beyond_the_quarter_of_an_hour():
    class Slow:
        """Link that needs ten minutes for a frame."""

        peer = A

        async def receive(self):
            return FrameKind.MESSAGE, msgpack.packb(["piece", 0])

        async def send(self, kind, body):
            await asyncio.sleep(600.0)

    async def main() -> float:
        loop = asyncio.get_running_loop()
        copies = WeightServer(published(honest(1)), at_once, loop.time)
        with pytest.raises(NetworkError, match="took too long to read weights"):
            await copies.answer(Slow())
        assert not copies._pins
        return loop.time()

    assert virtual_time.run(main()) == pytest.approx(LONGEST_S)


def test_who_is_banned_gets_nothing_more_on_a_stream_that_is_open():
    async def main() -> bytes:
        network, banned = MemoryNetwork(0.01), set[PeerId]()
        copies = WeightServer(
            published(honest(1)), at_once, asyncio.get_running_loop().time, counts=lambda peer: peer not in banned
        )
        await network.transport(A).listen(copies.answer)
        link = await network.transport(ME).open(A)
        [before] = await asked(link, ["piece", 0])
        banned.add(ME)
        with pytest.raises(NetworkError):
            await asked(link, ["sketch", 0, 7])
        return before

    assert virtual_time.run(main()) == as_bytes(honest(1))[0]


def test_who_was_promised_the_weights_may_take_them_twice_and_no_more():
    rates = Throttles()

    async def main() -> tuple[int, list[tuple[PeerId, int]], str]:
        network, given, why = MemoryNetwork(0.01), [], ""
        loop = asyncio.get_running_loop()
        copies = WeightServer(published(honest(1)), at_once, loop.time, lambda *args: given.append(args), rates)
        taken = 0

        async def give(link: Link) -> None:
            nonlocal taken, why
            try:
                taken = await copies.give(link)
            except NetworkError as error:
                why = str(error)

        await network.transport(A).listen(give)
        link = await network.transport(ME).open(A)
        await asked(link, ["piece", 0], ["piece", 3])
        await send_message(link, ["enough"])
        await asyncio.sleep(1.0)
        greedy = await network.transport(ME).open(A)
        with pytest.raises(NetworkError):
            await asked(greedy, *[["piece", 0]] * (2 * F + 1))
        return taken, given, why

    taken, given, why = virtual_time.run(main())
    assert taken == 2 * 4 * N
    assert given == [(ME, 2 * 4 * N), (ME, 2 * F * 4 * N)]
    assert rates.given_bytes == (2 + 2 * F) * 4 * N  # counted as they went: the link is for exchanges otherwise
    assert "sent too many weight requests" in why


@pytest.mark.parametrize(
    ("rests", "question", "is_answered"),
    [(False, ["piece", 0], False), (False, ["sketch", 0, 7], True), (True, ["sketch", 0, 7], False)],
)
def test_once_nothing_is_given_an_open_stream_compares_and_gives_no_pieces(rests, question, is_answered):
    async def main() -> bool:
        network, rates = MemoryNetwork(0.01), Throttles()
        copies = WeightServer(published(honest(1)), at_once, asyncio.get_running_loop().time, rates=rates)

        async def answer(link: Link) -> None:
            with contextlib.suppress(NetworkError):
                await copies.answer(link)
            await link.close()

        await network.transport(A).listen(answer)
        link = await network.transport(ME).open(A)
        await asked(link, ["piece", 0])
        rates.gives, rates.rests = False, rests
        await send_message(link, question)
        try:
            await link.receive()
        except NetworkError:
            return False
        return True

    assert virtual_time.run(main()) is is_answered


def test_small_models_are_rationed_by_their_bytes():
    """Check restarts with a tiny model: an owner who tries settings takes its weights each time."""

    async def main() -> int:
        network, loop = MemoryNetwork(0.01), asyncio.get_running_loop()
        await network.transport(A).listen(WeightServer(published(honest(1)), at_once, loop.time).answer)
        link, answers = await network.transport(ME).open(A), 0
        for _ in range(10 * int(EACH.burst) * F):
            await link.send(FrameKind.MESSAGE, msgpack.packb(["sketch", 0, 7]))
            await receive_payload(link, [SKETCH_BYTES])
            answers += 1
        return answers

    assert virtual_time.run(main()) == 10 * int(EACH.burst) * F


def test_questions_that_are_none_are_offences_and_floods_are_rationed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copies_module, "MIN_MODEL", 0.0)  # as if these were as large as real models

    async def main() -> tuple[int, int]:
        network, loop = MemoryNetwork(0.01), asyncio.get_running_loop()
        copies, offences, rationed = WeightServer(published(honest(1)), at_once, loop.time), 0, 0

        async def answer(link: Link) -> None:
            nonlocal offences, rationed
            try:
                await copies.answer(link)
            except RemoteError:
                offences += 1
            except NetworkError as error:
                rationed += "sent too many weight requests" in str(error)

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
        for _ in range(int(EACH.burst) * F + 50):
            await ask(msgpack.packb(["sketch", 0, 7]))
        return offences, rationed

    offences, rationed = virtual_time.run(main())
    assert offences == 8
    assert 45 <= rationed <= 50
