"""Collection of receipts beside exchanges: over links in memory, in virtual time; and the ledger on disk."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
import virtual_time
from memory_network import MemoryNetwork
from people import GUEST, ISSUER, NOW, RUN, STRANGER, Somebody, somebody

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import LinkId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.cli import run_command
from p2ptrain.framing import FrameKind
from p2ptrain.manifest import SignedManifest, create_run, sign_run
from p2ptrain.ports import Link
from p2ptrain.receipts import PERIOD_S, Receipt, Total, total
from p2ptrain.statements import packed
from p2ptrain.swarm.events import Commit
from peer import ledger as ledger_module
from peer.cli import contributions
from peer.contributions import Contributions
from peer.home import Home
from peer.ledger import Ledger, table

AMBER, BIRCH = GUEST, ISSUER
LATER = NOW + 10_000
PAST = 1_700_000_000
"""A time before that of the system's clock."""


class Side:
    """One of two peers that exchange."""

    def __init__(self, network: MemoryNetwork, who: Somebody, folder: Path) -> None:
        loop = asyncio.get_running_loop()
        self.who = who
        self.log = MemoryLog()
        self.ledger = Ledger(folder / f"{who.peer}.jsonl")
        self.transport = network.transport(who.peer)
        self.contributions = Contributions(
            RUN,
            who.peer,
            who.state,
            self.ledger,
            lambda: (3, 300),
            self.log,
            wall=lambda: NOW + loop.time(),
            random=Random(who.peer),
        )

    def exchanged(self, partner: Somebody, sent: int, received: int) -> None:
        link = LinkId(partner.peer, 1, outbound=True)
        self.contributions.exchanged(Commit(link, 0.0, 0.5, inf, False, sent, received))

    @property
    def receipts(self) -> list[Receipt | None]:
        return list(self.ledger.read())


def play(scene: Any, folder: Path) -> Any:
    async def main() -> Any:
        network = MemoryNetwork(latency=0.01)
        sides = Side(network, AMBER, folder), Side(network, BIRCH, folder)
        for side in sides:
            await side.transport.listen(side.contributions.answer)
        return await scene(*sides)

    return virtual_time.run(main())


def test_what_passed_is_signed_within_a_minute(tmp_path: Path) -> None:
    async def scene(amber: Side, birch: Side) -> tuple[Side, Side]:
        async with (
            amber.contributions.gathering(lambda: amber.transport),
            birch.contributions.gathering(lambda: birch.transport),
        ):
            for _ in range(10):
                amber.exchanged(BIRCH, 100, 200)
                birch.exchanged(AMBER, 200, 100)
            amber.contributions.given(BIRCH.peer, 5000)
            for piece in (3000, 2000):
                birch.contributions.taken(AMBER.peer, piece)
            await asyncio.sleep(2 * PERIOD_S)
        return amber, birch

    amber, birch = play(scene, tmp_path)
    assert len(amber.receipts) == len(birch.receipts) == 1  # ten exchanges, one conversation
    mine = total(filter(None, amber.receipts), RUN, AMBER.peer, LATER)
    assert (mine.exchanges, mine.sent, mine.received, mine.served, mine.tokens) == (10, 1000, 2000, 5000, 300)
    theirs = total(filter(None, birch.receipts), RUN, BIRCH.peer, LATER)
    assert (theirs.exchanges, theirs.sent, theirs.received, theirs.served) == (10, 2000, 1000, 0)
    assert amber.contributions.newest is not None
    assert Receipt.decode(amber.contributions.newest.encode()) == amber.receipts[-1]
    assert [each.tokens for each in birch.contributions.of_partners] == [300]


def test_who_leaves_asks_once_more(tmp_path: Path) -> None:
    async def scene(amber: Side, birch: Side) -> Side:
        async with amber.contributions.gathering(lambda: amber.transport):
            amber.exchanged(BIRCH, 1, 2)
            birch.exchanged(AMBER, 2, 1)
            amber.exchanged(STRANGER, 1, 2)  # not reachable any more
        return amber

    assert len(play(scene, tmp_path).receipts) == 1


