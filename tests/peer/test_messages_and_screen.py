"""Notes as people see them, with strangers' text in them."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from p2ptrain.base.text import printable
from peer.messages import line, size
from peer.screen import Screen

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
PROGRESS: dict[str, Any] = {
    "step": 12,
    "fraction": 0.345,
    "loss": 2.5,
    "tokens_per_s": 12345.6,
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


def test_weights_that_were_taken_and_what_was_lost_on_the_way() -> None:
    fields = {"donors": 3, "pieces": 12, "broke_off": 0, "asked_again": 0, "size_bytes": 5_600_000, "seconds": 24.04}
    whole = "[join] got 5.6 MB of weights from 3 peers in 24.0 s"
    assert line("took weights", fields) == whole
    lost = line("took weights", fields | {"broke_off": 1, "asked_again": 2})
    assert lost == f"{whole}; lost donors: 1, repeated requests: 2 of 12"


def test_progress_and_its_plurals() -> None:
    assert line("progress", PROGRESS) == (
        "[train] step 12 · 34 % · loss 2.500 · 12,346 tokens/s · 1 other peer · 11 exchanges"
    )
    assert "0 other peers" in str(line("progress", PROGRESS | {"peers": 0}))


def test_what_a_tokenizer_loses_is_a_warning() -> None:
    assert line("text differs", {"why": "3.0% are unknown"}) == "[data] warning: 3.0% are unknown"
    assert line("text repeats", {"why": "the text is small"}) == "[data] warning: the text is small"


def test_how_far_the_tokens_are() -> None:
    said = "[data] tokenizing the run's text, once on this computer: 1,200"
    assert line("tokenizing", {"tokens": 1200, "most": 5000}) == f"{said} of at most 5,000 tokens"
    assert line("tokenizing", {"tokens": 1200, "most": None}) == f"{said} tokens"


def test_what_was_read_names_the_rows_that_were_skipped() -> None:
    fields = {"documents": 1200, "bytes": 3_200_000, "tokens": 3_201_200, "rows": 1207, "skipped": 0, "examples": []}
    said = "[data] the run's text: 1,200 documents, 3.2 MB, 3,201,200 tokens"
    assert line("text read", fields) == said
    fields |= {"skipped": 7, "examples": ["line 3: invalid JSON", "line 9: invalid UTF-8"]}
    some = "line 3: invalid JSON; line 9: invalid UTF-8; and 5 more"
    assert line("text read", fields) == f"{said}; skipped 7 of 1,207 rows, which have no text ({some})"


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
@settings(max_examples=50, deadline=None)
def test_a_line_is_one_line_of_printable_text(text: str) -> None:
    shown = line("failed", {"peer": PEER, "why": text})
    assert shown is not None
    assert shown.isprintable()


def test_printable_text_passes_unchanged() -> None:
    assert printable("Grüße, 世界 · [ok]") == "Grüße, 世界 · [ok]"


def shown_on(terminal: bool, notes: list[tuple[str, dict[str, Any]]]) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, emoji=False, highlight=False, soft_wrap=True)
    with Screen(console) as screen:
        for kind, fields in notes:
            screen.show(kind, fields)
    return out.getvalue()


def test_hostile_words_reach_no_terminal() -> None:
    plain = shown_on(False, [("failed", {"peer": PEER, "why": HOSTILE})])
    assert plain.count("\n") == 1
    assert plain.rstrip("\n").isprintable()
    assert "[bold red]markup[/] [/nothing] :skull:" in plain
    on_terminal = shown_on(True, [("failed", {"peer": PEER, "why": HOSTILE})])
    assert "\x1b]0;" not in on_terminal
    assert "\x1b[2J" not in on_terminal
    assert "[bold red]markup[/] [/nothing] :skull:" in on_terminal


def test_a_progress_bar_on_a_terminal() -> None:
    shown = shown_on(True, [("progress", PROGRESS)])
    assert "[train] step 12 · 34 %" in shown


def test_plain_progress_is_not_a_flood() -> None:
    shown = shown_on(False, [("progress", PROGRESS)] * 20 + [("saved", {"path": "here"})])
    assert shown.splitlines() == [line("progress", PROGRESS), "[save] here"]


def test_printed_commands_can_be_pasted() -> None:
    assert str(line("still paused", {"home": "/home/me/my peer's"})).endswith(
        """p2ptrain resume '/home/me/my peer'"'"'s'"""
    )
