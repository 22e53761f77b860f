"""Notes as people see them, with strangers' text in them."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from p2ptrain.base.errors import MISFIT
from p2ptrain.base.text import printable
from peer.messages import line, size
from peer.screen import REPEAT_S, ActivityLine, Screen

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
PROGRESS: dict[str, Any] = {
    "step": 1234,
    "progress": 345_000.0,
    "fraction": 0.345,
    "loss": 2.5,
    "run_tokens": 1_000_000,
    "tokens_per_s": 12345.6,
    "swarm_tokens_per_s": 20345.6,
    "remaining_s": 53.1,
    "shortened_s": 7201.0,
    "peers": 1,
    "exchanges_ok": 11,
}
HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J\r\n[train] finished: fine [bold red]markup[/] [/nothing] :skull: \u202egnp.exe \x9b31m"
)


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_100_000, "1.1 MB"), (3e15, "3000.0 TB")]
)
def test_sizes(size_bytes: float, text: str) -> None:
    assert size(size_bytes) == text


def test_an_exchange() -> None:
    fields = {"peer": PEER, "seconds": 0.81, "sent_bytes": 550_000, "received_bytes": 550_000, "distance": 0.0123}
    assert line("exchanged", fields) == f"[exchange] exchanged with {PEER[-6:]}: 0.8 s, 1.1 MB, 1.2 % apart"
    assert str(line("exchanged", fields | {"distance": 1.1})).endswith(" 110 % apart")


def test_weights_that_were_taken_and_what_was_lost_on_the_way() -> None:
    fields = {"donors": 3, "pieces": 12, "broke_off": 0, "asked_again": 0, "size_bytes": 5_600_000, "seconds": 24.04}
    whole = "[join] got 5.6 MB of weights from 3 peers in 24.0 s"
    assert line("took weights", fields) == whole
    lost = line("took weights", fields | {"broke_off": 1, "asked_again": 2})
    assert lost == f"{whole}; lost donors: 1, repeated requests: 2 of 12"


def test_progress_and_its_plurals() -> None:
    assert line("progress", PROGRESS) == (
        "[train] 34 % · 53.1 s left · loss 2.500 · 20,346 tokens/s, 61 % here · 11 exchanges · 1 other peer · this "
        "computer shortens the run by 2.0 h · step 1,234 · 345,000 of 1,000,000 tokens"
    )
    alone = {"swarm_tokens_per_s": 12345.6, "shortened_s": None}
    assert "2.500 · 12,346 tokens/s · 11 exchanges · 1" in str(line("progress", PROGRESS | alone))
    assert "0 other peers" in str(line("progress", PROGRESS | {"peers": 0}))
    assert "left" not in str(line("progress", PROGRESS | {"remaining_s": 0.0}))
    names = ("swarm_tokens_per_s", "remaining_s", "shortened_s")
    unmeasured = str(line("progress", {name: value for name, value in PROGRESS.items() if name not in names}))
    assert not any(part in unmeasured for part in ("left", "tokens/s", "shortens"))


def test_a_busy_swarm_fits_into_80_columns_up_to_the_exchanges() -> None:
    busy = PROGRESS | {"remaining_s": 96_000.0, "swarm_tokens_per_s": 120_000.0, "exchanges_ok": 1_240}
    terminal = Terminal(is_terminal=True, width=80)
    with terminal.screen:
        shown = terminal.shows("progress", **busy)
    assert shown == "34 % · 26.7 h left · loss 2.500 · 120,000 tokens/s, 10 % here · 1,240 exchanges"


def test_the_share_of_a_computer() -> None:
    told = line("share", {"tokens": 812_000, "progress": 2_400_000.5, "exchanges_ok": 1_214})
    assert told == (
        "[train] this computer trained 812,000 tokens, about 34 % of those of all peers, in 1,214 exchanges"
    )


def test_a_text_that_is_read_many_times_is_a_warning() -> None:
    assert line("text repeats", {"why": "the text is small. More text helps"}) == "[data] warning: the text is small"


def test_no_loss_is_shown_before_there_is_one() -> None:
    assert "loss" not in str(line("progress", {name: value for name, value in PROGRESS.items() if name != "loss"}))


def test_stopping_says_what_happens_now() -> None:
    assert "saving" in str(line("stopping", {"signal": "SIGINT", "training": True}))
    assert "saving" not in str(line("stopping", {"signal": "SIGINT", "training": False}))


@pytest.mark.parametrize("kind", ["skipped", "failed", "broke protocol", "lost", "alone", "p2pd died", "finished"])
def test_a_reason_is_always_given(kind: str) -> None:
    assert "no reason given" in str(line(kind, {"peer": PEER}))
    assert "busy" in str(line(kind, {"peer": PEER, "why": "busy"}))


def test_notes_for_the_log_alone() -> None:
    assert line("refused", {"peer": PEER}) is None


@given(text=st.text())
@settings(max_examples=50)
def test_a_line_is_one_line_of_printable_text(text: str) -> None:
    shown = line("failed", {"peer": PEER, "why": text})
    assert shown is not None
    assert shown.isprintable()


def test_printable_text_passes_unchanged() -> None:
    assert printable("Grüße, 世界 · [ok]") == "Grüße, 世界 · [ok]"


class Terminal:
    """A screen whose clock the test moves, on a terminal or in a file, and what it wrote."""

    def __init__(self, is_terminal: bool, width: int = 200, verbose: bool = False) -> None:
        self.out, self.now = io.StringIO(), 0.0
        self.console = Console(
            file=self.out,
            force_terminal=is_terminal,
            width=width,
            emoji=False,
            highlight=False,
            soft_wrap=True,
            _environ={"TERM": "xterm"},
        )
        self.screen = Screen(self.console, verbose, lambda: self.now)

    def shows(self, kind: str, **fields: Any) -> str:
        """Return what the screen writes for a note, without control sequences."""
        before = len(self.out.getvalue())
        self.screen.show(kind, fields)
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", self.out.getvalue()[before:])


STATUS = str(line("progress", PROGRESS)).removeprefix("[train] ")


def shown_on(is_terminal: bool, notes: list[tuple[str, dict[str, Any]]]) -> str:
    terminal = Terminal(is_terminal)
    with terminal.screen as screen:
        for kind, fields in notes:
            screen.show(kind, fields)
    return terminal.out.getvalue()


def test_an_activity_is_one_line_on_a_terminal_and_in_a_log_one_now_and_then() -> None:
    terminal = Terminal(is_terminal=True)
    with ActivityLine(terminal.console) as activity:
        for done in "1 of 9", "2 of 9":
            activity.tell("reading", done)
        assert "reading: 2 of 9" in terminal.out.getvalue()
        assert "\n" not in terminal.out.getvalue()
    assert terminal.out.getvalue().endswith("\x1b[2K")  # it leaves no line behind
    log = Terminal(is_terminal=False)
    with ActivityLine(log.console, lambda: log.now) as activity:
        for log.now in range(25):
            activity.tell("reading", f"{log.now:.0f} of 25")
        activity.tell("writing")
    assert log.out.getvalue().splitlines() == ["reading: 0 of 25", "reading: 10 of 25", "reading: 20 of 25", "writing"]


def test_hostile_words_reach_no_terminal() -> None:
    plain = shown_on(False, [("lost", {"peer": PEER, "why": HOSTILE})])
    assert plain.count("\n") == 1
    assert plain.rstrip("\n").isprintable()
    assert "[bold red]markup[/] [/nothing] :skull:" in plain
    on_terminal = shown_on(True, [("lost", {"peer": PEER, "why": HOSTILE})])
    assert "\x1b]0;" not in on_terminal
    assert "\x1b[2J" not in on_terminal
    assert "[bold red]markup[/] [/nothing] :skull:" in on_terminal


def test_a_status_line_on_a_terminal_is_renewed_and_news_stands_above() -> None:
    terminal = Terminal(is_terminal=True)
    with terminal.screen:
        for _ in range(3):
            assert "\n" not in (shown := terminal.shows("progress", **PROGRESS))
            assert shown == STATUS
        news, status = terminal.shows("lost", peer=PEER, why="gone").splitlines()
        assert (news, status) == (f"[peers] lost {PEER[-6:]}: gone", STATUS)
    assert terminal.out.getvalue().endswith("\x1b[2K")  # it leaves no status line behind


@pytest.mark.parametrize(
    ("width", "last"),
    [
        *((20, "53.1 s left"), (60, "61 % here"), (80, "11 exchanges")),
        *((100, "1 other peer"), (140, "by 2.0 h")),
    ],
)
def test_a_status_line_has_the_parts_that_fit_the_width_that_the_terminal_has_now(width: int, last: str) -> None:
    terminal = Terminal(is_terminal=True, width=200)
    with terminal.screen:
        assert "step" in terminal.shows("progress", **PROGRESS)
        terminal.console.width = width
        shown = terminal.shows("progress", **PROGRESS)
        assert shown == STATUS.partition(last)[0] + last


def test_a_status_line_of_one_long_part_is_cut() -> None:
    terminal = Terminal(is_terminal=True, width=20)
    with terminal.screen:
        shown = terminal.shows("paused", why="by its owner")
        assert "\n[owner] paused: by …" in f"\n{shown}"


def test_a_dumb_terminal_gets_lines() -> None:
    terminal = Terminal(is_terminal=True)
    dumb = Console(file=terminal.out, force_terminal=True, _environ={"TERM": "dumb"}, soft_wrap=True)
    with Screen(dumb) as screen:
        screen.show("progress", PROGRESS)
    assert terminal.out.getvalue() == f"{line('progress', PROGRESS)}\n"


def test_the_status_line_says_why_a_peer_rests() -> None:
    terminal = Terminal(is_terminal=True)
    with terminal.screen:
        terminal.shows("paused", why="by its owner")
        assert terminal.shows("progress", **PROGRESS) == ""
        assert "paused: by its owner" in terminal.shows("found", peer=PEER)
        terminal.shows("goes on", step=1, tokens=1)
        assert terminal.shows("progress", **PROGRESS) == STATUS


def test_shown_progress_never_falls() -> None:
    """Check progress that falls a little, as averaging with peers behind does."""
    terminal = Terminal(is_terminal=True)
    with terminal.screen:
        assert "2 % " in terminal.shows("progress", **(PROGRESS | {"fraction": 0.016}))
        assert "2 % " in terminal.shows("progress", **(PROGRESS | {"fraction": 0.014}))
        assert "3 % " in terminal.shows("progress", **(PROGRESS | {"fraction": 0.03}))


def test_a_start_after_the_end_says_so() -> None:
    fields = {"device": "cpu", "parameters": 5, "loss": 1.583, "read": 64, "of": 64, "ended": True, "seconds": 140.0}
    over = "[train] this run is over on this peer: held-out loss 1.583"
    assert line("started", fields | {"seconds": 0.0}) == over
    more = "it looks for others, exchanges with them, gives its weights to newcomers, and ends within 2 min"
    assert line("started", fields) == f"{over}; {more}"
    log = Terminal(is_terminal=False)
    assert [bool(log.shows("saved", path="here")) for _ in range(2)] == [True, False]
    log.shows("started", **fields)
    assert log.shows("saved", path="here") == "[save] saved here\n"  # it is the last one


def test_without_a_terminal_there_is_a_line_of_progress_a_minute() -> None:
    log = Terminal(is_terminal=False)
    told = [log.shows("progress", **PROGRESS) for log.now in range(0, 180, 2)]
    assert [at for at, text in enumerate(told) if text] == [0, 30, 60]
    assert log.shows("saved", path="here") == "[save] saved here\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_news_is_what_changed(is_terminal: bool) -> None:
    terminal = Terminal(is_terminal)
    exchange = {"peer": PEER, "seconds": 0.8, "distance": 0.01}
    other = PEER[:-1] + "x"
    assert terminal.shows("exchanged", **exchange)
    assert not terminal.shows("exchanged", **exchange)
    assert not terminal.shows("skipped", peer=PEER, why="busy")
    for why in (MISFIT, "it broke", "it broke", MISFIT):
        assert not terminal.shows("failed", peer=PEER, why=why)
    assert not terminal.shows("failed", peer=PEER, why="failed to dial: dial backoff")
    assert terminal.shows("failed", peer=PEER, why="it broke")
    assert not terminal.shows("failed", peer=PEER, why="it broke again")
    assert terminal.shows("failed", peer=other, why="it broke")
    for place in "a:1", "b:2":
        assert terminal.shows("no manifest", peer=PEER, where=place, why="no answer")
        assert not terminal.shows("no manifest", peer=PEER, where=place, why="no answer")
        assert terminal.shows("no manifest", peer=PEER, where=place, why="another run")
    assert terminal.shows("waiting", why="nobody answers", seconds=2.0, remedy="Wait.")
    assert not terminal.shows("waiting", why="nobody answers", seconds=3.0, remedy="Wait.")
    terminal.now += REPEAT_S
    assert terminal.shows("waiting", why="nobody answers", seconds=30.0, remedy="Wait.")
    assert terminal.shows("failed", peer=PEER, why="it broke")
    assert terminal.shows("exchanged", **exchange)  # exchanges go on
    assert not terminal.shows("exchanged", **exchange)
    terminal.now += REPEAT_S
    assert not terminal.shows("failed", peer=PEER, why="the link is closed")
    for _ in range(2):
        assert terminal.shows("found", peer=PEER)
        assert terminal.shows("lost", peer=PEER)
        assert terminal.shows("not saved", what="a checkpoint", why="the disk is full")


def test_saves_are_news_now_and_then_and_always_at_the_end() -> None:
    log = Terminal(is_terminal=False)
    assert [bool(log.shows("saved", path="here")) for log.now in range(0, 1200, 120)] == [True, *[False] * 4] * 2
    log.shows("stopping", signal="SIGINT", training=True)
    assert log.shows("saved", path="here") == "[save] saved here\n"


def test_verbose_shows_every_exchange() -> None:
    terminal = Terminal(is_terminal=False, verbose=True)
    assert terminal.shows("failed", peer=PEER, why=MISFIT)
    for kind in ("exchanged", "skipped", "failed", "gave weights", "saved") * 2:
        assert terminal.shows(kind, peer=PEER, path="here")


def test_paths_with_spaces_are_quoted() -> None:
    assert line("saved", {"path": "/my runs/peer/step-7"}) == "[save] saved '/my runs/peer/step-7'"
    torn = line("torn checkpoint", {"path": "/my runs/step-7", "why": "it is empty"})
    assert torn == "[train] skipped the damaged checkpoint '/my runs/step-7': it is empty"


def test_printed_commands_can_be_pasted() -> None:
    assert str(line("still paused", {"home": "/home/me/my peer's"})).endswith(
        """p2ptrain resume '/home/me/my peer'"'"'s'"""
    )
