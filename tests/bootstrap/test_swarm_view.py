"""The bootstrap's view of a swarm, from records and from the peers' figures, which are validated."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import pytest
import virtual_time
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from memory_network import MemoryNetwork

from bootstrap.aggregates import MAX_TIMES, SUMMED
from bootstrap.swarm_view import CURVE_S, HELD_S, KEPT_S, MAX_SERIALS, POLL_S, SILENT_S, SwarmView
from p2ptrain.base.ids import PeerId, RunId, peer_of
from p2ptrain.manifest import SignedManifest, create_run, load_run, sign_run
from p2ptrain.net.figures_service import FiguresService, Telling
from p2ptrain.page.contributors import MOST_TIMES, reported
from p2ptrain.page.metrics import exposition
from p2ptrain.page.view import MOST_CURVES, MOST_PEERS
from p2ptrain.ports import Link
from p2ptrain.receipts import Receipt
from p2ptrain.statements import signature
from p2ptrain.swarm import PeerState, Presence

A, B = PeerId("12D3KooWaaaa"), PeerId("12D3KooWbbbb")
ROW: dict[str, Any] = {
    "device": "cpu",
    "tokens": 300,
    "tokens_per_s": 40.0,
    "loss": 2.0,
    "held_out": 2.1,
    "disagreement": 0.01,
    "exchanges": 5,
    "failed": 1,
    "up": 10.0,
    "down": 20.0,
    "sent_bytes": 1000,
    "received_bytes": 2000,
    "blocked_share": 0.02,
}


@pytest.fixture
def view(signed: SignedManifest) -> SwarmView:
    view = SwarmView(signed, wall=lambda: 1000.0)
    view.meet([presence(signed, A, "fox"), presence(signed, B, "hen")], None)
    return view


def presence(signed: SignedManifest, peer: PeerId, name: str) -> Presence:
    return Presence(peer, signed.run_id, ("/ip4/1.2.3.4/tcp/5",), PeerState.TRAINING, 7, 700.0, True, name, 990.0, 75.0)


def exchange(serial: int, partner: str, **changes: Any) -> list[Any]:
    fields = {
        "n": serial,
        "at": 999.0,
        "partner": partner,
        "seconds": 0.5,
        "bytes": 1000,
        "distance": 0.1,
        "path": "direct",
    }
    return ["exchange", *(fields | changes).values()]


def test_records_alone_show_who_is_here(view: SwarmView, signed: SignedManifest) -> None:
    document = view.document()
    assert document["total_peers"] == 2
    assert [(row["nickname"], row["state"], row["age_s"], row["path"]) for row in document["peers"]] == [
        ("fox", "training", 10.0, "direct"),
        ("hen", "training", 10.0, "direct"),
    ]
    assert all(row["loss"] is None for row in document["peers"])
    assert document["run"]["id"] == signed.run_id
    json.dumps(document, allow_nan=False)


def test_what_peers_tell_is_shown_and_summed_up(view: SwarmView, signed: SignedManifest) -> None:
    view.told(A, ROW, [])
    view.told(B, {**ROW, "loss": 3.0}, [])
    view.meet([presence(signed, A, "fox"), presence(signed, B, "hen")], 500)
    document = view.document()
    assert document["total_peers"] == 500
    assert document["peers"][0]["device"] == "cpu"
    assert document["figures"]["tokens"] == 600
    assert document["figures"]["loss"] == 2.5
    assert document["figures"]["tokens_per_s"] == 80.0
    assert document["figures"]["swarm_tokens_per_s"] == 80.0 * 500 / 2
    left = signed.manifest.run.tokens - 700.0
    assert document["figures"]["remaining_s"] == pytest.approx(left / (80.0 * 500 / 2))
    assert {each["peer"]: each["train"] for each in document["curves"]} == {
        A: [(700.0, 1000.0, 2.0)],
        B: [(700.0, 1000.0, 3.0)],
    }
    assert document["traffic"] == [(1000.0, 20.0, 40.0)]


def crowd(signed: SignedManifest, most: int, start: int = 0) -> list[Presence]:
    return [presence(signed, PeerId(f"12D3KooW{each:04}"), f"p{each}") for each in range(start, most)]


def by_state(view: SwarmView) -> Counter[str]:
    return Counter(row["state"] for row in view.document()["peers"])


def test_of_a_large_swarm_whoever_is_not_in_a_sample_stays(signed: SignedManifest) -> None:
    """Check that figures, curves and totals last as long as a record when each lookup asks one bucket of four."""
    clock = [1000.0]
    view = SwarmView(signed, wall=lambda: clock[0])
    everybody = crowd(signed, 200)
    view.meet(everybody, 200)
    for each in everybody[:8]:
        view.told(each.peer, ROW, [exchange(5, B)])
    for at in range(20):
        clock[0] += 3.0
        view.meet([replace(each, issued_at=clock[0]) for each in everybody[at % 4 :: 4]], 200)
        assert by_state(view) == {"training": 200}
        assert view.document()["figures"]["tokens"] == 8 * 300
        assert len(view.document()["curves"]) == 8
    assert set(view._serials.values()) == {5}
    for _ in range(30):
        clock[0] += 3.0
        view.meet([replace(each, issued_at=clock[0]) for each in everybody[1:]], 199)
    assert by_state(view) == {"training": 199, "gone": 1}
    assert view.document()["figures"]["tokens"] == 7 * 300


def test_of_two_records_the_newer_one_counts(view: SwarmView, signed: SignedManifest) -> None:
    """Check that the newer record counts: a sample may hold an older copy, also of a peer that has left since."""
    old = presence(signed, A, "fox")
    view.meet([replace(old, issued_at=995.0, step=8), presence(signed, B, "hen")], 100)
    view.meet([old], 100)
    assert [(row["id"], row["step"]) for row in view.document()["peers"]] == [(A, 8), (B, 7)]
    view.meet([replace(old, issued_at=996.0, state=PeerState.LEAVING)], 100)
    view.meet([old], 100)
    assert {row["id"]: row["state"] for row in view.document()["peers"]} == {A: "gone", B: "training"}


def test_who_has_just_told_of_itself_was_seen_just_now(signed: SignedManifest) -> None:
    """Check that figures received now set the age to zero, whatever the record's time; without further ones the age
    grows."""
    clock = [1010.0]
    view = SwarmView(signed, wall=lambda: clock[0])
    records = [presence(signed, A, "fox"), presence(signed, B, "hen")]
    view.meet(records, None)
    view.told(A, ROW, [])
    clock[0] += 3.0
    ages = [[row["age_s"] for row in view.document()["peers"]]]
    view.meet(records, None)
    clock[0] += 7.0
    ages.append([row["age_s"] for row in view.document()["peers"]])
    view.meet([replace(records[0], issued_at=1018.0), records[1]], None)
    ages.append([row["age_s"] for row in view.document()["peers"]])
    assert ages == [[3.0, 23.0], [10.0, 30.0], [2.0, 30.0]]


def test_there_are_not_endlessly_many(signed: SignedManifest) -> None:
    """Check the bound on peers without a record: the oldest of those with only a serial is forgotten, shown ones are
    kept."""
    view = SwarmView(signed, wall=lambda: 1000.0)
    view.meet(crowd(signed, 200), 5000)
    view.meet(crowd(signed, 400, 200), 5000)
    shown = [row["id"] for row in view.document()["peers"]]
    assert len(shown) == MOST_PEERS
    assert {each.peer for each in crowd(signed, 200)} <= set(shown)
    for at in range(0, 2 * MAX_SERIALS, 200):
        view.meet(some := crowd(signed, at + 200, at), None)
        for each in some:
            view.told(each.peer, ROW, [exchange(1, B)])
    assert len(view._serials) == MAX_SERIALS


def test_a_peer_that_was_started_again_is_asked_from_its_new_serials(view: SwarmView) -> None:
    view.told(A, ROW, [exchange(5000, B)])
    view.told(A, ROW, [exchange(1, B), exchange(2, B)])
    assert view._serials[A] == 2
    assert len(view.document()["exchanges"]) == 3


def test_one_stranger_does_not_decide_the_headline(signed: SignedManifest) -> None:
    """Check that headline values are medians or capped sums, and that no peer is shown far beyond the run's end."""
    view = SwarmView(signed, wall=lambda: 1000.0)
    honest, end = crowd(signed, 4), signed.manifest.run.tokens
    liar = replace(presence(signed, A, "liar"), progress=1e300)
    newcomers = [replace(each, state=PeerState.JOINING, progress=0.0) for each in crowd(signed, 40, 4)]
    view.meet([*honest, liar, *newcomers], None)
    for each in honest:
        view.told(each.peer, ROW, [])
    sums = ("tokens", "tokens_per_s", "exchanges", "failed", "up", "down", "sent_bytes", "received_bytes")
    boasts = {"loss": 99.0, "held_out": 1e17, "disagreement": 1e9, "blocked_share": 1.0, **dict.fromkeys(sums, 1e17)}
    view.told(A, ROW | boasts | {"step": 1, "progress": 1e18}, [])
    view.meet([*honest, liar, *newcomers], None)
    figures = view.document()["figures"]
    for name, (share, least) in SUMMED.items():
        assert figures[name] == share * (4 * ROW[name] + max(MAX_TIMES * ROW[name], least)), name
    assert figures["blocked_share"] == ROW["blocked_share"]
    assert view.document()["traffic"][-1] == (1000.0, figures["up"], figures["down"])
    assert (figures["loss"], figures["held_out"], figures["disagreement"]) == (2.0, 2.1, 0.01)
    assert figures["fraction"] == 700.0 / end
    row = next(row for row in view.document()["peers"] if row["id"] == A)
    assert (row["progress"], row["held_out"], row["disagreement"]) == (1.1 * end, None, None)
    view.told(A, ROW, [exchange(n, B, distance=apart) for n, apart in enumerate((1e17, -1.0, 0.5), 1)])
    assert [each["distance"] for each in view.document()["exchanges"]] == [None, None, 0.5]


