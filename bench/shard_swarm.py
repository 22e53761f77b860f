"""Simulated swarm in which peers fetch shards over home lines: transfers share lines, and there are no packets.

Each peer has the product's ``FetchPlan``, ``Walk`` and rate limits, and trains a window when all its shards are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from bench.home_lines import HomeLine, LineTransfer, LineWorld
from p2ptrain.net import shard_service
from p2ptrain.net.rate_limiter import RateLimiter
from p2ptrain.tokens import walk
from p2ptrain.tokens.fetch_plan import FetchOutcome, FetchPlan, Needs, ShardFetch, ShardSource, SourceKind, needs
from p2ptrain.tokens.index import SHARD_BYTES
from p2ptrain.tokens.walk import Walk
from peer.shard_sources import MOST_ASKED
from peer.token_supply import CALM_S, LOOK_S, TURN_S

HOMES = ((0.35, 100, 20), (0.25, 112, 15), (0.25, 50, 10), (0.15, 16, 1))
"""Share of peers, Mbit/s down and up of their lines."""
BOOTSTRAP, MIRROR = "bootstrap", "mirror"
DIAL_S = 0.3
"""Duration of a question, or of the beginning of a transfer. Guess: round trips between homes."""
FIND_S = 2.0
"""Time from a peer's start to its first question."""
TRAINER_S = 5.0
"""Time from a peer's first text to its first inner step."""
SEQUENCE_LENGTH = 256
"""Tokens of a sequence, as in llama-15m."""


@dataclass(frozen=True, slots=True)
class CarryCase:
    """A swarm, its text and its lines."""

    peers: int = 100
    joining_s: float = 60.0
    """Time in which peers join, at random."""
    corpus_tokens: int = 500_000_000
    """Training tokens; of 2 bytes each."""
    held_out_shards: int = 1
    tokens_per_s: float = 1_300.0
    """Throughput of each peer."""
    bootstrap_mbit_s: float = 20.0
    mirror_mbit_s: float = 0.0
    """Uplink of a mirror; 0: there is none."""
    leaving: float = 0.0
    """Share of peers that leave for good, each at a random time, while another peer joins."""
    adversarial: float = 0.0
    """Share of peers that claim to have everything; half of them send false shards, half send nothing."""
    are_found_at_once: bool = True
    """Whether others find a peer as soon as it has come, or only when it trains."""
    first_shards: int = walk.FIRST_SHARDS
    duration_s: float = 3600.0


@dataclass(eq=False, slots=True)
class Server:
    """A node that sends shards, with the limits of the shard protocol."""

    name: str
    line: HomeLine
    case: CarryCase
    is_bootstrap: bool = False
    paid: list[str] = field(default_factory=list)
    """Receivers of the shards that are being sent."""
    limiter: RateLimiter[str] = field(init=False)
    waiting: list[tuple[str, Callable[[bool], None]]] = field(default_factory=list)
    served: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        overall = shard_service.OF_A_BOOTSTRAP if self.is_bootstrap else shard_service.OVERALL
        self.limiter = RateLimiter(shard_service.EACH, overall)

    def begin(self, who: str, world: LineWorld, answer: Callable[[bool], None]) -> None:
        """Answer whether a shard may be sent now; a bootstrap that is full answers when one has ended, or in time."""
        if self.admits(who, world.now):
            self.paid.append(who)
            answer(True)
        elif not self.is_bootstrap or len(self.waiting) >= shard_service.MOST_WAITING:
            answer(False)
        else:
            entry = (who, answer)
            self.waiting.append(entry)

            def give_up() -> None:
                if entry in self.waiting:
                    self.waiting.remove(entry)
                    answer(False)

            world.after(shard_service.QUEUE_S, give_up)

    def end(self, who: str, world: LineWorld) -> None:
        self.paid.remove(who)
        self.served[who] = self.served.get(who, 0) + 1
        while self.waiting:
            entry = min(self.waiting, key=lambda each: self.served.get(each[0], 0))
            if not self.admits(entry[0], world.now):
                return
            self.waiting.remove(entry)
            self.paid.append(entry[0])
            entry[1](True)

    def admits(self, who: str, now: float) -> bool:
        if len(self.paid) >= shard_service.MOST_SERVED or self.paid.count(who) >= shard_service.MOST_SERVED_TO_ONE:
            return False
        return self.limiter.admits(who, now, SHARD_BYTES)


