"""Weight downloads from several donors: a piece is accepted if another donor's copy is near; in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch
import virtual_time
from donors import COMMON, F, N, Weights, honest, published
from memory_network import MemoryNetwork

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.framing import FrameKind
from p2ptrain.host.sketch import sketch
from p2ptrain.net.driver import at_once
from p2ptrain.net.payload import send_payload
from p2ptrain.net.rpc import receive_message
from p2ptrain.net.weight_download import KEEP_S, REST_S, Downloader, _DonorChannel
from p2ptrain.net.weight_server import WeightServer
from p2ptrain.ports import Link
from p2ptrain.swarm.download_plan import PIECE_BYTES

ME, GIVER, A, B, C = (PeerId(name) for name in ("me", "giver", "a", "b", "c"))


def negated() -> Weights:
    return [-part for part in COMMON]


def as_bytes(weights: Weights) -> list[bytearray]:
    return [bytearray(part.numpy().tobytes()) for part in weights]


Serve = Callable[[Link], Awaitable[None]]
Donor = Weights | Serve | None
"""A donor's weights, its handler, or None if it cannot be dialed."""


async def silence(link: Link) -> None:
    await asyncio.sleep(1e6)


def copies_of(weights: Weights) -> WeightServer:
    return WeightServer(published(weights), at_once, asyncio.get_running_loop().time)


def breaking(weights: Weights, after: int) -> Serve:
    """Return a donor that answers so many requests for pieces, and then vanishes."""

    async def serve(link: Link) -> None:
        for _ in range(after):
            _, number = await receive_message(link, "copies", 64)
            await send_payload(link, [as_bytes(weights)[number]])

    return serve


@dataclass
class Network:
    """A donor that promised its weights, others, and the bytes that each gave."""

    giver: Donor
    others: Mapping[PeerId, Donor]
    bandwidth: float | None = None
    given: dict[PeerId, int] = field(default_factory=dict)
    ended_well: bool = False

    async def open(self) -> tuple[MemoryNetwork, Link]:
        network = MemoryNetwork(0.05, bandwidth=self.bandwidth)
        for peer, what in self.others.items():
            if isinstance(what, list):
                await network.transport(peer).listen(copies_of(what).answer)
            elif what is not None:
                await network.transport(peer).listen(what)
        promises = MemoryNetwork(0.05, bandwidth=self.bandwidth)
        if isinstance(self.giver, list):
            copies = copies_of(self.giver)

            async def give(link: Link) -> None:
                await copies.give(link)
                self.ended_well = True

            await promises.transport(GIVER).listen(give)
            await network.transport(GIVER).listen(copies.answer)
        elif self.giver is not None:
            await promises.transport(GIVER).listen(self.giver)
        return network, await promises.transport(ME).open(GIVER)

    def taken(self, peer: PeerId, size: int) -> None:
        self.given[peer] = self.given.get(peer, 0) + size


def downloaded(
    giver: Donor, others: Mapping[PeerId, Donor], notebook: MemoryLog, sizes: list[int] | None = None
) -> tuple[list[bytearray], float, Network]:
    """Return the weights of a pull, its seconds, and the network."""
    around = Network(giver, others)

    async def main() -> tuple[list[bytearray], float]:
        network, accepted = await around.open()
        downloader = Downloader(
            network.transport(ME).open,
            sizes or [4 * N] * F,
            at_once,
            notebook,
            around.taken,
        )
        whole = await downloader.download(accepted, dict.fromkeys([GIVER, *others], ()))
        seconds = asyncio.get_running_loop().time()
        await asyncio.sleep(1.0)  # until the end is received
        return whole, seconds

    return *virtual_time.run(main()), around


@pytest.fixture
def notebook() -> MemoryLog:
    return MemoryLog()


def places(whole: list[bytearray], weights: Mapping[PeerId, Weights]) -> list[PeerId]:
    """Return the donor of each fragment, compared bitwise."""
    return [next(peer for peer, each in weights.items() if as_bytes(each)[place] == whole[place]) for place in range(F)]