def test_both_sides_count_an_exchange(view: SwarmView, signed: SignedManifest) -> None:
    view.told(A, ROW, [])
    view.told(B, ROW, [])
    view.meet([presence(signed, A, "fox"), presence(signed, B, "hen")], None)
    figures = view.document()["figures"]
    assert (figures["exchanges"], figures["failed"]) == (5.0, 1.0)


def test_whatever_the_dashboard_asks_for_a_swarm_has(view: SwarmView, signed: SignedManifest) -> None:
    """Check that a bootstrap's metrics, made from the peers' figures, have every name of docs/grafana.json."""
    view.told(A, ROW, [])
    view.meet([presence(signed, A, "fox")], None)
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    questions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    told = exposition(view.document()).decode()
    for name in {name for each in questions for name in re.findall(r"p2ptrain_\w+", each)}:
        assert re.search(rf"^{name}[{{ ]", told, flags=re.MULTILINE), name


def test_a_text_is_as_old_as_it_is(signed: SignedManifest) -> None:
    """Check that a sample text is dated by the answer in which it changed: every answer repeats it."""
    clock = [1000.0]
    view = SwarmView(signed, wall=lambda: clock[0])
    view.meet([presence(signed, A, "fox"), presence(signed, B, "hen")], None)
    for _ in range(10):
        view.told(A, {**ROW, "sample": "To be" if clock[0] < 1006.0 else "or not"}, [])
        clock[0] += 3.0
    assert view.document()["sample"] | {"step": 0} == {
        "at": 1006.0,
        "peer": A,
        "step": 0,
        "prompt": "",
        "text": "or not",
        "tokens": 700.0,
    }


