"""The document: bounded and strict JSON for any input, with harmless text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.page.figures import OF_PEERS, OF_RUNS
from p2ptrain.page.samples import SampleText
from p2ptrain.page.untrusted import MOST_LINE, MOST_NAME, MOST_SAMPLE, number, paragraph, words
from p2ptrain.page.view import (
    MOST_CHECKPOINTS,
    MOST_CURVES,
    MOST_EXCHANGES,
    MOST_FAILURES,
    MOST_GONE,
    MOST_PEERS,
    MOST_POINTS,
    CheckpointRow,
    ExchangeRow,
    FailureRow,
    PeerRow,
    RunFacts,
    Series,
    View,
    plain,
    row_of,
)

NOT_FINITE = (math.nan, math.inf, -math.inf)


def strict(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document as a reader parses it. Raises ValueError for values that JSON does not have."""
    found: dict[str, Any] = json.loads(json.dumps(document, allow_nan=False))
    return found


# --- series ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("added", [1, MOST_POINTS, MOST_POINTS + 1, 10_000])
def test_a_series_is_bounded_and_keeps_its_beginning(added: int) -> None:
    """Check that at most MOST_POINTS are kept, in order, the first among them."""
    series = Series()
    for step in range(added):
        series.add(float(step), 2.0 * step)
    assert len(series.points) <= MOST_POINTS
    assert series.points[0] == (0.0, 0.0)
    assert series.points == sorted(series.points)


@pytest.mark.parametrize("most", [15, 16])
def test_a_series_is_thinned_evenly(most: int) -> None:
    """Check that old points are not denser than new ones: all gaps but the last are equal."""
    series = Series(most)
    for step in range(1000):
        series.add(float(step))
        *gaps, last = [b[0] - a[0] for a, b in zip(series.points, series.points[1:], strict=False)] or [1.0]
        assert len(set(gaps)) <= 1
        assert last <= max(gaps, default=1.0)
        assert len(series.points) <= most
    assert len(series.points) >= most // 2


def test_a_series_ends_with_the_newest_point() -> None:
    """Check that the newest value is always the last point."""
    series = Series(most=16)
    for step in range(1000):
        series.add(float(step))
        assert series.points[-1] == (float(step),)
        assert series.points[0] == (0.0,)


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_point_that_is_no_number_is_none(value: float) -> None:
    """Check that a point with a coordinate that is not finite is dropped."""
    series = Series()
    series.add(1.0, value)
    series.add(value, 1.0)
    assert series.points == []


# --- peers -----------------------------------------------------------------------------------------------------------


def test_who_has_gone_stays_as_gone() -> None:
    """Check that a peer without a row keeps name, step and device, has no figures, and is not counted."""
    view = View("peer")
    view.place([PeerRow("a", nickname="Amber", state="training", step=7, device="cpu", loss=2.0, tokens_per_s=9.0)])
    view.place([PeerRow("b", state="training")])
    gone = view.peers["a"]
    assert (gone.state, gone.nickname, gone.step, gone.device) == ("gone", "Amber", 7, "cpu")
    assert gone.loss is None
    assert gone.tokens_per_s is None
    assert view.total_peers == 1


def test_who_comes_back_is_here() -> None:
    """Check that the new row of a peer that was gone replaces the old one."""
    view = View("peer")
    view.place([PeerRow("a", state="training")])
    view.place([])
    view.place([PeerRow("a", state="joining")])
    assert [row.state for row in view.peers.values()] == ["joining"]


def test_those_who_are_here_displace_those_who_have_gone() -> None:
    """Check that peers that are gone get only what live ones leave of MOST_PEERS."""
    view = View("bootstrap")
    view.place(PeerRow(f"old-{index}", state="training") for index in range(MOST_PEERS))
    view.place(PeerRow(f"new-{index}", state="training") for index in range(MOST_PEERS - 1))
    assert len(view.peers) == MOST_PEERS
    assert sum(row.state == "gone" for row in view.peers.values()) == 1


