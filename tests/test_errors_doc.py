"""docs/ERRORS.md lists what the code can say when something is not as it should be, and nothing that it does not say.

A text is compared as a template: its fixed words, with ``…`` for whatever is filled in (``told`` says where texts are
looked for). The tables of ERRORS.md have the template, in backquotes, in their first column.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from told import P2PDS, kinds_in, signatures_of, told_in

from p2ptrain.admission import Refusal
from p2ptrain.swarm import DeclineReason
from peer import lines

ROOT = Path(__file__).parent.parent
ERRORS = (ROOT / "docs/ERRORS.md").read_text(encoding="utf-8")

FAKES = {ROOT / "p2ptrain/net/memory.py", ROOT / "p2ptrain/sim/network.py"}
"""What only tests and simulations see."""

SOURCES = {
    path: path.read_text(encoding="utf-8")
    for package in ("p2ptrain", "peer", "bootstrap")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path not in FAKES
}
SIGNATURES = signatures_of(SOURCES.values())


def first_cells(text: str) -> list[str]:
    """What stands in backquotes in the first column of the document's tables."""
    return re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE)


CELLS = first_cells(ERRORS)
PAGE = ROOT / "p2ptrain" / "page" / "static"


def told_by_the_page(source: str) -> set[str]:
    """The sentences that a script of the page has a name for."""
    return set(re.findall(r'^ *const [A-Z]+ = "([A-Z][^"]* [^"]*)";', source, flags=re.MULTILINE))


def told_by_a_container(source: str) -> set[str]:
    """What a script complains of, with … for what is filled in."""
    complaints = re.findall(r'\becho((?:\s+(?:\\\n\s*)?"[^"]*")+)\s*>&2', source)
    joined = {" ".join(re.findall(r'"([^"]*)"', each)) for each in complaints}
    return {re.sub(r"\$\w+", "…", re.sub(r"\$\{\w+:\+([^}]*)\}", r"…\1", each)) for each in joined}


SCRIPTS: dict[Path, set[str]] = {
    **{
        path: told_by_the_page(path.read_text("utf-8"))
        for path in sorted(PAGE.glob("*.js"))
        if ".min." not in path.name
    },
    **{path: told_by_a_container(path.read_text("utf-8")) for path in sorted((ROOT / "docker").glob("*.sh"))},
}
TOLD = {text: path for path, source in SOURCES.items() for text in told_in(source, SIGNATURES)}
KINDS = {kind: path for path, source in SOURCES.items() for kind in kinds_in(source)}


def collected(source: str) -> set[str]:
    """From a made source, beside the real ones."""
    return told_in(textwrap.dedent(source), SIGNATURES)


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ('raise HomeError(f"{path} is {a}{b} " "gone.", "a remedy")', {"… is … gone."}),
        ('raise ManifestError("\\n".join([f"{file} was edited:", *rows]), "x")', {"… was edited:"}),
        ("raise NetworkError(str(error))", set()),
        ('return NetworkError(why or f"no {x}")', {"no …"}),
        ('fail(LinkFailed(link, why or f"no {x}", their_fault=True))', {"no …"}),
        ('found = [Unfit(link, f"worth {x}")]', {"worth …"}),
        ('self._violation(link, "out of turn", now)', {"out of turn"}),
        ('self._standing.note("slept", peer, f"for {seconds} s long")', {"for … s long"}),
        ('self._notebook.note("slept", why=f"{x} is tired")', {"… is tired"}),
        ('self._leave(now, "asked to")', {"asked to"}),
        ('verdict = Verdict(Wish.ALONE, f"{used} is used")', {"… is used"}),
        ('say("peers", f"{n} here")', {"… here"}),
        ('say(link, ["look", port])', set()),
        ('return [bad("disk", f"{free} GB are few", "Buy one.")]', {"… GB are few", "Buy one."}),
        ('return note("clock", "late", fix="Set it.")', {"late", "Set it."}),
        ('return skipped("reach", "nobody asked")', {"nobody asked"}),
        ('return ok("disk", "there is room")', set()),
        ('raise click.UsageError(f"{name} needs another.")', {"… needs another."}),
        ('raise click.BadParameter("too large.")', {"too large."}),
        ('self.fail(f"{value!r} is odd.", param, ctx)', {"… is odd."}),
        ('click.echo("Works here only.", err=True)', {"Works here only."}),
        ('click.echo("Next: go on")', set()),
        ('print("not kept", file=sys.stderr)', {"not kept"}),
        ('console.print("it did not come", style="bold red")', {"it did not come"}),
        ('logger.warning("%s is torn", path)', {"… is torn"}),
        ('logger.info("%s came", path)', set()),
        ('self.troubles.append(f"{name} hangs")', {"… hangs"}),
        ('self.missed += [f"{who} at {at} s: over"]', {"… at … s: over"}),
        ('faults.append("codec.block_size: 3 does not divide 4")', set()),
        ('why = next((each.why for each in sights), "it sleeps")', {"it sleeps"}),
        ('if why_not := known.pop(who, "it had gone"): pass', {"it had gone"}),
        ('self.why_unended[host] = "had gone"', {"had gone"}),
        ('view.state, view.why = "joining", "it looks around"', {"it looks around"}),
        ('_REFUSALS: dict[int, str] = {1: "places are taken"}', {"places are taken"}),
        ('answer = {"error": "no such thing", "told": "well"}', {"no such thing"}),
        ('assert place, "a bug"', set()),
        ('raise ValueError("a bug")', set()),
        ('raise RuntimeError("a bug")', set()),
    ],
)
def test_a_text_is_found_where_it_stands(source: str, texts: set[str]) -> None:
    assert collected(source) == texts


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        (
            """
            def why_over(self) -> str | None:
                return "one" if a else f"two {b}" if c else ""
            def other(self) -> str:
                return "unseen"
            """,
            {"one", "two …"},
        ),
        (
            """
            def load(self) -> str:
                '''Read it. Why that failed; empty when it did not.'''
                return "it is damaged"
            """,
            {"it is damaged"},
        ),
        (
            """
            async def begin(self) -> tuple[list[str], bool]:
                '''Start; returns what went wrong.'''
                found = [f"{a} ended" for a in everybody]
                if b:
                    found.append("silence")
                found += ["dust"]
                return found, True
            """,
            {"… ended", "silence", "dust"},
        ),
        (
            """
            def check(port):
                words = f"{port} is taken"
                fix = "Take another." if port else "Name one."
                return note("port", words, fix)
            """,
            {"… is taken", "Take another.", "Name one."},
        ),
        ('FIX = "Call them."\n\ndef check():\n    return bad("x", "gone away", FIX)', {"gone away", "Call them."}),
        (
            """
            async def dial(peer):
                return (Dialed.YES, "") if found == peer else (Dialed.NO, f"somebody else: {found}")
            """,
            {"somebody else: …"},
        ),
        (
            """
            class Objection(StrEnum):
                '''Why it is not signed.'''
                TIMES = "its times do not fit"
            class Color(StrEnum):
                '''Of a line.'''
                RED = "red as a rose"
            """,
            {"its times do not fit"},
        ),
        (
            """
            def parse(text):
                '''Raises ValueError, whose text names the option.'''
                raise ValueError("it holds lists")
            def internal():
                raise ValueError("a bug")
            def changed():
                try:
                    parse(text)
                except ValueError as error:
                    return str(error)
            """,
            {"it holds lists"},
        ),
        (
            """
            def parse(text):
                '''Raises ValueError for what it cannot read.'''
                raise ValueError("nobody hears it")
            def look():
                try:
                    parse(text)
                except ValueError as error:
                    logger.info("came to nothing: %s", error)
                    raise RemoteError("what it sent is no text") from error
            """,
            {"what it sent is no text"},
        ),
    ],
)
def test_a_text_is_followed_through_its_function(source: str, texts: set[str]) -> None:
    assert collected(source) == texts