def test_whose_text_is_shown_goes_in_turn(signed: SignedManifest) -> None:
    """Check that sample texts take turns, each long enough to be read, though one peer sends a new one every time."""
    clock = [1000.0]
    view = SwarmView(signed, wall=lambda: clock[0])
    everybody = [presence(signed, PeerId(f"12D3KooW{name}"), name) for name in ("loud", "fox", "hen")]
    view.meet(everybody, None)
    shown: list[str] = []
    for at in range(60):
        for each in everybody:
            text = f"{each.nickname} {at if each.nickname == 'loud' else at // 20}"
            view.told(each.peer, {**ROW, "sample": text}, [])
        shown.append(view.document()["sample"]["text"])
        clock[0] += POLL_S
    turns = [(text, len(list(same))) for text, same in groupby(shown)]
    assert all(held * POLL_S >= HELD_S for _, held in turns[:-1])
    assert Counter(text.split()[0] for text, _ in turns[:6]) == {"loud": 2, "fox": 2, "hen": 2}


def test_the_last_text_stays_though_its_peer_has_left(view: SwarmView) -> None:
    """Check that the last sample text stays when its peer leaves, and is replaced when a peer withdraws its consent."""
    view.told(B, {**ROW, "sample": "Once"}, [])
    view.told(A, {**ROW, "sample": "To be"}, [])
    assert view.document()["sample"]["text"] == "Once"
    view.forget(B)
    assert view.document()["sample"]["text"] == "To be"
    view.meet([], None)
    assert view.document()["sample"]["text"] == "To be"


