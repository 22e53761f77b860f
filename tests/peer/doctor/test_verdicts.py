"""The doctor's findings from observations, and their texts, without I/O."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2ptrain.admission import Refusal
from p2ptrain.base.ids import PeerId
from p2ptrain.net.path_mtu import PathVerdict
from p2ptrain.net.relay.dial_back import DialOutcome, ReachabilityReport
from peer.doctor import verdicts
from peer.doctor.findings import FindingState, bad, document, exit_status, lines, note, ok, skipped
from peer.doctor.network import sent_from
from peer.doctor.verdicts import Observation, clock_ahead

OWN, ROUTER = "192.168.1.23", "/ip4/203.0.114.7/tcp/40000"


def seen(
    dialed: DialOutcome = DialOutcome.NO, place: str = ROUTER, ahead_s: float = 0.0, sent_from: int = 0, why: str = ""
):
    return Observation(ReachabilityReport(place, dialed, why, 0.0), ahead_s, sent_from)


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
    keeps = verdicts.router([seen(sent_from=40000)], [OWN])
    assert "203.0.114.7, the address of a router that keeps ports" in keeps.found
    assert "changes ports" in verdicts.router([seen(sent_from=40000), seen(sent_from=7)], [OWN]).found
    assert verdicts.router([seen()], [OWN]).found.endswith("a router")
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


def test_a_path_that_loses_large_packets() -> None:
    wide, narrow, helped = PathVerdict(False, True), PathVerdict(True), PathVerdict(True, fragments_pass=True)
    assert verdicts.path({}, can_help=True).state is FindingState.SKIPPED
    assert verdicts.path({"11.0.2.2": wide}, can_help=True).state is FindingState.OK
    found = verdicts.path({"11.0.2.2": wide, "11.0.3.2": narrow}, can_help=True)
    assert found.state is FindingState.BAD
    assert "11.0.3.2 are lost" in found.found
    assert "sudo sysctl -w net.ipv4.tcp_mtu_probing=1" in found.fix
    assert verdicts.path({"11.0.2.2": helped}, can_help=True).state is FindingState.NOTE
    assert verdicts.path({"11.0.2.2": helped}, can_help=False).state is FindingState.BAD


def test_only_what_must_be_mended_fails() -> None:
    fine = [ok("a", "x"), note("b", "y", "z"), skipped("c", "no link")]
    assert (exit_status(fine), exit_status([*fine, bad("d", "y", "z")])) == (0, 1)
    shown = lines([*fine, bad("d", "y", "do this")])
    assert shown[-3:] == ["        FIX        do this", "", "To be fixed: d."]
    assert lines(fine)[-1] == "All checks that ran passed; skipped: c."
    assert json.loads(json.dumps(document(fine)))["ok"] is True


def test_a_strangers_words_steer_no_terminal() -> None:
    assert "\x1b" not in "".join(lines([bad("reach", "he said \x1b[2J", "x")]))


TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0
   1: 1701A8C0:9C40 0772CB71:7A69 06 00000000:00000000 00:00000000 00000000     0        0 2 1 0
   2: 1701A8C0:9C41 0772CB71:7A69 01 00000000:00000000 00:00000000 00000000     0        0 3 1 0
"""


def test_the_port_that_a_connection_left_from(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    table.write_text(TABLE)
    assert sent_from("113.203.114.7", 31337, table) == 0x9C41
    assert sent_from("113.203.114.7", 31338, table) == 0
    assert sent_from("2001:db8::1", 1, table) == 0
    table.write_text(TABLE + TABLE[TABLE.index("   2:") :])
    assert sent_from("113.203.114.7", 31337, table) == 0  # two sockets could be meant
    assert sent_from("113.203.114.7", 31337, tmp_path / "none") == 0


ME = PeerId("12D3KooWEjsyWGBHNsPbf2CDHKsRoeEPPfkU1UBYGNuQiHnLb6sG")


@pytest.mark.parametrize(
    ("policy", "me", "why", "invite", "state", "words"),
    [
        ("open", None, None, "", FindingState.OK, "anyone with its link"),
        ("invite", ME, None, "", FindingState.OK, "admits nLb6sG (invite)"),
        ("allowlist", ME, None, "", FindingState.OK, "admits nLb6sG (allowlist)"),
        ("invite", None, None, "abc", FindingState.OK, "has an invite"),
        ("invite", ME, Refusal.NO_INVITE, "abc", FindingState.OK, "has an invite"),
        ("invite", None, None, "", FindingState.BAD, "no invite"),
        ("invite", ME, Refusal.BANNED, "abc", FindingState.BAD, "has banned this peer"),
        ("allowlist", ME, Refusal.NOT_LISTED, "", FindingState.BAD, "not on the run's list"),
        ("allowlist", None, None, "", FindingState.NOTE, "no peer id yet"),
    ],
)
def test_whether_the_run_lets_us_in(policy, me, why, invite, state, words) -> None:
    found = verdicts.admission(policy, me, why, invite)
    assert found.state is state
    assert words in found.found
    assert bool(found.fix) is (state is not FindingState.OK)
