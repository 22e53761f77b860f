"""The words of code and documents: one term per concept, one class per name, docstrings that stand alone.

CONTRIBUTING.md has the glossary. ``CONVERTED`` lists the folders whose docstrings follow it.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from docs.generate import ROOT, docstrings, read, sources, unmarked_guesses

CONVERTED = (
    "p2ptrain/*.py",
    "p2ptrain/admission",
    "p2ptrain/base",
    "p2ptrain/codec",
    "p2ptrain/data",
    "p2ptrain/manifest",
    "p2ptrain/net",
    "p2ptrain/outer",
    "p2ptrain/page",
    "sim",
    "p2ptrain/swarm",
    "p2ptrain/train",
    "peer/*.py",
    "peer/doctor",
    "peer/owner",
    "peer/testnet",
    "peer/trained",
    "bootstrap",
    "bench",
    "lab",
    "tests",
)
"""Folders with everything in them, or the modules of one folder. Add one when its docstrings are in plain terms."""

SOURCES = {str(path): read(path) for path in sources()}

TESTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py"))
}

DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]

DEPENDENT = re.compile(r"(?:Of|The same|Who|Whoever|Whose|Whom|So|And|It|Its|They|Their|In which)\b|\.\.\.|…")
"""Beginnings of a docstring that cannot be understood alone."""

REPLACED = {
    r"[Bb]adges?": "membership certificate",
    r"[Rr]ulings": "access list",
    r"[Tt]ickets?": "invite",
    r"[Ww]itness(?:es)?": "invite issuer",
    r"[Dd]oorm[ae]n|[Ee]ntrances?": "admission server or client",
    r"[Ss]helter(?:s|ed)?|[Ss]hores?": "reachability; environment",
    r"[Bb]eds?": "reservation",
    r"[Ll]anes?": "parallel streams",
    r"[Gg]atherers?": "weight download",
    r"[Rr]eins|[Aa]ttendance": "participation",
    r"[Cc]allees?|[Oo]peners?|[Aa]nswerers?": "initiator, responder",
    r"[Aa]llowances?": "rate limit",
    r"[Ll]iars?": "adversarial peer",
    r"[Bb]oasts?": "implausible claim",
    r"[Oo]vertime": "slow-partner penalty",
    r"[Oo]utcry": "event log",
    r"[Mm]etronomes?|[Cc]ohorts?": "step batcher, learner pool",
    r"left alone|leaves? (?:it|them|him|a peer|an address) alone": "backoff",
    r"at the most|at the least": "at most, at least",
    r"for ever": "forever, until",
    r"[Ww]hoever": "anyone who",
    r"(?<![Tt]here )(?:is|are) no (?:messages?|names?|news|notes?|numbers?|offences?|tables?|text|JSON)": "is not a",
}
"""Terms that are not used in prose, each with the term to use. Names in code keep theirs (wire strings, fields)."""


def is_converted(path: str) -> bool:
    """Return whether the docstrings of a source file are among those in plain terms."""
    folder = str(Path(path).parent)
    return any(path.startswith(f"{each}/") or f"{folder}/*.py" == each for each in CONVERTED)


def converted() -> list[tuple[str, str]]:
    """Return path and text of the files, tests included, whose docstrings are in plain terms."""
    return [(path, text) for path, text in {**SOURCES, **TESTS}.items() if is_converted(path)]


def duplicates(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the class names that several files, or one file twice, define; leading underscores do not count."""
    found = defaultdict(list)
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def dependent_docstrings(source: str) -> list[str]:
    """Return the docstrings that begin as a continuation of something else."""
    texts = (each.text.strip() for each in docstrings(ast.parse(source), "", {}))
    return [text for text in texts if DEPENDENT.match(text)]


def prose_of_document(text: str) -> str:
    """Return a document without code, link targets and anchors."""
    text = re.sub(r"^(```|~~~).*?^\1\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)|<[^>]*>", "", text)


def prose_of_source(source: str) -> str:
    """Return the docstrings without code, strings of a protocol, paths and the names of arguments."""
    texts = "\n".join(each.text for each in docstrings(ast.parse(source), "", {}))
    texts = re.sub(r"``.*?``|\"[a-z ]+\"", "", texts, flags=re.DOTALL)
    return re.sub(r"^\s+\w+: |\S*/\S*", "", texts, flags=re.MULTILINE)


def replaced_terms(prose: str) -> list[str]:
    """Return each use of a replaced term, with the term to use."""
    spaced = " ".join(prose.split())
    return [
        f"…{spaced[max(0, hit.start() - 30) : hit.end() + 30]}…: use {term}"
        for pattern, term in REPLACED.items()
        for hit in re.finditer(rf"\b(?:{pattern})\b", spaced)
    ]


def test_the_folders_exist() -> None:
    assert [each for each in CONVERTED if not any((ROOT / each.removesuffix("/*.py")).glob("*.py"))] == []


def test_each_class_has_a_name_of_its_own() -> None:
    assert duplicates(SOURCES) == {}


def test_a_second_class_of_one_name_is_found() -> None:
    assert duplicates({"a.py": "class Pause: ...", "b.py": "def f():\n    class _Pause: ...", "c.py": "Pause = 1"}) == {
        "Pause": ["a.py", "b.py"]
    }


def all_faults(check: Iterable[tuple[str, list[str]]]) -> dict[str, list[str]]:
    return {path: faults for path, faults in check if faults}


def test_docstrings_stand_alone() -> None:
    assert all_faults((path, dependent_docstrings(text)) for path, text in converted()) == {}


@pytest.mark.parametrize("start", ["Of a peer.", "... and back.", "Who sends it.", "Its size.", "The same for bytes."])
def test_a_docstring_that_leans_on_another_is_found(start: str) -> None:
    assert dependent_docstrings(f'SIZE = 1\n"""{start}"""') == [start]
    assert dependent_docstrings(f'class Box:\n    """Box."""\n\n    def f(self):\n        """{start}"""') == [start]


def test_a_docstring_that_stands_alone_passes() -> None:
    assert dependent_docstrings('"""Whole weights, often."""\nSIZE = 1\n"""Items, official."""') == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_use_the_terms_of_the_glossary(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    if document.name == "CONTRIBUTING.md":
        text = text.partition("## Glossary")[0]  # which lists the replaced terms
    assert replaced_terms(prose_of_document(text)) == []


def test_docstrings_use_the_terms_of_the_glossary() -> None:
    assert all_faults((path, replaced_terms(prose_of_source(text))) for path, text in converted()) == {}


def test_a_replaced_term_is_found_in_prose_and_allowed_in_code() -> None:
    assert len(replaced_terms(prose_of_document("It shows its badge.\nIt lasts for\never."))) == 2
    assert replaced_terms(prose_of_document("Frame `BADGE`, file `HOME/badge`, [keys](#badge).")) == []
    assert (
        replaced_terms(prose_of_source('"""Check.\n\nArgs:\n    badge: certificate in HOME/badge, ``badge``.\n"""'))
        == []
    )


def test_guesses_say_what_would_settle_them() -> None:
    assert all_faults((path, unmarked_guesses(text)) for path, text in SOURCES.items() if is_converted(path)) == {}


def test_a_guess_without_the_marker_is_found() -> None:
    assert unmarked_guesses('S = 1\n"""Pause. A guess."""\nT = 2  # Guess') == ["Pause. A guess.", "Guess"]
    assert unmarked_guesses('S = 1\n"""Pause. Guess: measure it."""\nT = 2  # Guess: count them.') == []