def test_early_tellers_do_not_keep_all_curves(signed: SignedManifest) -> None:
    """Check that curves rotate among more peers than there are curves: each is drawn for hours, then another."""
    clock, chance = [1000.0], Random(1)
    view = SwarmView(signed, wall=lambda: clock[0])
    everybody = crowd(signed, MOST_CURVES + 4)
    view.meet([replace(each, lifetime_s=1e6) for each in everybody], None)

    def drawn() -> set[str]:
        for each in everybody:
            view.told(each.peer, ROW, [])
        return {each["peer"] for each in view.document()["curves"]}

    first = {each.peer for each in everybody[:MOST_CURVES]}
    assert drawn() == first
    clock[0] += CURVE_S + 1.0
    assert len(drawn() & first) == len(first) - 1
    assert len(drawn() & first) == len(first) - 1
    found = set()
    for _ in range(40):
        clock[0] += CURVE_S + 1.0
        chance.shuffle(everybody)
        found |= drawn()
    assert found == {each.peer for each in everybody}


def test_records_grow_old_while_no_lookup_succeeds(signed: SignedManifest) -> None:
    clock = [1000.0]
    view = SwarmView(signed, wall=lambda: clock[0])
    view.meet([presence(signed, A, "fox")], None)
    clock[0] += 60.0
    assert [row["age_s"] for row in view.document()["peers"]] == [70.0]


# --- polling ---------------------------------------------------------------------------------------------------------

Handler = Callable[[Link], Awaitable[None]]


def answering(telling: Callable[[], Telling | None]) -> Handler:
    return FiguresService(telling).answer


def tells(serial: int) -> tuple[dict[str, Any], list[list[Any]]]:
    return ROW | {"sample": "To be"}, []


async def silence(link: Link) -> None:
    await asyncio.sleep(1e6)


def watched(
    signed: SignedManifest, peers: dict[PeerId, Handler], seconds: float, look: Callable[[SwarmView], None]
) -> None:
    """Return a view that polls peers for so long in virtual time, and read it each second."""

    async def main() -> None:
        network, loop = MemoryNetwork(0.01), asyncio.get_running_loop()
        for peer, handler in peers.items():
            await network.transport(peer).listen(handler)
        view = SwarmView(signed, wall=loop.time)
        found = [replace(presence(signed, each, "x"), issued_at=0.0, lifetime_s=1e9) for each in peers]
        view.meet(found, None)
        asking = asyncio.create_task(view.ask(network.transport(PeerId("watcher")), Random(1)))
        for _ in range(int(seconds)):
            await asyncio.sleep(1.0)
            view.meet(found, None)
            look(view)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking

    virtual_time.run(main())