def test_three_donors_give_at_once_and_all_of_it_is_confirmed(notebook):
    donors = {GIVER: honest(0), A: honest(1), B: honest(2)}
    whole, seconds, network = downloaded(donors[GIVER], {A: donors[A], B: donors[B]}, notebook)
    assert set(places(whole, donors)) == set(donors)
    assert sum(network.given.values()) == 4 * N * F
    assert network.given.keys() == donors.keys()
    assert network.ended_well
    told = {"donors": 3, "pieces": F, "broke_off": 0, "asked_again": 0, "size_bytes": 4 * N * F, "seconds": seconds}
    assert list(notebook.notes) == [("took weights", told)]
    assert seconds < 3.0


def test_the_only_other_peer_there_is_is_believed_and_that_is_told(notebook):
    whole, _, network = downloaded(honest(0), {}, notebook)
    assert whole == as_bytes(honest(0))
    assert network.ended_well
    assert notebook.kinds() == ["unconfirmed", "took weights"]


def test_a_fragment_longer_than_a_piece_comes_from_several(notebook):
    size = PIECE_BYTES // 4 + 1000
    one = [torch.randn(size, generator=torch.Generator().manual_seed(5))]
    others = [one[0] + 0.01]
    whole, _, network = downloaded(one, {A: others}, notebook, [4 * size])
    assert sorted(network.given.values()) == [4000, PIECE_BYTES]
    mine = torch.frombuffer(whole[0], dtype=torch.float32)
    for part in (slice(0, PIECE_BYTES // 4), slice(PIECE_BYTES // 4, size)):
        assert any(torch.equal(mine[part], each[0][part]) for each in (one, others))


def test_a_giver_that_two_others_contradict_broke_the_protocol(notebook):
    with pytest.raises(RemoteError, match="differ too much from those of others"):
        downloaded(negated(), {A: honest(1), B: honest(2)}, notebook)


def test_a_giver_whose_weights_are_no_numbers_broke_it_too(notebook):
    with pytest.raises(RemoteError, match=r"differ too much from those of others|sketch of its weights is not finite"):
        downloaded([torch.full((N,), float("nan"))] * F, {A: honest(1), B: honest(2)}, notebook)


@pytest.mark.parametrize("liar", [A, B])
def test_one_of_three_that_lies_gives_nothing_that_stays(liar, notebook):
    donors = {GIVER: honest(0), A: honest(1), B: honest(2)}
    others = {peer: negated() if peer == liar else donors[peer] for peer in (A, B)}
    whole, _, _ = downloaded(donors[GIVER], others, notebook)
    assert liar not in places(whole, donors)


def test_of_two_words_neither_is_believed_and_nobody_is_blamed(notebook):
    with pytest.raises(NetworkError, match="differ too much"):
        downloaded(honest(0), {A: negated()}, notebook)


@pytest.mark.parametrize(("after", "lost"), [(1, 1), (3, 0)])  # no donor of three is asked for four pieces
def test_a_giver_that_breaks_off_costs_its_unfinished_piece_alone(after, lost, notebook):
    donors = {GIVER: honest(0), A: honest(1), B: honest(2), C: honest(3)}
    others = {peer: donors[peer] for peer in (A, B, C)}
    whole, _, network = downloaded(breaking(donors[GIVER], after), others, notebook)
    assert GIVER in places(whole, donors)
    assert sum(network.given.values()) == 4 * N * F
    [(_, told)] = notebook.notes
    assert (told["broke_off"], told["asked_again"]) == (lost, lost)


def test_a_giver_that_breaks_off_and_leaves_nobody_else_gave_nothing(notebook):
    with pytest.raises(NetworkError, match="stopped sending, and no other peer"):
        downloaded(breaking(honest(0), 2), {A: None}, notebook)


def test_a_giver_that_answers_with_nonsense_broke_the_protocol(notebook):
    async def nonsense(link: Link) -> None:
        await link.receive()
        await link.send(FrameKind.MESSAGE, b"a payload")

    with pytest.raises(RemoteError, match="a chunk of"):
        downloaded(nonsense, {A: honest(1), B: honest(2)}, notebook)


def test_another_that_answers_with_nonsense_is_left_out(notebook):
    async def nonsense(link: Link) -> None:
        await link.receive()
        await link.send(FrameKind.MESSAGE, b"a payload")

    donors = {GIVER: honest(0), B: honest(2)}
    whole, _, _ = downloaded(donors[GIVER], {A: nonsense, B: donors[B]}, notebook)
    assert set(places(whole, donors)) <= set(donors)


def test_where_nobody_else_can_be_asked_it_is_said_and_the_weights_are_taken(notebook):
    whole, _, _ = downloaded(honest(0), {A: None, B: None}, notebook)
    assert whole == as_bytes(honest(0))
    assert notebook.kinds() == ["unconfirmed", "took weights"]


def test_who_takes_the_question_and_says_nothing_is_waited_for_no_longer_than_its_deadline(notebook):
    donors = {GIVER: honest(0), B: honest(2)}
    whole, seconds, _ = downloaded(donors[GIVER], {A: silence, B: donors[B], C: silence}, notebook)
    assert set(places(whole, donors)) <= set(donors)
    assert seconds <= 130.0


def test_what_a_failed_pull_had_fetched_is_not_asked_for_again(notebook):
    given = honest(0)
    asked: list[int] = []

    async def counting(link: Link) -> None:
        with contextlib.suppress(NetworkError):
            while (question := await receive_message(link, "copies", 64))[0] != "enough":
                asked.append(question[1])
                await send_payload(link, [as_bytes(given)[question[1]]])

    async def main() -> list[bytearray]:
        promises, network = MemoryNetwork(0.05), MemoryNetwork(0.05)
        await promises.transport(A).listen(breaking(given, 3))
        await promises.transport(B).listen(counting)
        await network.transport(B).listen(copies_of(honest(1)).answer)
        downloader = Downloader(network.transport(ME).open, [4 * N] * F, at_once, notebook)
        with pytest.raises(NetworkError, match="stopped sending"):
            await downloader.download(await promises.transport(ME).open(A), {})
        await asyncio.sleep(pause_s)
        return await downloader.download(await promises.transport(ME).open(B), {})

    pause_s = 10.0
    assert virtual_time.run(main()) == as_bytes(given)
    assert asked == [3]
    asked.clear()
    pause_s = KEEP_S
    assert virtual_time.run(main()) == as_bytes(given)
    assert asked == [0, 1, 2, 3]


def test_what_honest_donors_gave_while_the_one_that_promised_lied_is_not_asked_for_again(notebook):
    donors = {A: honest(1), B: honest(2), C: honest(3)}
    around = Network(negated(), donors)

    async def main() -> tuple[int, list[bytearray]]:
        network, accepted = await around.open()
        downloader = Downloader(
            network.transport(ME).open,
            [4 * N] * F,
            at_once,
            notebook,
            around.taken,
        )
        others = dict.fromkeys(donors, ())
        with pytest.raises(RemoteError, match="differ too much from those of others"):
            await downloader.download(accepted, others)
        before = sum(size for peer, size in around.given.items() if peer != GIVER)
        again = MemoryNetwork(0.05)
        await again.transport(A).listen(copies_of(donors[A]).give)
        whole = await downloader.download(await again.transport(ME).open(A), others)
        return before, whole

    before, whole = virtual_time.run(main())
    assert set(places(whole, donors)) <= set(donors)
    assert before > 0
    assert sum(size for peer, size in around.given.items() if peer != GIVER) == 4 * N * F


def test_a_pull_that_is_broken_off_keeps_what_it_had_for_a_while_and_leaves_no_task(notebook):
    async def main() -> tuple[int, set[asyncio.Task[None]], object]:
        promises = MemoryNetwork(0.05)

        async def dripping(link: Link) -> None:
            await breaking(honest(0), 2)(link)
            await silence(link)

        await promises.transport(A).listen(dripping)
        downloader = Downloader(None, [4 * N] * F, at_once, notebook)
        link = await promises.transport(ME).open(A)
        pulling = asyncio.create_task(downloader.download(link, {}))
        await asyncio.sleep(5.0)
        pulling.cancel()
        await asyncio.wait([pulling])
        assert pulling.cancelled()
        kept, left = len(downloader._kept.givers), asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.sleep(KEEP_S)
        return kept, left, downloader._kept

    kept, left, later = virtual_time.run(main())
    assert kept == 2
    assert later is None  # the memory of a model, for a pull that never came
    assert len(left) <= 1  # the donor of this test, which keeps no reference


def test_a_stream_on_which_nothing_is_asked_is_ended_and_opened_again(notebook):
    """Check idle streams, which the donor would close: two donors need 12 s per piece, and comparing is quick."""
    comparing: list[list[float]] = []

    def donor(seed: int) -> Serve:
        async def serve(link: Link) -> None:
            times = list[float]()
            while (question := await receive_message(link, "copies", 64)) != ["enough"]:
                piece = honest(seed)[question[1]]
                if question[0] == "piece":
                    await asyncio.sleep(12.0)
                    await send_payload(link, [piece.numpy().tobytes()])
                else:
                    times.append(asyncio.get_running_loop().time())
                    await send_payload(link, [sketch(piece, question[2])])
            if times:
                comparing.append([*times, asyncio.get_running_loop().time()])

        return serve

    async def main() -> list[bytearray]:
        promises, network = MemoryNetwork(0.05), MemoryNetwork(0.05)
        await promises.transport(GIVER).listen(donor(0))
        await network.transport(GIVER).listen(donor(0))
        await network.transport(A).listen(donor(1))
        downloader = Downloader(network.transport(ME).open, [4 * N] * F, at_once, notebook)
        whole = await downloader.download(await promises.transport(ME).open(GIVER), {GIVER: (), A: ()})
        await asyncio.sleep(1.0)
        return whole

    assert set(places(virtual_time.run(main()), {GIVER: honest(0), A: honest(1)})) == {GIVER, A}
    assert notebook.kinds() == ["took weights"]
    assert len(comparing) == 4  # one stream to each after the first pieces, and another after the second
    early = [times for times in comparing if times[0] < 20.0]
    assert len(early) == 2
    for *_, asked, ended in early:
        assert REST_S <= ended - asked <= REST_S + 1.0


def test_a_promise_is_kept_though_another_was_faster_and_its_giver_is_compared(notebook):
    """Check the giver that is asked for a piece on one stream, and on another for a sketch of the same piece."""
    heard: list[object] = []

    async def accepted(link: Link) -> None:
        try:
            while (question := await receive_message(link, "copies", 64)) != ["enough"]:
                await asyncio.sleep(6.0)
                await send_payload(link, [honest(0)[question[1]].numpy().tobytes()])
            heard.append("enough")
        except NetworkError:
            heard.append("broken off")

    def copies(seed: int) -> Serve:
        async def serve(link: Link) -> None:
            while (question := await receive_message(link, "copies", 64)) != ["enough"]:
                piece = honest(seed)[question[1]]
                if question[0] == "piece":
                    await send_payload(link, [piece.numpy().tobytes()])
                else:
                    await asyncio.sleep(8.0)
                    await send_payload(link, [sketch(piece, question[2])])

        return serve

    async def main() -> list[bytearray]:
        promises, network = MemoryNetwork(0.05), MemoryNetwork(0.05)
        await promises.transport(GIVER).listen(accepted)
        await network.transport(GIVER).listen(copies(0))
        await network.transport(A).listen(copies(1))
        downloader = Downloader(network.transport(ME).open, [4 * N] * F, at_once, notebook)
        whole = await downloader.download(await promises.transport(ME).open(GIVER), {GIVER: (), A: ()})
        await asyncio.sleep(10.0)
        return whole

    assert A in places(virtual_time.run(main()), {GIVER: honest(0), A: honest(1)})
    assert heard == ["enough"]


def test_a_farewell_that_is_cut_short_ends_the_stream_all_the_same():
    class Stuck:
        """Link on which sending never ends."""

        peer, closed = GIVER, False

        async def send(self, kind, body):
            await asyncio.sleep(1e6)

        async def close(self):
            self.closed = True

    async def main() -> bool:
        stuck = Stuck()
        line = _DonorChannel(lambda: None, stuck)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await line.end()
        return stuck.closed

    assert virtual_time.run(main())
