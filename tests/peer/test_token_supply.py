"""Supply of a peer's text in virtual time, over the network in memory: sources that fail or lie, and the disk."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import virtual_time
from memory_network import MemoryNetwork

from p2ptrain.base import files
from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.net.rpc import receive_message, send_message
from p2ptrain.net.shard_mirror import Mirror
from p2ptrain.net.shard_service import PIECE_BYTES, ShardServer
from p2ptrain.net.throttle import Throttles
from p2ptrain.ports import Link
from p2ptrain.tokens import index as sizes
from p2ptrain.tokens.fetch_plan import TRUSTED_FALSE_S
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.walk import Walk
from p2ptrain.tokens.writing import ShardWriter
from peer.shard_sources import ShardSources, Source
from peer.token_supply import FULL_S, LOOK_S, QUIET_S, TokenSupply

BOOT, OTHER, LIAR, ME = PeerId("boot"), PeerId("other"), PeerId("liar"), PeerId("me")
Handler = Callable[[Link], Awaitable[None]]
SHARD_BYTES = 64 << 10
T, SHARDS, PER_STEP = 31, 40, 8


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("index", "writing"):
        monkeypatch.setattr(f"p2ptrain.tokens.{module}.SHARD_BYTES", SHARD_BYTES)
    assert sizes.SHARD_BYTES == SHARD_BYTES


@dataclass
class Bench:
    """A run of some shards, the author's store, and a peer with its own."""

    place: Path
    network: MemoryNetwork = field(default_factory=lambda: MemoryNetwork(latency=0.01, bandwidth=1e6))
    hosts: list[PeerId] = field(default_factory=list)
    mirrors: list[Mirror] = field(default_factory=list)
    most_bytes: float = float("inf")
    log: MemoryLog = field(default_factory=MemoryLog)
    rates: Throttles = field(default_factory=Throttles)
    supplied: int = 0

    def __post_init__(self) -> None:
        self.authors, self.store = ShardStore(self.place / "author"), ShardStore(self.place / "me")
        writer = ShardWriter(self.authors, 2)
        ids = np.random.default_rng(0).integers(0, 999, SHARDS * SHARD_BYTES // 2 - 100)
        writer.add(ids, is_training=True)
        writer.add(ids[::-1][:5000], is_training=False)
        self.index = writer.finish(T)
        per_shard = (SHARD_BYTES // 2 - 1) // T
        self.walk = Walk(0, "me", SHARDS, per_shard, per_shard - 4)
        self.window_steps = per_shard // PER_STEP

    async def host(self, name: PeerId, handler: Handler | None = None) -> None:
        self.hosts.append(name)
        await self.network.transport(name).listen(handler or ShardServer(self.index, self.authors).answer)

    def supply(self) -> TokenSupply:
        async def peers() -> Sequence[Source]:
            return [(each, ()) for each in self.hosts if each != BOOT]

        sources = ShardSources(
            self.index, [(BOOT, ())], peers, self.network.transport(ME).open, self.mirrors, Random(1)
        )
        loop = asyncio.get_running_loop()
        made = TokenSupply(
            self.index,
            self.store,
            self.walk,
            PER_STEP,
            sources,
            self.log,
            self.rates,
            self.most_bytes,
            loop.time,
            Random(2),
        )

        def count() -> None:
            self.supplied += 1

        made.on_supplied = count
        return made

    def numbers(self, step: int, windows: int = 1) -> set[int]:
        """The shards of some windows from a step on."""
        found = self.walk.windows(step, PER_STEP)
        return {number for _ in range(windows) for number in next(found)}

    @property
    def held(self) -> frozenset[int]:
        return self.store.held(self.index)

    @property
    def sources_of_shards(self) -> set[str]:
        return {fields["source"] for kind, fields in self.log.notes if kind == "got shard"}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def play(bench: Bench, script: Callable[[TokenSupply], Awaitable[None]]) -> None:
    """Run a supply while the script runs."""

    async def main() -> None:
        supply = bench.supply()
        task = asyncio.create_task(supply.run())
        try:
            async with asyncio.timeout(100_000):
                await script(supply)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    virtual_time.run(main())


async def until(look: Callable[[], object], within_s: float = 1000.0) -> None:
    async with asyncio.timeout(within_s):
        while not look():
            await asyncio.sleep(0.05)


def test_held_out_shards_come_before_a_step_is_known(bench: Bench) -> None:
    async def script(supply: TokenSupply) -> None:
        await bench.host(BOOT)
        await supply.until_held_out()
        await asyncio.sleep(100)
        assert bench.held == {SHARDS}

    play(bench, script)


def test_a_newcomer_gets_its_first_window_soon_and_the_next_ones_ahead(bench: Bench) -> None:
    async def script(supply: TokenSupply) -> None:
        await bench.host(BOOT)
        supply.begin(0)
        assert not supply.is_supplied(0)
        await until(lambda: bench.supplied == 1, within_s=3)
        assert supply.is_supplied(0)
        await until(lambda: bench.held >= bench.numbers(0, 3) | {SHARDS}, within_s=300)
        assert len(bench.held) < SHARDS // 2  # no more than what training needs soon
        assert not bench.log.kinds().count("no text")

    play(bench, script)


def test_training_moves_on_and_what_it_needs_moves_with_it(bench: Bench) -> None:
    async def script(supply: TokenSupply) -> None:
        await bench.host(BOOT)
        step = 0
        while step < 40 * bench.window_steps:
            if supply.is_supplied(step):
                step += 5
            else:
                await until(lambda: supply.is_supplied(step))  # noqa: B023
            await asyncio.sleep(0.1)
        assert len(bench.held) == SHARDS + 1

    play(bench, script)


def test_a_step_across_two_windows_waits_for_both(bench: Bench) -> None:
    step = next(
        step
        for step in range(10_000)
        if len({*bench.numbers(step), *bench.numbers(step + 1)}) > len(bench.numbers(step))
    )

    async def script(supply: TokenSupply) -> None:
        for number in bench.numbers(step):
            digest = bench.index.digests[number]
            bench.store.add(digest, bench.authors.path(digest).read_bytes())
        assert supply.is_supplied(step - 1)
        straddles = {each.shard for each in bench.walk.sequences(step, PER_STEP)} - bench.numbers(step)
        assert supply.is_supplied(step) is not bool(straddles)

    play(bench, script)


def test_a_returning_peer_goes_on_at_its_place(bench: Bench) -> None:
    step = 11 * bench.window_steps

    async def script(supply: TokenSupply) -> None:
        await bench.host(BOOT)
        assert not supply.is_supplied(step)
        await until(lambda: supply.is_supplied(step))
        assert bench.numbers(step) <= bench.held
        assert not bench.held & (bench.numbers(0) - bench.numbers(step, 2))

    play(bench, script)


def test_a_fetch_that_is_cancelled_before_it_begins_leaves_its_place(bench: Bench) -> None:
    async def script(supply: TokenSupply) -> None:
        await bench.host(BOOT)
        supply.begin(0)
        await until(lambda: bench.held >= bench.numbers(0) | {SHARDS}, within_s=300)

    create = asyncio.TaskGroup.create_task
    left = [4]

    def cancelled_at_once(group: asyncio.TaskGroup, coroutine: Any, **given: Any) -> asyncio.Task[Any]:
        task = create(group, coroutine, **given)
        if coroutine.__name__ == "_fetch" and left[0]:
            left[0] -= 1
            task.cancel()
        return task

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.TaskGroup, "create_task", cancelled_at_once)
        play(bench, script)
    assert left == [0]


def lying(server: ShardServer) -> Handler:
    """A peer that says to have everything and sends shards of other bytes."""

    async def answer(link: Link) -> None:
        from p2ptrain.net.payload import send_payload

        while True:
            match await receive_message(link, "shards", 100):
                case ["piece", _, int(offset)]:
                    await send_message(link, ["piece", SHARD_BYTES])
                    await send_payload(link, [bytes(min(PIECE_BYTES, SHARD_BYTES - offset))])
                case ["enough"]:
                    return
                case request:
                    await server.other(link, request)

    return answer


async def silent(link: Link) -> None:
    """A peer that says to have everything and sends nothing."""
    while True:
        match await receive_message(link, "shards", 100):
            case ["held", _]:
                await send_message(link, ["held", b"\xff" * 8, b""])
            case _:
                await asyncio.sleep(10_000)


async def torn(link: Link) -> None:
    """A peer that says to have everything and goes away when it is asked for a shard."""
    match await receive_message(link, "shards", 100):
        case ["held", _]:
            await send_message(link, ["held", b"\xff" * 8, b""])
            await receive_message(link, "shards", 100)


@pytest.mark.parametrize("kind", ["lying", "silent", "torn"])
def test_a_bad_source_is_set_aside_and_another_one_asked(bench: Bench, kind: str) -> None:
    async def script(supply: TokenSupply) -> None:
        bad = {"lying": lying(ShardServer(bench.index, bench.authors)), "silent": silent, "torn": torn}[kind]
        await bench.host(BOOT)
        await bench.host(LIAR, bad)
        supply.begin(0)
        assert not supply.is_supplied(0)
        await until(lambda: bench.supplied, within_s=60)
        await until(lambda: bench.held >= bench.numbers(0, 2) | {SHARDS}, within_s=600)
        assert bench.sources_of_shards == {BOOT}
        refused = [fields["source"] for kind, fields in bench.log.notes if kind == "shard refused"]
        assert bool(refused) is (kind == "lying")
        assert len(refused) <= 2

    play(bench, script)


def test_peers_come_before_the_bootstrap(bench: Bench) -> None:
    async def script(supply: TokenSupply) -> None:
        await bench.host(BOOT)
        await bench.host(OTHER)
        await asyncio.sleep(5)
        supply.begin(0)
        await until(lambda: bench.held >= bench.numbers(0, 2))
        notes = [fields["source"] for kind, fields in bench.log.notes if kind == "got shard"]
        assert notes.count(OTHER) > notes.count(BOOT)

    play(bench, script)


def test_a_mirror_serves_when_nobody_else_does(bench: Bench) -> None:
    bench.mirrors.append(Mirror(str(bench.authors.directory), is_own=True))

    async def script(supply: TokenSupply) -> None:
        supply.begin(0)
        assert not supply.is_supplied(0)
        await until(lambda: bench.supplied, within_s=60)
        assert bench.sources_of_shards == {str(bench.authors.directory)}

    play(bench, script)


def test_a_mirror_that_lacks_a_shard_still_gives_others(bench: Bench) -> None:
    bench.mirrors.append(Mirror(str(bench.authors.directory), is_own=True))
    lacking = bench.numbers(0).pop()
    digest = bench.index.digests[lacking]
    data = bench.authors.path(digest).read_bytes()
    bench.authors.path(digest).unlink()

    async def script(supply: TokenSupply) -> None:
        supply.begin(0)
        assert not supply.is_supplied(0)
        await until(lambda: bench.held >= (bench.numbers(0, 2) | {SHARDS}) - {lacking}, within_s=600)
        assert not supply.is_supplied(0)
        bench.authors.add(digest, data)
        await bench.host(BOOT)
        await until(lambda: bench.supplied, within_s=200)

    play(bench, script)


def test_no_source_is_told_once_and_heals(bench: Bench) -> None:
    async def script(supply: TokenSupply) -> None:
        supply.begin(0)
        assert not supply.is_supplied(0)
        await asyncio.sleep(QUIET_S + 2 * LOOK_S[1])
        assert bench.log.kinds() == ["no text"]
        assert not bench.supplied
        await bench.host(BOOT)
        await until(lambda: bench.supplied == 1, within_s=2 * LOOK_S[1])
        await asyncio.sleep(5)
        assert bench.log.kinds().count("text again") == bench.log.kinds().count("no text") == 1

    play(bench, script)


def test_a_killed_source_is_replaced_by_another_one(bench: Bench) -> None:
    async def script(supply: TokenSupply) -> None:
        await bench.host(OTHER)
        supply.begin(0)
        await until(lambda: bench.held)
        bench.network.fail = lambda dialer, dialed: dialed == OTHER
        bench.network.cut(OTHER)
        await bench.host(BOOT)
        await until(lambda: bench.held >= bench.numbers(0, 3), within_s=600)
        assert bench.sources_of_shards == {OTHER, BOOT}

    play(bench, script)


def test_the_store_keeps_below_its_cap_but_has_what_training_needs(bench: Bench) -> None:
    bench.most_bytes = 4 * SHARD_BYTES

    async def script(supply: TokenSupply) -> None:
        await bench.host(BOOT)
        old = [number for number in range(SHARDS) if number not in bench.numbers(0, 4)][:6]
        for number in old:
            digest = bench.index.digests[number]
            bench.store.add(digest, bench.authors.path(digest).read_bytes())
            os.utime(bench.store.path(digest), (1000 + number, 1000 + number))
        supply.begin(0)
        wanted = bench.numbers(0, 3) | {SHARDS}
        await until(lambda: bench.held >= wanted, within_s=600)
        await asyncio.sleep(100)
        assert bench.held == wanted

    play(bench, script)


def test_a_full_disk_is_told_and_heals(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    original = files.replace

    def full(*arguments: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("p2ptrain.base.files.replace", full)

    async def script(supply: TokenSupply) -> None:
        await bench.host(BOOT)
        supply.begin(0)
        assert not supply.is_supplied(0)
        await asyncio.sleep(3 * FULL_S[1])
        told = [fields for kind, fields in bench.log.notes if kind == "text not stored"]
        assert 1 <= len(told) <= 10
        assert "space" in told[0]["why"]
        monkeypatch.setattr("p2ptrain.base.files.replace", original)
        await until(lambda: bench.supplied, within_s=2 * FULL_S[1])

    play(bench, script)


def test_the_cause_of_missing_text_is_the_one_that_holds_now(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    original = files.replace
    monkeypatch.setattr("p2ptrain.base.files.replace", full)

    async def script(supply: TokenSupply) -> None:
        await bench.host(OTHER, torn)
        await bench.host(BOOT)
        supply.begin(0)
        assert not supply.is_supplied(0)
        await until(lambda: "no text" in bench.log.kinds())
        [told] = [fields for kind, fields in bench.log.notes if kind == "no text"]
        assert "space" in told["why"]
        monkeypatch.setattr("p2ptrain.base.files.replace", original)
        await until(lambda: bench.supplied, within_s=2 * FULL_S[1])
        assert not supply._full_why

    play(bench, script)


def test_a_damaged_shard_of_the_bootstrap_is_named_and_the_others_come(bench: Bench) -> None:
    damaged = next(iter(bench.numbers(0)))
    path = bench.authors.path(bench.index.digests[damaged])
    data = path.read_bytes()
    path.write_bytes(bytes(len(data)))

    async def script(supply: TokenSupply) -> None:
        await bench.host(BOOT)
        supply.begin(0)
        assert not supply.is_supplied(0)
        await until(lambda: bench.held >= (bench.numbers(0) | {SHARDS}) - {damaged}, within_s=TRUSTED_FALSE_S - 10)
        [refused] = [fields for kind, fields in bench.log.notes if kind == "shard refused"]
        assert (refused["source"], refused["shard"]) == (f"the bootstrap {BOOT}", damaged)
        await until(lambda: "no text" in bench.log.kinds())
        [told] = [fields for kind, fields in bench.log.notes if kind == "no text"]
        assert f"shard {damaged} of the bootstrap {BOOT}" in told["why"]
        path.write_bytes(data)
        await until(lambda: bench.supplied, within_s=TRUSTED_FALSE_S + 60)

    play(bench, script)


def test_a_shard_of_two_runs_is_fetched_and_stored_once(bench: Bench) -> None:
    """Check a second run on this computer that has most shards of the first one, and others."""

    async def fill(supply: TokenSupply) -> None:
        await bench.host(BOOT)
        supply.begin(0)
        await until(lambda: bench.held >= bench.numbers(0, 3) | {SHARDS})
        await asyncio.sleep(60)

    play(bench, fill)
    second, here = Bench(bench.place), {bench.index.digests[number] for number in bench.held}
    others = [number for number in range(SHARDS - 1) if number not in bench.held]
    numbers = [*sorted(bench.held - {SHARDS, SHARDS - 1}), *others[:4]]
    digests = tuple(bench.index.digests[number] for number in (*numbers, SHARDS))
    second.index = replace(bench.index, training_tokens=len(numbers) * SHARD_BYTES // 2, digests=digests)
    per_shard = (SHARD_BYTES // 2 - 1) // T
    second.walk = Walk(7, "me", len(numbers), per_shard, per_shard)
    assert second.index.root != bench.index.root

    async def use(supply: TokenSupply) -> None:
        await second.host(BOOT)
        supply.begin(0)
        await until(lambda: second.held >= second.numbers(0, 2) | {len(numbers)})

    play(second, use)
    fetched = {digests[fields["shard"]] for kind, fields in second.log.notes if kind == "got shard"}
    assert fetched
    assert here & {digests[number] for number in second.numbers(0, 2)}
    assert not fetched & here
    assert {each.name for each in second.store._paths()} == here | fetched


def test_a_full_disk_loses_what_nobody_reads(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    old = next(number for number in range(SHARDS) if number not in bench.numbers(0, 3))
    path = bench.store.path(bench.index.digests[old])
    bench.store.add(path.name, bench.authors.path(path.name).read_bytes())
    os.utime(path, (1000, 1000))
    original = files.replace

    def tight(*arguments: Any, **named: Any) -> None:
        if path.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(*arguments, **named)

    monkeypatch.setattr("p2ptrain.base.files.replace", tight)

    async def script(supply: TokenSupply) -> None:
        await bench.host(BOOT)
        supply.begin(0)
        await until(lambda: bench.held >= bench.numbers(0, 2), within_s=600)
        assert "text not stored" not in bench.log.kinds()

    play(bench, script)


def test_a_resting_peer_fetches_nothing(bench: Bench) -> None:
    bench.rates.rests = True

    async def script(supply: TokenSupply) -> None:
        await bench.host(BOOT)
        supply.begin(0)
        await asyncio.sleep(500)
        assert not bench.held
        bench.rates.rests = False
        await until(lambda: bench.held >= bench.numbers(0, 1), within_s=60)

    play(bench, script)


def test_a_bug_ends_the_peer_loudly(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        await bench.host(BOOT)
        supply = bench.supply()
        monkeypatch.setattr(supply._sources, "fetch", broken)
        supply.begin(0)
        async with asyncio.timeout(60):
            await supply.run()

    with pytest.raises(ZeroDivisionError):
        virtual_time.run(main())