def test_those_who_do_not_answer_hold_up_nobody(signed: SignedManifest) -> None:
    """Check two hundred dead peers, with a timeout of 10 s each, and a few live ones.

    The live ones are found after some minutes, and then polled every round.
    """
    living = [PeerId(f"12D3KooWlive{each}") for each in range(4)]
    dead = [PeerId(f"12D3KooWdead{each}") for each in range(200)]
    asked: Counter[PeerId] = Counter()

    def counting(peer: PeerId) -> Handler:
        async def answer(link: Link) -> None:
            asked[peer] += 1
            await answering(lambda: tells)(link)

        return answer

    seconds = 1500
    watched(
        signed, {each: counting(each) for each in living} | dict.fromkeys(dead, silence), seconds, lambda view: None
    )
    assert min(asked[each] for each in living) > 0.3 * seconds / POLL_S


def test_who_keeps_its_figures_from_now_on_is_taken_down_at_once(signed: SignedManifest) -> None:
    until: list[bool] = []
    shown: list[bool] = []

    def look(view: SwarmView) -> None:
        document = view.document()
        until.append(True)
        told = document["peers"][0]["loss"] is not None
        assert told == bool(document["curves"]) == bool(document["sample"]) == ("tokens" in document["figures"])
        shown.append(told)

    handler = answering(lambda: tells if len(until) < 20 else None)
    watched(signed, {A: handler}, 40, look)
    assert all(shown[1:20])
    assert not any(shown[20 + int(POLL_S) + 1 :])


def test_who_answers_no_more_is_taken_down_after_a_while(signed: SignedManifest) -> None:
    looks: list[bool] = []

    def look(view: SwarmView) -> None:
        looks.append(view.document()["peers"][0]["loss"] is not None)

    async def answer(link: Link) -> None:
        await (answering(lambda: tells) if len(looks) < 20 else silence)(link)

    watched(signed, {A: answer}, 400, look)
    assert all(looks[1 : 20 + int(SILENT_S)])
    assert not any(looks[20 + int(SILENT_S + 2 * KEPT_S) :])


# --- news ------------------------------------------------------------------------------------------------------------


def test_an_exchange_that_both_tell_of_is_shown_once(view: SwarmView) -> None:
    view.told(A, ROW, [exchange(1, B)])
    view.told(B, ROW, [exchange(4, A)])
    assert [(each["a"], each["b"]) for each in view.document()["exchanges"]] == [(A, B)]
    view.told(B, ROW, [exchange(5, "12D3KooWzzzz", path="relayed")])  # a peer that is otherwise unknown
    found = view.document()["exchanges"]
    assert [(each["a"], each["path"]) for each in found] == [(A, "direct"), (B, "relayed")]


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        {"n": 1},
        exchange(1, B)[:7],
        exchange(1, B)[1:],
        ["gossip", *exchange(1, B)[1:]],
        exchange(1, B, at="now"),
        exchange(1, B, seconds=-1.0),
        exchange(1, B, bytes=float("inf")),
        exchange(0, B),
        [*exchange(1, B)[:3], 7, 0.5, 1000, 0.1, "direct"],
    ],
)
def test_nonsense_about_exchanges_is_dropped(view: SwarmView, told: Any) -> None:
    view.told(A, ROW, [told])
    assert view.document()["exchanges"] == []


def test_failures_checkpoints_and_a_text_are_shown(view: SwarmView) -> None:
    news = [["failure", 3, 999.0, "it\x1b[2J hung"], ["checkpoint", 4, 999.0, 12], ["failure", 5, 999.0, 7]]
    view.told(A, {**ROW, "sample": "To be\n\x1b[2J"}, news)
    document = view.document()
    assert [(each["peer"], each["line"]) for each in document["failures"]] == [(A, "it [2J hung")]
    assert [(each["peer"], each["step"]) for each in document["checkpoints"]] == [(A, 12)]
    assert document["sample"]["text"] == "To be\n [2J"


def test_nothing_has_happened_in_the_future(view: SwarmView) -> None:
    """Check that a time in the future is replaced: a fast clock, or an adversarial peer, would stay on top."""
    news = [
        ["failure", 1, 1e17, "late"],
        ["checkpoint", 2, 1e17, 3],
        exchange(3, B, at=1e17),
        ["failure", 4, 7.0, "old"],
    ]
    view.told(A, ROW, news)
    document = view.document()
    assert [each["at"] for each in document["failures"]] == [1000.0, 7.0]
    assert document["checkpoints"][0]["at"] == document["exchanges"][0]["at"] == 1000.0


