"""Messages of libraries appear on the terminal as short, printable lines, in bounded number."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from p2ptrain.base import logging_setup
from p2ptrain.base.logging_setup import (
    MOST_A_PERIOD,
    MOST_LINES,
    PERIOD_S,
    RateLimitedHandler,
    logging_installed,
    one_line,
    reporting,
)
from p2ptrain.base.text import MOST_CHARS

EVIL = "\x1b]0;yours\x07\x1b[2J\r\n[peer] all is well\n"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def library(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """Return a logger below ``hivemind``, which prints nothing itself, in a process that shows its messages."""
    monkeypatch.setattr(logging_setup, "RateLimitedHandler", lambda: RateLimitedHandler(clock))
    monkeypatch.setattr(logging.getLogger("hivemind"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("hivemind"), "propagate", True)
    with logging_installed():
        yield logging.getLogger("hivemind.p2p.some")


def test_strangers_words_are_one_short_printable_line(
    library: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    library.warning(f"Protocol {EVIL * 100_000} not supported")
    library.warning("Protocol %s not supported", EVIL)
    library.info("nothing to speak of")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(each.isprintable() and len(each) <= MOST_CHARS for each in lines)
    assert lines[0].startswith("[hivemind.p2p.some] Protocol �]0;yours��[2J")
    assert lines[1].endswith("not supported")


def test_our_own_are_named_by_their_module(library: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("p2ptrain.net.directory").warning("the peer cache is unreadable")
    assert capsys.readouterr().err == "[directory] the peer cache is unreadable\n"


def test_a_traceback_keeps_its_end(library: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    def even(depth: int) -> None:
        odd(depth - 1)

    def odd(depth: int) -> None:  # two parameters, since Python abbreviates repeated lines of one frame
        if depth < 0:
            raise ValueError(EVIL)
        even(depth - 1)

    try:
        even(100)
    except ValueError:
        library.exception("Handler failed")
    lines = capsys.readouterr().err.split("\n")
    assert lines[0] == "[hivemind.p2p.some] Handler failed"
    assert len(lines) <= 1 + MOST_LINES + 1
    assert any("raise ValueError(EVIL)" in each for each in lines)
    assert all(each.isprintable() and len(each) <= MOST_CHARS for each in lines)


def test_so_many_a_minute_are_shown(library: logging.Logger, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(MOST_A_PERIOD + 5):
        library.error("again")
    assert capsys.readouterr().err.count("again") == MOST_A_PERIOD
    clock.now += PERIOD_S
    library.error("later")
    assert capsys.readouterr().err.splitlines() == [
        "[p2ptrain] 5 more messages were not shown",
        "[hivemind.p2p.some] later",
    ]


def test_what_a_library_prints_by_itself_is_not_printed_twice(
    library: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("hivemind.p2p"), "handlers", [logging.NullHandler()])
    library.warning("once")
    assert capsys.readouterr().err == ""


def test_what_cannot_be_printed_is_lost_and_harms_nobody(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = RateLimitedHandler()
    terminal.handle(logging.LogRecord("some", logging.ERROR, "", 0, "%d", ("no number",), None))
    monkeypatch.setattr(sys, "stderr", None)  # closed since the process started
    terminal.handle(logging.LogRecord("some", logging.ERROR, "", 0, "unheard", None, None))
    monkeypatch.undo()
    assert capsys.readouterr() == ("", "")


def test_outside_nothing_is_left() -> None:
    before = list(logging.getLogger().handlers)
    with logging_installed():
        assert len(logging.getLogger().handlers) == len(before) + 1
    assert logging.getLogger().handlers == before


def test_a_line_that_fits_is_whole() -> None:
    assert one_line("x" * MOST_CHARS) == "x" * MOST_CHARS
    assert one_line("x" * MOST_CHARS + "y") == "x" * (MOST_CHARS - 1) + "…"


def test_a_task_that_nobody_waits_for_does_not_die_unseen() -> None:
    told: list[dict[str, Any]] = []
    fault = ValueError("a bug")

    async def fail() -> None:
        raise fault

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        failing, going_on = asyncio.create_task(fail()), asyncio.create_task(asyncio.Event().wait())
        for task in (failing, going_on):
            task.add_done_callback(reporting("the keeper"))
        going_on.cancel()
        await asyncio.wait([failing, going_on])
        await asyncio.sleep(0)

    asyncio.run(run())
    assert told == [{"message": "the keeper failed", "exception": fault}]