def test_more_peers_than_fit_are_counted() -> None:
    """Check that ``total`` includes peers beyond the sample, and is never below the number of rows."""
    view = View("bootstrap")
    view.place((PeerRow(str(index)) for index in range(3 * MOST_PEERS)), total=3 * MOST_PEERS)
    assert len(view.peers) == MOST_PEERS
    assert view.total_peers == 3 * MOST_PEERS
    view.place([PeerRow("a"), PeerRow("b")], total=1)
    assert view.total_peers == 2


def test_curves_are_bounded_and_named_in_words() -> None:
    """Check that at most MOST_CURVES peers have a curve, and that names are one short, printable line."""
    view = View("peer")
    made = [view.curve(str(index), f"peer\n{index}\u202e" + "x" * 99) for index in range(MOST_CURVES + 1)]
    assert all(made[:-1])
    assert made[-1] is None
    assert view.curves["3"].name.startswith("peer 3 x")
    assert len(view.curves["3"].name) == MOST_NAME


def test_a_curve_leaves_with_its_peer_and_the_average_stays() -> None:
    """Check that curves of peers without a row are dropped, and that the average, which has no peer, stays."""
    view = View("simulation")
    view.place([PeerRow("a")])
    assert view.curve("a") is not None
    assert view.curve("b") is not None
    assert view.curve("", "average") is not None
    view.place([])
    assert set(view.curves) == {"a", ""}


# --- the document ----------------------------------------------------------------------------------------------------


def test_the_document_is_bounded(make_view: Callable[..., View]) -> None:
    """Check the bounds of every list and text after an excess of everything."""
    view = make_view(MOST_PEERS * 2)
    for step in range(5000):
        view.add(ExchangeRow(view.next_serial(), 0.0, "a", "b", 1.0, 1))
        view.add(FailureRow(view.next_serial(), 0.0, "a", "busy"))
        view.add(CheckpointRow(view.next_serial(), 0.0, "a", step))
        view.traffic.add(float(step), 1.0, 1.0)
        view.disagreement.add(float(step), float(step), 0.1)
    document = strict(view.document(0.0))
    most = {
        "peers": MOST_PEERS,
        "curves": MOST_CURVES,
        "exchanges": MOST_EXCHANGES,
        "failures": MOST_FAILURES,
        "checkpoints": MOST_CHECKPOINTS,
    }
    assert {name: len(document[name]) for name in most} == most
    assert max(len(document["traffic"]), len(document["disagreement"])) <= MOST_POINTS
    assert document["exchanges"][-1]["n"] > document["exchanges"][0]["n"]


def test_nobody_who_talks_much_hides_what_others_tell() -> None:
    """Check that the peer with the most entries loses one; if there is only one peer, its oldest."""
    view = View("bootstrap")
    for quiet in ("a", "b", "c"):
        view.add(FailureRow(view.next_serial(), 0.0, quiet, "once"))
        view.add(CheckpointRow(view.next_serial(), 0.0, quiet, 1))
        view.add(ExchangeRow(view.next_serial(), 0.0, quiet, "z", 1.0, 1))
    for step in range(1000):
        view.add(FailureRow(view.next_serial(), 0.0, "loud", str(step)))
        view.add(CheckpointRow(view.next_serial(), 0.0, "loud", step))
        view.add(ExchangeRow(view.next_serial(), 0.0, "loud", "z", 1.0, step))
    assert {each.peer for each in view.failures} == {"a", "b", "c", "loud"}
    assert {each.peer for each in view.checkpoints} == {"a", "b", "c", "loud"}
    assert {each.a for each in view.exchanges} == {"a", "b", "c", "loud"}
    assert [each.line for each in view.failures][-2:] == ["998", "999"]
    assert [each.n for each in view.failures] == sorted(each.n for each in view.failures)