def test_a_new_parameter_for_a_reason_is_noticed_where_it_is_passed() -> None:
    source = "class Gone:\n    link: int\n    why: str\n\nend = Gone(3, 'it rains')"
    assert told_in(source, signatures_of([source])) == {"it rains"}


def test_kinds_of_notes_are_found() -> None:
    source = """
    self._standing.note("bad" if fault else "sad", peer)
    self._notebook.note("slept", why="x")
    emit(Note(kind="good", peer=link.peer))
    """
    assert kinds_in(textwrap.dedent(source)) == {"bad", "sad", "slept", "good"}


def test_the_sources_are_read() -> None:
    assert len(TOLD) > 500
    assert len(SCRIPTS[PAGE / "live.js"]) >= 5
    assert len(SCRIPTS[ROOT / "docker" / "line.sh"]) >= 3
    assert len(KINDS) > 50


@pytest.mark.parametrize("text", sorted(TOLD))
def test_every_text_is_explained(text: str) -> None:
    path = TOLD[text].relative_to(ROOT)
    assert text in CELLS, f"docs/ERRORS.md lacks a row that begins | `{text}` | ({path} says it)"


@pytest.mark.parametrize("text", sorted(set().union(*SCRIPTS.values())))
def test_every_text_of_the_page_and_of_containers_is_explained(text: str) -> None:
    assert text in CELLS, f"docs/ERRORS.md lacks a row that begins | `{text}` |"


@pytest.mark.parametrize("kind", sorted(KINDS | lines._LINES))
def test_every_note_is_explained(kind: str) -> None:
    assert kind in CELLS, f"docs/ERRORS.md lacks a row that begins | `{kind}` |"


@pytest.mark.parametrize("reason", [*DeclineReason, *Refusal])
def test_every_reason_to_decline_or_to_let_nobody_in_is_explained(reason: DeclineReason | Refusal) -> None:
    assert reason.value in CELLS


@pytest.mark.parametrize("words", sorted(P2PDS))
def test_every_word_of_the_network_daemon_is_explained(words: str) -> None:
    assert words in CELLS


def test_nothing_is_explained_that_nobody_says() -> None:
    said = {
        *TOLD,
        *P2PDS,
        *set().union(*SCRIPTS.values()),
        *KINDS,
        *lines._LINES,
        *(reason.value for reason in (*DeclineReason, *Refusal)),
    }
    assert [cell for cell in CELLS if cell not in said] == []


def test_nothing_is_explained_twice() -> None:
    assert sorted({cell for cell in CELLS if CELLS.count(cell) > 1}) == []


def test_every_line_is_for_a_note_that_exists() -> None:
    assert set(lines._LINES) <= set(KINDS)
