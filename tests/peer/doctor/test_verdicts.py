"""The doctor's findings from observations, and their texts, without I/O."""

from __future__ import annotations

import json

import pytest

from p2ptrain.net.relay.dial_back import DialOutcome, ReachabilityReport
from peer.doctor import verdicts
from peer.doctor.findings import FindingState, bad, document, lines, note, ok, skipped
from peer.doctor.verdicts import Observation, clock_ahead

OWN, ROUTER = "192.168.1.23", "/ip4/203.0.114.7/tcp/40000"


def seen(dialed: DialOutcome = DialOutcome.NO, place: str = ROUTER, ahead_s: float = 0.0, why: str = ""):
    return Observation(ReachabilityReport(place, dialed, why, 0.0), ahead_s)


@pytest.mark.parametrize(
    ("asked_at", "answered_at", "theirs", "ahead"),
    [(10.0, 12.0, 11.0, 0.0), (10.0, 12.0, 9.0, 1.0), (10.0, 12.0, 15.0, -3.0), (10.0, 10.0, 10.0, 0.0)],
)
def test_clocks_differ_by_the_least_that_explains_the_times(asked_at, answered_at, theirs, ahead) -> None:
    assert clock_ahead(asked_at, answered_at, theirs) == ahead


@pytest.mark.parametrize(
    ("offsets", "state"),
    [
        ([], FindingState.SKIPPED),
        ([0.1], FindingState.OK),
        ([-6.0], FindingState.NOTE),
        ([400.0], FindingState.BAD),
        ([0.0, 0.1, 900.0], FindingState.OK),  # one report is wrong
    ],
)
def test_the_clock_is_compared_to_the_median(offsets, state) -> None:
    found = verdicts.clock([seen(ahead_s=each) for each in offsets])
    assert found.state is state
    assert bool(found.fix) is (state in (FindingState.NOTE, FindingState.BAD))


def test_which_router_it_is() -> None:
    assert verdicts.router([seen(place="/ip4/8.8.8.8/tcp/9")], ["8.8.8.8"]).state is FindingState.OK
    assert verdicts.router([seen()], [OWN]).found.endswith("203.0.114.7, the address of a router")
    assert verdicts.router([], [OWN]).state is FindingState.SKIPPED
    assert "router" not in verdicts.router([seen(place="/ip4/127.0.0.1/tcp/9")], [OWN]).found.replace("no router", "")


def test_the_fix_names_our_own_address_and_port() -> None:
    found = verdicts.reach([seen(why="nobody answers")], 31337, OWN, has_relay=False)
    assert found.state is FindingState.BAD
    assert found.found.startswith("nobody can dial this machine at 203.0.114.7:31337 (nobody answers)")
    assert "Forward TCP port 31337 on your router to 192.168.1.23" in found.fix
    assert verdicts.reach([seen()], 31337, OWN, has_relay=True).state is FindingState.NOTE


def test_without_a_router_it_is_the_firewall() -> None:
    found = verdicts.reach([seen(place="/ip4/8.8.8.8/tcp/9")], 31337, "8.8.8.8", has_relay=False)
    assert "firewall" in found.fix
    assert "router" not in found.fix


def test_reach_by_one_family_alone_names_the_other() -> None:
    six = seen(DialOutcome.YES, place="/ip6/2600:1900::7/tcp/9")
    found = verdicts.reach([six, seen(why="nobody answers")], 31337, OWN, has_relay=True)
    assert found.state is FindingState.OK
    assert "at [2600:1900::7]:31337; by IPv4 only a relay" in found.found
    both = verdicts.reach([six, seen(DialOutcome.YES, place="/ip4/8.8.8.8/tcp/9")], 31337, OWN, has_relay=None)
    assert both.found.endswith("at 8.8.8.8:31337 and [2600:1900::7]:31337")
    assert "router" in verdicts.router([six, seen()], [OWN, "2600:1900::7"]).found  # IPv4's counts


def test_reach_that_nobody_looked_at_is_skipped_and_says_why() -> None:
    declined = verdicts.reach([seen(DialOutcome.DECLINED, why="asked too often")], 31337, OWN, None)
    assert (declined.state, "asked too often" in declined.found) == (FindingState.SKIPPED, True)
    silent = verdicts.reach([], 31337, OWN, None, ["Kx41ab: no answer in time"])
    assert (silent.state, "Kx41ab: no answer in time" in silent.found) == (FindingState.SKIPPED, True)
    assert verdicts.reach([seen(DialOutcome.YES)], 0, OWN, None).state is FindingState.SKIPPED
    dialed = verdicts.reach([seen(DialOutcome.YES)], 31337, OWN, None)
    assert dialed.found == "others can dial this machine at 203.0.114.7:31337"


def test_only_what_must_be_mended_fails() -> None:
    fine = [ok("a", "x"), note("b", "y", "z"), skipped("c", "no link")]
    assert [document(each)["ok"] for each in (fine, [*fine, bad("d", "y", "z")])] == [True, False]
    shown = lines([*fine, bad("d", "y", "do this")])
    assert shown[-3:] == ["        FIX        do this", "", "To be fixed: d."]
    assert lines(fine)[-1] == "All checks that ran passed; skipped: c."
    assert len(json.loads(json.dumps(document(fine)))["findings"]) == 3


def test_a_strangers_words_steer_no_terminal() -> None:
    assert "\x1b" not in "".join(lines([bad("reach", "he said \x1b[2J", "x")]))