@pytest.mark.parametrize("is_leaving", [False, True])
def test_a_failed_request_is_repeated(tmp_path: Path, is_leaving: bool) -> None:
    """Check a partner that cannot answer for a while, and one of whose exchanges nothing follows."""

    async def scene(amber: Side, birch: Side) -> Side:
        refusals = 0

        async def late(link: Link) -> None:
            nonlocal refusals
            refusals += 1
            if refusals <= 2:
                await link.close()
            else:
                await birch.contributions.answer(link)

        await birch.transport.listen(late)
        async with amber.contributions.gathering(lambda: amber.transport):
            amber.exchanged(BIRCH, 1, 2)
            birch.exchanged(AMBER, 2, 1)
            if not is_leaving:
                await asyncio.sleep(8 * PERIOD_S)
                assert len(amber.receipts) == 1
        return amber

    assert len(play(scene, tmp_path).receipts) == 1


class Swarm:
    """Peers that exchange at random, some of them on one side only, and what each of them has signed."""

    def __init__(self, network: MemoryNetwork, folder: Path) -> None:
        self.random = Random(9)
        self.sides = [Side(network, somebody(30 + number), folder) for number in range(6)]
        self.dead: set[Side] = set()
        self.gone: set[Side] = set()
        self.busy = Counter[Side]()
        self.made: dict[Side, list[float]] = {side: [] for side in self.sides}
        """Times of each side's exchanges with partners that live on."""

    async def listen(self) -> None:
        async def never(link: Link) -> None:
            await asyncio.sleep(1e6)

        for side in self.sides:
            await side.transport.listen(never if side in self.dead else side.contributions.answer)

    async def train(self, side: Side, seconds: float) -> None:
        """Exchange for so long, then leave as a peer does at the run's end, a moment before or after others."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds + self.random.uniform(0.0, 1.0)
        async with side.contributions.gathering(lambda: side.transport):
            while True:
                await asyncio.sleep(self.random.expovariate(0.5))
                others = [each for each in self.sides if each is not side and each not in self.gone]
                if loop.time() >= until or not others:
                    break
                await self.exchange(side, self.random.choice(others))
            self.gone.add(side)
            while self.busy[side]:  # a peer that leaves completes its exchanges
                await asyncio.sleep(0.05)
        await side.transport.close()

    async def exchange(self, side: Side, partner: Side) -> None:
        side.exchanged(partner.who, 10, 20)
        if partner in self.dead:
            return
        self.made[side].append(asyncio.get_running_loop().time())
        if self.random.random() > 0.01:  # else the partner fails just before its commit
            self.busy[partner] += 1
            await asyncio.sleep(self.random.uniform(0.0, 0.3))
            self.made[partner].append(asyncio.get_running_loop().time())
            partner.exchanged(side.who, 20, 10)
            self.busy[partner] -= 1

    def signed(self, side: Side) -> int:
        dead = {each.who.peer for each in self.dead}
        return sum(each.exchanges for each in side.receipts if each and each.partner not in dead)


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("seconds", [60.0, 300.0])
def test_partners_that_live_on_sign_what_was_exchanged(tmp_path: Path, killed: int, seconds: float) -> None:
    """Check a run's end, at which peers leave within a second, and that meanwhile what is a minute old is signed.

    Some exchanges complete on one side only, and a partner may be dead.
    """

    async def main() -> None:
        swarm = Swarm(MemoryNetwork(latency=0.05), tmp_path)
        swarm.dead = set(swarm.sides[:killed])
        await swarm.listen()
        alive = swarm.sides[killed:]
        training = [asyncio.create_task(swarm.train(side, seconds)) for side in alive]
        clock = asyncio.get_running_loop().time
        while clock() < seconds - 10.0:
            await asyncio.sleep(10.0)
            for side in alive:
                due = sum(at < clock() - 60.0 for at in swarm.made[side])
                assert swarm.signed(side) >= 0.95 * due
        await asyncio.gather(*training)
        for side in alive:
            assert len(swarm.made[side]) > seconds / 4
            assert swarm.signed(side) >= 0.95 * len(swarm.made[side])
            proved = total(filter(None, side.receipts), RUN, side.who.peer, LATER)
            assert not proved.faulty

    virtual_time.run(main())


def test_a_partner_that_is_silent_costs_nothing_but_receipts(tmp_path: Path) -> None:
    async def scene(amber: Side, birch: Side) -> Side:
        async def silent(link: Link) -> None:
            await asyncio.sleep(1e6)

        await birch.transport.listen(silent)
        async with amber.contributions.gathering(lambda: amber.transport):
            amber.exchanged(BIRCH, 1, 2)
            await asyncio.sleep(20 * PERIOD_S)
            began = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - began < 3.0
        return amber

    amber = play(scene, tmp_path)
    assert amber.receipts == []
    assert "failed" not in amber.log.kinds()


def false_receipts() -> list[list[Any]]:
    good = Receipt(AMBER.peer, BIRCH.peer, NOW, NOW + 1, 3, 300, 1, 1, 2, 0)
    forged = [good.signed(RUN, AMBER.state)]
    lies = [
        replace(good, tokens=301),
        replace(good, exchanges=99),
        replace(good, sent=2**53),
        replace(good, until=2**53),
        replace(good, until=0),
    ]
    forged += [each.signed(RUN, BIRCH.state) for each in lies]
    answers = [["receipt", each.encode(), 3, 300] for each in forged]
    return [*answers, ["receipt", b"x", 3, 300], ["receipt", good.signed(RUN, BIRCH.state).encode()], ["no"], []]


@pytest.mark.parametrize("answer", false_receipts())
def test_a_lying_partner_costs_nothing_but_receipts(tmp_path: Path, answer: list[Any]) -> None:
    async def scene(amber: Side, birch: Side) -> Side:
        async def lie(link: Link) -> None:
            await link.receive()
            await link.send(FrameKind.MESSAGE, packed(answer))

        await birch.transport.listen(lie)
        async with amber.contributions.gathering(lambda: amber.transport):
            for _ in range(5):
                amber.exchanged(BIRCH, 1, 2)
                await asyncio.sleep(PERIOD_S)
        return amber

    assert play(scene, tmp_path).receipts == []


def test_what_never_was_is_not_signed_and_too_many_requests_are_refused(tmp_path: Path) -> None:
    async def scene(amber: Side, birch: Side) -> Side:
        for _ in range(12):
            await amber.contributions.ask(amber.transport, BIRCH.peer)
        with pytest.raises(NetworkError):
            await amber.contributions.ask(amber.transport, BIRCH.peer)
        return amber

    assert play(scene, tmp_path).receipts == []


def test_a_full_disk_is_told_once(tmp_path: Path) -> None:
    async def scene(amber: Side, birch: Side) -> Side:
        amber.ledger.path.mkdir()
        async with amber.contributions.gathering(lambda: amber.transport):
            for _ in range(4):
                amber.exchanged(BIRCH, 1, 2)
                birch.exchanged(AMBER, 2, 1)
                await asyncio.sleep(2 * PERIOD_S)
        return amber

    assert play(scene, tmp_path).log.kinds().count("not saved") == 1


@pytest.mark.parametrize(
    ("receipts", "said"), [(1, "1 receipt, signed by 1 partner, from"), (7, "7 receipts, signed by 1 partner, from")]
)
def test_what_is_told_of_one_is_of_one(receipts: int, said: str) -> None:
    result = Total(receipts=receipts, exchanges=1, partners={BIRCH.peer: 1})
    assert table(result)[0].startswith(said)
    assert f"  {BIRCH.peer}: 1 exchange" in table(result)


def test_the_newest_receipt_is_that_of_this_identity(tmp_path: Path) -> None:
    """Check no file, a torn line, and receipts of an earlier identity, which a new one does not show."""

    async def scene(amber: Side, birch: Side) -> Receipt:
        assert amber.contributions.newest is None
        for _ in range(2):
            amber.exchanged(BIRCH, 100, 200)
            birch.exchanged(AMBER, 200, 100)
            await asyncio.sleep(2.0)
            await amber.contributions.ask(amber.transport, BIRCH.peer)
        with amber.ledger.path.open("a") as file:
            file.write('{"torn')
        found = amber.contributions.newest
        assert found is not None
        network = MemoryNetwork()
        birch.ledger.path.write_bytes(amber.ledger.path.read_bytes())
        assert Side(network, AMBER, tmp_path).contributions.newest == found
        assert Side(network, BIRCH, tmp_path).contributions.newest is None
        return found

    assert play(scene, tmp_path).exchanges == 2


def kept_by(partner: Somebody, since: int, exchanges: int) -> Receipt:
    receipt = Receipt(AMBER.peer, partner.peer, since, since + exchanges, 1, 1, exchanges, 1, 2, 0)
    return receipt.signed(RUN, partner.state)


def test_the_ledger_keeps_the_newest_receipt_of_each_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "SMALL_BYTES", 2000)
    ledger = Ledger(tmp_path / "contributions.jsonl", 2000)
    for exchanges in range(1, 51):
        for partner in (BIRCH, STRANGER):
            ledger.add(kept_by(partner, NOW, exchanges))
    assert [each.name for each in tmp_path.iterdir()] == [ledger.path.name]
    assert ledger.path.stat().st_size < 3000
    assert total(filter(None, ledger.read()), RUN, AMBER.peer, LATER).exchanges == 100


def test_a_partner_with_many_accounts_crowds_out_its_own_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_ACCOUNTS", 8)
    ledger = Ledger(tmp_path / "contributions.jsonl", 4000)
    ledger.add(kept_by(BIRCH, NOW, 7))
    for number in range(1, 100):
        ledger.add(kept_by(STRANGER, NOW + number, 1))
    ledger.rewrite()
    proved = total(filter(None, ledger.read()), RUN, AMBER.peer, LATER)
    assert proved.partners == {BIRCH.peer: 7, STRANGER.peer: 7}
    assert proved.last == NOW + 100


def test_a_rewritten_ledger_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "contributions.jsonl", 2000)

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("p2ptrain.base.files.replace", full)
    failed = 0
    for exchanges in range(1, 11):
        try:
            ledger.add(kept_by(BIRCH, NOW, exchanges))
        except OSError:
            failed += 1
    assert failed
    assert total(filter(None, ledger.read()), RUN, AMBER.peer, LATER).exchanges == 10


# --- the command ------------------------------------------------------------------------------------------------------


def show(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        run_command(contributions, [str(each) for each in arguments], name="p2ptrain contributions")
    said = capfd.readouterr()
    return int(caught.value.code or 0), said.out + said.err


def home_of(tmp_path: Path) -> tuple[Home, SignedManifest]:
    create_run(tmp_path / "run", "demo")
    signed = sign_run(tmp_path / "run").signed
    home = Home(tmp_path / "home")
    home.path.mkdir()
    home.save_manifest(signed)
    return home, signed


def test_the_command_counts_what_holds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    home, signed = home_of(tmp_path)
    good = Receipt(AMBER.peer, BIRCH.peer, PAST, PAST + 5, 9, 12_345, 7, 1000, 2000, 0)
    good = good.signed(signed.run_id, BIRCH.state)
    Ledger(home.contributions).add(good)
    blown_up = json.loads(home.contributions.read_text()) | {"sent": 10**12, "since": PAST + 6, "until": PAST + 7}
    with home.contributions.open("a") as file:
        file.write(json.dumps(blown_up) + "\nnot json\n" + "x" * 10_000 + "\n")
    code, said = show(capfd, home.path)
    assert code == 0, said
    assert "1 receipt, signed by 1 partner, from" in said
    assert "exchanges: 7" in said
    assert "tokens: 12,345" in said
    assert "NOT counted, 1 receipt: the partner's signature is invalid" in said
    assert "it is not a receipt" in said
    code, said = show(capfd, home.path, "--json")
    assert json.loads(said)["partners"] == {BIRCH.peer: 7}


def test_a_torn_receipt_takes_no_other_with_it(tmp_path: Path) -> None:
    """Check a truncated receipt, as a full disk or a power cut leaves it."""
    ledger = Ledger(tmp_path / "contributions.jsonl")
    receipt = Receipt(AMBER.peer, BIRCH.peer, NOW, NOW + 5, 9, 12_345, 7, 1000, 2000, 0)
    signed = receipt.signed(RUN, BIRCH.state)
    ledger.add(signed)
    with ledger.path.open("a") as file:
        file.write(ledger.path.read_text()[:40])
    ledger.add(signed)
    ledger.add(signed)
    assert list(ledger.read()) == [signed, None, signed, signed]


def test_the_command_says_what_is_missing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, said = show(capfd, tmp_path)
    assert (code, "There is no peer in" in said) == (2, True)
    home, _ = home_of(tmp_path)
    code, said = show(capfd, home.path)
    assert (code, "There is no receipt in" in said) == (2, True)
    home.contributions.write_bytes(b"\xff\xfe{}\n[1, 2]\n")
    code, said = show(capfd, home.path)
    assert (code, "No line of" in said) == (2, True)