@pytest.mark.parametrize("value", NOT_FINITE)
def test_the_document_is_strict_json(make_view: Callable[..., View], value: float) -> None:
    """Check nan and infinity: null in a row, and left out of the figures."""
    view = make_view(2)
    first = next(iter(view.peers))
    numbers = ("loss", "held_out", "tokens_per_s", "disagreement", "up", "down", "progress", "age_s")
    nonsense: dict[str, Any] = dict.fromkeys(numbers, value)
    view.peers[first] = replace(view.peers[first], **nonsense)
    view.exchanges.append(ExchangeRow(view.next_serial(), value, "a", "b", value, 1, value))
    view.figures["held_out"] = value
    document = strict(view.document(0.0))
    assert all(document["peers"][0][name] is None for name in numbers)
    assert document["exchanges"][-1]["seconds"] is None
    assert "held_out" not in document["figures"]
    assert document["figures"]["fraction"] > 0


def test_an_empty_view_is_a_document() -> None:
    """Check that every list exists before anything is known."""
    document = strict(View("bootstrap").document(1.5))
    assert document["at"] == 1.5
    assert document["sample"] is None
    lists = ("peers", "curves", "disagreement", "traffic", "exchanges", "failures", "checkpoints")
    assert [document[name] for name in lists] == [[]] * len(lists)


def test_serials_only_rise() -> None:
    """Check serials, by which readers recognize new entries."""
    view = View("peer")
    assert [view.next_serial() for _ in range(3)] == [1, 2, 3]


# --- strangers' text and numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain", "plain"),
        ("  two\n lines\t", "two lines"),
        ("\x1b[31mred\x00", "[31mred"),
        ("turned \u202e round", "turned round"),
        ("zero\u200bwidth", "zero width"),
        ("\ud800", ""),
        ("<img src=x>", "<img src=x>"),
        ("naïve 漢字", "naïve 漢字"),
        (None, "None"),
        ("", ""),
    ],
)
def test_words_are_one_printable_line(text: object, line: str) -> None:
    """Check that control, format and unpaired characters are removed, and that markup is kept as text."""
    assert words(text) == line


def test_words_and_paragraphs_are_cut() -> None:
    """Check the length, also if most characters are dropped."""
    assert words("x" * 10**6) == "x" * MOST_LINE
    assert words("x" * 99, 5) == "xxxxx"
    assert words(" " * 10**6 + "x") == ""
    assert len(paragraph("x\n" * MOST_SAMPLE)) == MOST_SAMPLE


def test_a_paragraph_keeps_its_lines_and_nothing_unprintable() -> None:
    """Check that line ends stay, and that direction marks and invisible characters become spaces."""
    assert paragraph("a\nb\u202ec\x00d") == "a\nb c d"


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (0, 0.0),
        (2.5, 2.5),
        (10**18, 1e18),
        (10**19, None),
        (10**400, None),
        (-1, None),
        (math.nan, None),
        (math.inf, None),
        (True, None),
        ("3", None),
        (None, None),
        ([1], None),
    ],
)
def test_a_number_is_one_within_bounds(value: object, found: float | None) -> None:
    """Check that all else is None: booleans, strings, and numbers beyond a float."""
    assert number(value) == found


def test_a_row_takes_what_a_peer_tells_of_itself() -> None:
    """Check that figures and device come from the peer."""
    base = PeerRow("a", nickname="Amber", state="training", step=3, path="relayed")
    told = plain(PeerRow("a", device="cpu", loss=2.0, tokens=7, exchanges=4, tokens_per_s=9.5))
    row = row_of("a", told, base)
    assert (row.device, row.loss, row.tokens, row.exchanges, row.tokens_per_s) == ("cpu", 2.0, 7, 4, 9.5)


def test_a_row_keeps_what_a_peer_cannot_decide() -> None:
    """Check that id, name and record are not overwritten by a peer's figures; its progress is."""
    base = PeerRow("a", nickname="Amber", state="training", step=3, progress=5.0, age_s=1.0, path="relayed")
    told = {"id": "b", "nickname": "Eve", "state": "gone", "step": 99, "progress": 1e9, "age_s": 0, "path": "direct"}
    assert row_of("a", told, base) == replace(base, step=99, progress=1e9)
    assert row_of("a", {**told, "progress": 4.0}, base) == base