def test_a_failure_of_its_own_is_shown(view: SwarmView) -> None:
    view.failed("the list of peers cannot be read")
    assert [each["line"] for each in view.document()["failures"]] == ["the list of peers cannot be read"]


def test_hostile_rows_change_nothing_but_their_own_numbers(view: SwarmView) -> None:
    row = {
        "device": "<b>\x1b[2J" * 99,
        "tokens": float("nan"),
        "loss": "2",
        "id": B,
        "nickname": "root",
        "step": 10**30,
    }
    view.told(A, row, [])
    found = view.document()["peers"][0]
    assert (found["id"], found["nickname"], found["step"]) == (A, "fox", 7)
    assert (found["tokens"], found["loss"]) == (None, None)
    assert len(found["device"]) <= 32
    assert found["device"].isprintable()


def test_who_is_gone_is_shown_as_gone_and_tells_nothing_more(view: SwarmView, signed: SignedManifest) -> None:
    view.told(A, ROW, [])
    view.meet([presence(signed, B, "hen")], None)
    view.told(A, ROW, [exchange(9, B)])
    document = view.document()
    assert {row["nickname"]: row["state"] for row in document["peers"]} == {"hen": "training", "fox": "gone"}
    assert document["exchanges"] == []
    assert "tokens" not in document["figures"]


def test_once_the_last_has_left_what_the_swarm_came_to_stays(view: SwarmView, signed: SignedManifest) -> None:
    for each in (A, B):
        view.told(each, ROW, [])
    view.meet([presence(signed, A, "fox"), presence(signed, B, "hen")], None)
    before = view.document()["figures"]
    view.meet([], None)
    document = view.document()
    gone = ("tokens_per_s", "swarm_tokens_per_s", "remaining_s", "up", "down")
    assert document["figures"] == {name: value for name, value in before.items() if name not in gone}
    assert document["figures"]["fraction"] > 0
    assert "last figures" in document["why"]
    view.meet([presence(signed, A, "fox")], None)
    assert view.document()["why"] == ""


def test_a_run_that_has_ended_is_told_as_ended(view: SwarmView, signed: SignedManifest) -> None:
    """Check that the end of a run is read from the records of peers that left: their last figures are older."""
    end = float(signed.manifest.run.tokens)
    view.told(A, {**ROW, "step": 9, "progress": 0.97 * end}, [])
    view.told(B, {**ROW, "step": 9, "progress": 0.97 * end}, [])
    gone = [replace(presence(signed, each, "fox"), state=PeerState.LEAVING, progress=end) for each in (A, B)]
    view.meet([replace(each, issued_at=999.0) for each in gone], None)
    document = view.document()
    assert document["figures"]["fraction"] == 1.0
    assert document["why"] == "the run has ended; these are the last figures"


def test_only_an_open_run_shows_how_to_join(signed: SignedManifest, tmp_path: Path) -> None:
    view = SwarmView(signed)
    view.join("p2ptrain peer 'p2ptrain://x'")
    assert view.document()["join"] == "p2ptrain peer 'p2ptrain://x'"
    assert view.document()["join_note"] == ""
    view.join("p2ptrain peer 'p2ptrain://x'", "In this house only.")
    assert view.document()["join_note"] == "In this house only."
    run = tmp_path / "run"
    create_run(run, "demo")
    text = (run / "manifest.toml").read_text()
    (run / "manifest.toml").write_text(text.replace('policy = "open"', 'policy = "invite"'))
    sign_run(run)
    private = SwarmView(load_run(run))
    private.join("p2ptrain peer 'p2ptrain://x'")
    assert (private.document()["join"], private.document()["join_note"]) == ("", "")


# --- contributions ---------------------------------------------------------------------------------------------------


def contributions(view: SwarmView) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in view.document()["contributions"]["rows"]}


class Author:
    """A peer with a key, which signs claims."""

    def __init__(self) -> None:
        self.key = Ed25519PrivateKey.generate()
        self.peer = peer_of(self.key.public_key().public_bytes_raw())

    def sign(self, purpose: bytes, fields: list[Any]) -> bytes:
        return signature(self.key, purpose, fields)


