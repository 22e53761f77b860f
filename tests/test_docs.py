"""The documents stay true: docs/ERRORS.md lists what the code can say, and the links between documents lead somewhere.

A message is compared as a template: its fixed words, with ``…`` for whatever is filled in. The tables of ERRORS.md have
the template, in backquotes, in their first column.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2ptrain import errors
from p2ptrain.admission import Refusal
from p2ptrain.framing import MAX_BODY_BYTES, FrameKind
from p2ptrain.ids import PROTOCOL_VERSION
from p2ptrain.manifest import preset
from p2ptrain.manifest.document import parse_data
from p2ptrain.manifest.model import MAX_PARAMETERS, DecoderConfig, GroupedConfig
from p2ptrain.manifest.sources import FileCorpus, HubCorpus
from p2ptrain.net.links import EXCHANGE_PROTOCOL
from p2ptrain.swarm import DeclineReason
from p2ptrain.wire import _MESSAGES, MAX_FRAGMENTS, MAX_KNOWN, MAX_PRESENCE_BYTES
from peer import lines

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ERRORS = (DOCS / "ERRORS.md").read_text(encoding="utf-8")

FAKES = {ROOT / "p2ptrain/net/memory.py", ROOT / "p2ptrain/sim/network.py"}
"""What only tests and simulations see."""

PASSED_ON = "…"
"""The template of a message that is somebody else's: an exception's text, a list of faults."""

SOURCES = [
    path
    for package in ("p2ptrain", "peer", "bootstrap")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path not in FAKES
]

CLASSES = {name for name, kind in vars(errors).items() if isinstance(kind, type)}


def template(node: ast.expr) -> str:
    """The fixed words of a message, ``…`` where something is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(template(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
        case ast.BoolOp(values=[*_, last]):  # `why or "it replied twice"`
            return template(last)
        case ast.Call(func=ast.Attribute(attr="join"), args=[ast.List(elts=[first, *_])]):
            return template(first)  # the first of several lines
        case _:
            return PASSED_ON


def tidy(text: str) -> str:
    return re.sub("…+", "…", " ".join(text.split()))


def calls(source: str) -> Iterator[ast.Call]:
    yield from (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and node.args)


def messages(source: str) -> set[str]:
    """The templates of every error of ours, and of every failure that the protocol core names."""
    found = set()
    for call in calls(source):
        match call:
            case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in CLASSES:
                found.add(tidy(template(first)))
            case ast.Call(func=ast.Name(id="LinkFailed" | "Unfit"), args=[_, why, *_]):
                found.add(tidy(template(why)))
            case ast.Call(func=ast.Attribute(attr="_violation"), args=[_, why, *_]):
                found.add(tidy(template(why)))
    return found - {PASSED_ON}


def kinds(source: str) -> set[str]:
    """The kinds of all notes."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(attr="note"), args=[ast.Constant(value=str(kind)), *_]):
                found.add(kind)
            case ast.Call(func=ast.Attribute(attr="note"), args=[ast.IfExp(body=one, orelse=other), *_]):
                found |= {template(one), template(other)}
            case ast.Call(func=ast.Name(id="Note"), keywords=keywords):
                found |= {template(each.value) for each in keywords if each.arg == "kind"}
    return found - {PASSED_ON}


REASONING = ("why_over", "why_none", "implausible_progress", "_be_away")
"""Functions that return a reason for people, or nothing."""


def sides(node: ast.expr) -> list[ast.expr]:
    return [*sides(node.body), *sides(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def reasons(source: str) -> set[str]:
    """The templates of what is told beside a note, an end, a verdict or a dial, and of the bootstrap's lines."""
    told: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="Verdict"), args=[_, why, *_]):
                told.append(why)
            case ast.Call(func=ast.Attribute(attr="note"), args=[_, _, why, *_]):
                told.append(why)
            case ast.Call(func=ast.Attribute(attr="_leave"), args=[_, why]):
                told.append(why)
            case ast.Call(func=ast.Name(id="say") | ast.Attribute(attr="_say"), args=[_, text]):
                told.append(text)
            case ast.Return(value=ast.Tuple(elts=[ast.Attribute(value=ast.Name(id="Dialed")), why])):
                told.append(why)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name in REASONING:
                told += [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "note":
            told += [each.value for each in node.keywords if each.arg == "why"]
    found = {tidy(template(side)) for each in told for side in sides(each)}
    return {each for each in found if re.search("[a-z]{2}", each)}


def first_cells(text: str) -> list[str]:
    """What stands in backquotes in the first column of the document's tables."""
    return re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE)


ALL_MESSAGES = {message: path for path in SOURCES for message in messages(path.read_text(encoding="utf-8"))}
ALL_REASONS = {why: path for path in SOURCES for why in reasons(path.read_text(encoding="utf-8"))}
ALL_KINDS = {kind: path for path in SOURCES for kind in kinds(path.read_text(encoding="utf-8"))}


def test_the_collectors_see() -> None:
    source = """
    raise HomeError(f"{path} is {a}{b} " "gone.", "x")
    fail(LinkFailed(link, why or f"no {x}", their_fault=True))
    raise ManifestError("\\n".join([f"{file} was edited:", *rows]), "y")
    raise NetworkError(str(error))
    return [Unfit(link, f"worth {x}")]
    self._violation(link, "out of turn", now)
    self._standing.note("bad" if fault else "sad", peer)
    emit(Note(kind="good", peer=link.peer))
    """
    code = "\n".join(line.strip() for line in source.splitlines())
    assert messages(code) == {"… is … gone.", "no …", "… was edited:", "worth …", "out of turn"}
    assert kinds(code) == {"bad", "sad", "good"}
    source = """
    def why_over(self):
        return "one" if a else f"two {b}" if c else ""
    def other(self):
        return "unseen"
    self._standing.note("slept", peer, f"for {seconds} s")
    self._notebook.note("slept", why=f"{x} is tired")
    self._notebook.note("slept", why=f"{x} s")
    return Verdict(Wish.ALONE, f"{used} is used")
    return Dialed.NO, "nobody there"
    say("peers", f"{n} here")
    self._leave(now, "asked to")
    """
    code = "\n".join(line.removeprefix("    ") for line in source.splitlines())
    told = {"one", "two …", "for … s", "… is tired", "… is used", "nobody there", "… here", "asked to"}
    assert reasons(code) == told
    assert len(ALL_MESSAGES) > 100
    assert len(ALL_REASONS) > 40
    assert len(ALL_KINDS) > 20