def test_a_row_takes_no_figure_that_nobody_can_have() -> None:
    """Check implausible figures: a loss of 1e300 nats would dominate the mean; progress is capped."""
    told = {"loss": 101.0, "held_out": 1e300, "disagreement": 1e18, "step": 1, "progress": 1e300}
    row = row_of("a", told, PeerRow("a"), most_progress=110.0)
    assert (row.loss, row.held_out, row.disagreement, row.progress) == (None, None, None, 0.0)
    assert row_of("a", {"step": 1, "progress": 1e9}, PeerRow("a"), most_progress=110.0).progress == 110.0


@pytest.mark.parametrize("value", [math.nan, -1, 10**400, "fast", None, True, {}, []])
def test_a_row_takes_no_nonsense(value: object) -> None:
    """Check any value in any field: all but numbers in bounds and strings are None."""
    told = {each.name: value for each in fields(PeerRow)}
    row = row_of("a", told, PeerRow("a"))
    expected = PeerRow("a", device="fast") if value == "fast" else PeerRow("a")
    assert row == expected
    strict(plain(row))


def test_of_those_who_go_the_last_stay_and_their_age_goes_on() -> None:
    view = View("bootstrap")
    for place in range(40):
        view.place([PeerRow(f"p{place}", age_s=5.0), PeerRow("stays")], at=100.0 + place)
    document = view.document(200.0)
    gone = {row["id"]: row["age_s"] for row in document["peers"] if row["state"] == "gone"}
    assert len(gone) == MOST_GONE
    assert gone["p38"] == 200.0 - (138.0 - 5.0)
    assert "p39" not in gone
    assert document["total_peers"] == 2


def test_records_grow_older_while_no_new_ones_are_found() -> None:
    """Check ages of rows at a bootstrap and a peer; a peer's own row and simulated ones have none."""
    ages = {}
    for kind in ("bootstrap", "peer", "simulation"):
        view = View(kind, me="me")  # type: ignore[arg-type]  # one of its kinds
        view.place([PeerRow("me"), PeerRow("a", age_s=5.0)], at=100.0)
        ages[kind] = [row["age_s"] for row in view.document(160.0)["peers"]]
    assert ages == {"bootstrap": [0.0, 65.0], "peer": [0.0, 65.0], "simulation": [0.0, 5.0]}


def test_curves_of_those_who_are_gone_make_room() -> None:
    view = View("bootstrap")
    names = [f"p{place}" for place in range(MOST_CURVES)]
    view.place(map(PeerRow, names))
    assert all(view.curve(name) is not None for name in names)
    view.place(map(PeerRow, [*names[1:], "new"]))
    assert view.curve("new") is not None
    assert "p0" not in view.curves
    assert view.curve("newer") is None


def documented() -> dict[str, set[str]]:
    """Return the fields of each row of the table for ``/status`` in docs/PAGE.md."""
    text = (Path(__file__).parent.parent.parent / "docs" / "PAGE.md").read_text(encoding="utf-8")
    _, _, after = text.partition('`/status` has `"schema": 1` and:')
    found = {}
    for line in after.partition("\n\n")[2].partition("\n\n")[0].splitlines()[2:]:
        names, _, what = line.removeprefix("| ").partition(" | ")
        found |= {key: set(re.findall(r"`(\w+)`", what)) for key in re.findall(r"`(\w+)`", names)}
    return found


def test_the_handbook_names_every_field() -> None:
    """Check that the table names all fields and no others."""
    found, document = documented(), View("peer").document(0.0)
    assert set(found) | {"schema"} == set(document)
    rows = {"run": RunFacts, "peers": PeerRow, "exchanges": ExchangeRow, "failures": FailureRow}
    for name, row in {**rows, "checkpoints": CheckpointRow, "sample": SampleText}.items():
        assert {each.name for each in fields(row)} <= found[name], name
    assert {"peer", "name", "train", "held_out"} <= found["curves"]
    assert set(OF_PEERS | OF_RUNS) == found["figures"]