class FetchingPeer:
    """A peer: what it holds, what it fetches, and how long it waited."""

    def __init__(self, swarm: Swarm, name: str, line: HomeLine, lie: str, seed: int) -> None:
        case = swarm.case
        self.swarm, self.world, self.name, self.line, self.lie = swarm, swarm.world, name, line, lie
        self.server = Server(name, line, case)
        self.plan = FetchPlan(Random(f"{seed} {name}"))
        self.walk = swarm.walk_of(name)
        self.here: set[int] = set()
        self.told: dict[str, tuple[frozenset[int], frozenset[int]]] = {}
        self.known: list[FetchingPeer] = []
        self.transfers: dict[ShardFetch, LineTransfer | None] = {}
        self.joined_at = self.waits_since = swarm.world.now
        self.begun_at: float | None = None
        """When its first inner step was possible."""
        self.waited_s = 0.0
        """Time without text after the first step."""
        self.left_at: float | None = None
        self.read: dict[int, float] = {}
        """Share of each shard that it has read."""
        self._window: tuple[float, list[int], int] = 0.0, [], 1
        """When it began the window that it trains, its shards and its sequences."""
        self.position = 0
        self.is_training = self.has_looked = False
        self._wake = 0
        self._needs: tuple[int, Needs] | None = None
        self._looked_at = float("-inf")
        if not lie:
            self.world.after(FIND_S, self.turn)

    @property
    def is_alive(self) -> bool:
        return self.left_at is None

    @property
    def is_found(self) -> bool:
        has_begun = self.begun_at is not None and self.world.now > self.begun_at + TRAINER_S
        return self.is_alive and (has_begun or bool(self.lie) or self.swarm.case.are_found_at_once)

    def leave(self) -> None:
        self.left_at = self.world.now
        self.count_read()
        if self.begun_at is not None and not self.is_training:
            self.waited_s += self.world.now - self.waits_since
        for other in (self, *self.swarm.peers):
            for fetch, transfer in list(other.transfers.items()):
                if other is self or fetch.source == self.name:
                    other.finish(fetch, transfer, FetchOutcome.FAILED)

    # --- one turn, as in peer.token_supply ----------------------------------------------------------------------------

    def turn(self) -> None:
        if not self.is_alive:
            return
        now, wanted = self.world.now, self.needs()
        for fetch, transfer in self.transfers.items():
            if transfer is not None:
                self.world.settle(transfer)
                self.plan.received(fetch, round(SHARD_BYTES - transfer.left_bytes))
        for fetch in self.plan.overdue(now):
            self.finish(fetch, self.transfers[fetch], FetchOutcome.FAILED)
        for fetch in self.plan.unneeded(wanted, self.here):
            self.finish(fetch, self.transfers[fetch], FetchOutcome.CANCELLED)
        self.train()
        wanted = self.needs()
        is_urgent = any(shard not in self.here for shard in wanted.now)
        if set(wanted.all) <= self.here:
            return  # the next window wakes it
        if now - self._looked_at >= (LOOK_S[0] if is_urgent else CALM_S):
            self.look()
        while isinstance(due := self.plan.begin(wanted, self.here, self.sources(), now), ShardFetch):
            self.transfers[due] = None
            self.world.after(DIAL_S, self.beginning(due))
        self.wake_in(min(due, TURN_S))

    def wake_in(self, seconds: float) -> None:
        self._wake += 1
        number = self._wake

        def wake() -> None:
            if number == self._wake:
                self.turn()

        self.world.after(seconds, wake)

    def needs(self) -> Needs:
        if self._needs is None or self._needs[0] != self.position:
            self._needs = self.position, needs(self.walk, self.position, 1, self.swarm.held_out)
        found = self._needs[1]
        missing = [each for each in self.swarm.held_out if each not in self.here]
        now = tuple(dict.fromkeys((*found.now, *missing)))
        return Needs(now, tuple(each for each in found.soon if each not in now))

    def train(self) -> None:
        """Train a window if it is here."""
        if self.is_training or not set(self.needs().now) <= self.here:
            return
        if self.begun_at is None:
            self.begun_at = self.world.now
        else:
            self.waited_s += self.world.now - self.waits_since
        self.is_training = True
        span, shards = next(self.walk.spans(self.position))
        self._window = self.world.now, shards, len(span)

        def done() -> None:
            self.count_read()
            self.is_training, self.waits_since, self.position = False, self.world.now, span.stop
            self.turn()

        self.world.after((span.stop - self.position) * SEQUENCE_LENGTH / self.swarm.case.tokens_per_s, done)

    def count_read(self) -> None:
        """Count what it has read of the window that it trains, and end the window."""
        began, shards, sequences = self._window
        read = min(1.0, (self.world.now - began) * self.swarm.case.tokens_per_s / SEQUENCE_LENGTH / sequences)
        of_each = read * sequences / max(len(shards), 1) / self.walk.per_shard
        for shard in shards:
            self.read[shard] = min(1.0, self.read.get(shard, 0.0) + of_each)
        self._window = self.world.now, [], 1

    # --- sources ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        self._looked_at = self.world.now
        others = [each for each in self.swarm.peers if each.is_found and each is not self]
        known = [each for each in self.known if each.is_alive]
        rest = [each for each in others if each not in known]
        chosen = [*known, *self.swarm.rng.sample(rest, min(len(rest), MOST_ASKED))][:MOST_ASKED]
        if len(chosen) == MOST_ASKED and len(rest) > MOST_ASKED // 4:
            chosen[-MOST_ASKED // 4 :] = self.swarm.rng.sample(rest, MOST_ASKED // 4)
        self.known = chosen

        def told() -> None:
            self.has_looked = True
            self.told = {each.name: each.statement() for each in chosen if each.is_alive}
            self.turn()

        self.world.after(DIAL_S, told)

    def statement(self) -> tuple[frozenset[int], frozenset[int]]:
        return (self.swarm.everything, frozenset()) if self.lie else (frozenset(self.here), self.plan.coming)

    def sources(self) -> list[ShardSource]:
        found = [ShardSource(name, SourceKind.PEER, *told) for name, told in self.told.items()]
        if self.has_looked:
            found.append(ShardSource(BOOTSTRAP, SourceKind.BOOTSTRAP, self.swarm.everything))
        if self.swarm.mirror is not None:
            found.append(ShardSource(MIRROR, SourceKind.MIRROR, self.swarm.everything))
        return found

    # --- fetches ------------------------------------------------------------------------------------------------------

    def beginning(self, fetch: ShardFetch) -> Callable[[], None]:
        def begin() -> None:
            if fetch not in self.transfers:
                return
            server, lie, has = self.swarm.server(fetch)
            if server is None or not has:
                self.finish(fetch, None, FetchOutcome.FAILED)
            elif lie == "silent":
                return  # until it is overdue
            else:
                server.begin(self.name, self.world, answered)

        def answered(may: bool) -> None:
            server, lie, _ = self.swarm.server(fetch, even_gone=True)
            assert server is not None
            if fetch not in self.transfers:
                if may:
                    server.end(self.name, self.world)
            elif not may:
                self.finish(fetch, None, FetchOutcome.BUSY)
            else:
                outcome = FetchOutcome.FALSE if lie else FetchOutcome.WHOLE
                done = partial(self.finish, fetch)
                transfer = LineTransfer(server.line, self.line, lambda: done(transfer, outcome), SHARD_BYTES)
                self.transfers[fetch] = transfer
                self.world.send(transfer)

        return begin

    def finish(self, fetch: ShardFetch, transfer: LineTransfer | None, outcome: FetchOutcome) -> None:
        del self.transfers[fetch]
        if transfer is not None:
            if transfer in transfer.receiver.incoming:
                self.world.end(transfer)
            server, _, _ = self.swarm.server(fetch, even_gone=True)
            if server is not None:
                server.end(self.name, self.world)
            self.plan.received(fetch, round(SHARD_BYTES - transfer.left_bytes))
        self.plan.ended(fetch, outcome, self.world.now)
        if outcome is FetchOutcome.WHOLE:
            self.here.add(fetch.shard)
        if outcome is not FetchOutcome.CANCELLED:
            self.wake_in(0.0)


class Swarm:
    """All peers of one case, and the nodes that have all shards."""

    def __init__(self, case: CarryCase, seed: int) -> None:
        self.case, self.seed, self.rng, self.world = case, seed, Random(seed), LineWorld()
        self.shards = -(-case.corpus_tokens * 2 // SHARD_BYTES)
        self.held_out = range(self.shards, self.shards + case.held_out_shards)
        self.everything = frozenset(range(self.held_out.stop))
        self.bootstrap = Server(BOOTSTRAP, HomeLine(1000.0, case.bootstrap_mbit_s), case, is_bootstrap=True)
        self.mirror = MirrorServer(MIRROR, HomeLine(1000.0, case.mirror_mbit_s), case) if case.mirror_mbit_s else None
        self.peers: list[FetchingPeer] = []
        self._by_name: dict[str, FetchingPeer] = {}
        liars = set(self.rng.sample(range(case.peers), round(case.adversarial * case.peers)))
        homes = self._homes(case.peers)
        for number in range(case.peers):
            lie = ("silent", "false")[number % 2] if number in liars else ""
            self.world.after(self.rng.uniform(0.0, case.joining_s), self._joining(number, homes[number], lie))
        for number in range(round(case.leaving * case.peers)):
            at = self.rng.uniform(case.joining_s, case.duration_s)
            self.world.after(at, self._leaving())
            self.world.after(at, self._joining(case.peers + number, self.rng.choice(HOMES), ""))

    def run(self) -> None:
        self.world.run(self.case.duration_s)
        for peer in self.peers:
            if peer.is_alive:
                peer.count_read()
                if peer.begun_at is not None and not peer.is_training:
                    peer.waited_s += self.world.now - peer.waits_since

    def walk_of(self, peer: str) -> Walk:
        per_shard = (SHARD_BYTES // 2 - 1) // SEQUENCE_LENGTH
        return Walk(self.seed, peer, self.shards, per_shard, per_shard)

    def server(self, fetch: ShardFetch, even_gone: bool = False) -> tuple[Server | None, str, bool]:
        """Return who is asked, its lie, and whether it has the shard."""
        if fetch.source == BOOTSTRAP:
            return self.bootstrap, "", True
        if fetch.source == MIRROR:
            return self.mirror, "", True
        peer = self._by_name[fetch.source]
        if not (peer.is_alive or even_gone):
            return None, "", False
        return peer.server, peer.lie, bool(peer.lie) or fetch.shard in peer.here

    def _homes(self, number: int) -> list[tuple[float, int, int]]:
        homes = [home for home in HOMES for _ in range(round(home[0] * number))]
        homes = (homes or [HOMES[0]]) * number
        homes = homes[:number]
        self.rng.shuffle(homes)
        return homes

    def _joining(self, number: int, home: Sequence[float], lie: str) -> Callable[[], None]:
        def join() -> None:
            peer = FetchingPeer(self, f"peer {number}", HomeLine(home[1], home[2]), lie, self.seed)
            self.peers.append(peer)
            self._by_name[peer.name] = peer

        return join

    def _leaving(self) -> Callable[[], None]:
        return lambda: self.rng.choice([each for each in self.peers if each.is_alive]).leave()


class MirrorServer(Server):
    """A mirror, which serves anyone who asks."""

    def admits(self, who: str, now: float) -> bool:
        return True