@pytest.mark.parametrize("message", sorted(ALL_MESSAGES))
def test_every_message_is_explained(message: str) -> None:
    path = ALL_MESSAGES[message].relative_to(ROOT)
    assert message in first_cells(ERRORS), f"docs/ERRORS.md lacks a row that begins | `{message}` | ({path} says it)"


@pytest.mark.parametrize("why", sorted(ALL_REASONS))
def test_every_reason_is_explained(why: str) -> None:
    path = ALL_REASONS[why].relative_to(ROOT)
    assert why in first_cells(ERRORS), f"docs/ERRORS.md lacks a row that begins | `{why}` | ({path} says it)"


@pytest.mark.parametrize("kind", sorted(ALL_KINDS | lines._LINES))
def test_every_note_is_explained(kind: str) -> None:
    assert kind in first_cells(ERRORS), f"docs/ERRORS.md lacks a row that begins | `{kind}` |"


@pytest.mark.parametrize("reason", DeclineReason)
def test_every_reason_to_decline_is_explained(reason: DeclineReason) -> None:
    assert reason.value in first_cells(ERRORS)


@pytest.mark.parametrize("reason", Refusal)
def test_every_reason_to_let_nobody_in_is_explained(reason: Refusal) -> None:
    assert reason.value in first_cells(ERRORS)


def test_nothing_is_explained_that_nobody_says() -> None:
    said = {*ALL_MESSAGES, *ALL_REASONS, *ALL_KINDS, *lines._LINES, *(reason.value for reason in DeclineReason)}
    text = " ".join(path.read_text(encoding="utf-8") for path in SOURCES)
    stale = [cell for cell in first_cells(ERRORS) if cell not in said and f'"{cell}"' not in text]
    assert stale == []


def test_every_line_is_for_a_note_that_exists() -> None:
    assert set(lines._LINES) <= set(ALL_KINDS)


DOCUMENTS = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8"))
    missing = [each for each in targets if "://" not in each and not (document.parent / each).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_functions_that_are_named_exist(document: Path) -> None:
    """``path/to/file.py`` exists, and so does ``file.py:name`` in it."""
    named = re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", document.read_text(encoding="utf-8"))
    for file, name in named:
        homes = [base / file for base in (ROOT, ROOT / "p2ptrain") if (base / file).exists()]
        assert homes, f"{document.name} names {file}, which is not there"
        last = name.rpartition(".")[2]
        if last:
            source = homes[0].read_text(encoding="utf-8")
            defined = rf"^\s*(async def|def|class) {last}\b|^\s*{last}\b\s*[:=]"
            assert re.search(defined, source, flags=re.MULTILINE), f"{document.name} names {file}:{name}"


def test_the_wire_format_is_told_as_it_is() -> None:
    protocol = (DOCS / "PROTOCOL.md").read_text(encoding="utf-8")
    for kind in FrameKind:
        assert re.search(
            rf"^\| {kind.value} \| `{kind.name}` \|.*\| {MAX_BODY_BYTES[kind]:,} \|", protocol, re.MULTILINE
        )
    for tag, (message, _) in _MESSAGES.items():
        assert re.search(rf"^\| {tag} \| `{message.__name__}` \|", protocol, re.MULTILINE)
    for cap in (MAX_KNOWN, MAX_PRESENCE_BYTES, MAX_FRAGMENTS):
        assert f"{cap:,}" in protocol
    assert f"in which order. Version {PROTOCOL_VERSION}." in protocol
    assert f"| `{EXCHANGE_PROTOCOL}` |" in protocol


def tables(document: str) -> list[dict[str, dict[str, object]]]:
    """The manifest's tables that a document shows."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return [tomllib.loads(each) for each in re.findall(r"^```toml\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)]


@pytest.mark.parametrize("document", ["README.md", "docs/DATA.md"])
def test_tables_of_a_manifest_that_are_shown_are_taken(document: str) -> None:
    shown = tables(document)
    assert {section for each in shown for section in each} == {"corpus", "tokenizer"}
    for each in shown:
        manifest = preset("llama-135m", "0" * 64).model_dump() | each
        parsed = parse_data(manifest).model_dump()
        assert all(parsed[section] | table == parsed[section] for section, table in each.items())


def test_every_field_of_a_corpus_and_every_architecture_is_told() -> None:
    told = (DOCS / "DATA.md").read_text(encoding="utf-8")
    for section in (HubCorpus, FileCorpus, DecoderConfig, GroupedConfig):
        for name, field in section.model_fields.items():
            assert f"`{name}`" in told or name == "kind", name
            if isinstance(field.default, int | float):
                assert f"| {field.default:,} |" in told, name
    for architecture in re.findall(
        r'Literal\["(\w+(?:LM|HeadModel))"\]', (ROOT / "p2ptrain/manifest/model.py").read_text()
    ):
        assert f"`{architecture}`" in told
    assert f"{MAX_PARAMETERS:,} parameters" in told