def receipt(run: RunId, author: Author, partner: Author, tokens: int) -> Receipt:
    claim = Receipt(author.peer, partner.peer, 10, 20, 3, tokens, 4, 100, 100, 0)
    return claim.signed(run, partner.sign)


def test_contributions_outlast_a_departure_and_a_restart(signed: SignedManifest, tmp_path: Path) -> None:
    view = SwarmView(signed, wall=lambda: 1000.0)
    view.remember(tmp_path)
    view.meet([presence(signed, A, "fox"), presence(signed, B, "hen")], None)
    view.told(A, {**ROW, "contributed": 250, "trained_s": 60.0, "sample": "To be"}, [])
    view.meet([presence(signed, B, "hen")], None)
    view.save(lambda tag, text: None)
    again = SwarmView(signed, wall=lambda: 2000.0)
    again.remember(tmp_path)
    row = contributions(again)[A]
    assert (row["nickname"], row["tokens"], row["trained_s"], row["here"]) == ("fox", 250, 60.0, False)
    assert [each["text"] for each in again.document()["samples"]] == ["To be"]


def test_a_peer_whose_owner_shares_no_longer_is_removed(view: SwarmView) -> None:
    view.told(A, {**ROW, "sample": "To be"}, [])
    view.forget(A)
    assert A in contributions(view)
    assert len(view.document()["samples"]) == 1
    view.forget(A, is_withdrawn=True)
    assert A not in contributions(view)
    assert view.document()["samples"] == []


def test_only_genuine_receipts_count_as_signed(signed: SignedManifest) -> None:
    """Check a receipt of the peer itself, then of another run, of another peer, one-sided, and noise."""
    author, partner, other = Author(), Author(), Author()
    run, foreign = signed.run_id, RunId("ab" * 32)
    whole = receipt(run, author, partner, 200)
    told: dict[str, Any] = {"contributed": 250}
    for body, tokens in (
        (whole.encode(), 200),
        (receipt(run, author, partner, 9_999).encode(), 250),
        (receipt(foreign, author, partner, 200).encode(), 0),
        (receipt(run, other, partner, 200).encode(), 0),
        (receipt(run, author, author, 200).encode(), 0),
        (replace(whole, signature=b"x" * 64).encode(), 0),
        (b"noise", 0),
        ("text", 0),
    ):
        row = reported(run, author.peer, {**told, "receipt": body}, "", 1000.0, 5.0)
        assert row is not None
        assert (row.signed_tokens, row.signers) == (tokens, (partner.peer,) if tokens else ())


def test_a_claim_beyond_all_peers_progress_is_cut(signed: SignedManifest) -> None:
    row = reported(signed.run_id, A, {"contributed": 10**15}, "", 1000.0, 5.0)
    assert row is not None
    assert row.tokens == MOST_TIMES * 1000


def test_a_false_first_claim_spoils_no_later_share(signed: SignedManifest) -> None:
    """Check the share of an honest peer after a first one that claimed the whole run for itself."""
    now = 1000.0
    view = SwarmView(signed, wall=lambda: now)
    run_tokens = signed.manifest.run.tokens
    view.meet([replace(presence(signed, A, "fox"), progress=9e18)], None)
    view.told(A, {**ROW, "contributed": 10**18, "progress": 9e18}, [])
    assert contributions(view)[A]["tokens"] > run_tokens
    for _ in range(10):
        now += 60.0
        view.meet([replace(presence(signed, B, "hen"), issued_at=now)], None)
        view.told(B, {**ROW, "contributed": 350}, [])
    row = contributions(view)[B]
    assert (row["tokens"], row["share"]) == (350, 350 / 1400)
    assert contributions(view)[A]["tokens"] == 2 * 700 - 350


def test_a_peer_without_tokens_has_no_row(signed: SignedManifest) -> None:
    for told in ({}, {"contributed": 0}, {"contributed": "many"}, {"tokens": None}):
        assert reported(signed.run_id, A, told, "", 1000.0, 5.0) is None
