"""Errors carry remedies, and docs/ERRORS.md explains what the program cannot say itself.

The page quotes few messages. Where it does, the first column of a table holds them in backquotes, with ``…`` for
inserted values.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from p2ptrain.base import errors
from p2ptrain.swarm import DeclineReason

ROOT = Path(__file__).parent.parent
ERRORS = (ROOT / "docs/ERRORS.md").read_text(encoding="utf-8")
TREES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for package in ("p2ptrain", "peer", "bootstrap", "lab", "sim")
    for path in sorted((ROOT / package).rglob("*.py"))
}
SCRIPTS = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docker").glob("*.sh"))]
TAG = re.compile(r"\[([a-z]+)\] ")


def name_of(node: ast.expr) -> str:
    """Return the last part of a name, of an attribute, or of what is called."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner):
            return name_of(inner)
        case _:
            return ""


def user_errors(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names of UserError and of all classes that derive from it."""
    found = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.UserError)
    }
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    while more := {each.name for each in classes if not found.isdisjoint(map(name_of, each.bases))} - found:
        found |= more
    return found


def without_remedy(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """Yield each construction of an error in ``names`` whose problem or remedy is missing or can be empty."""
    given = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            given.update({name_of(target): node.value for target in node.targets if name_of(target)})
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func) in names:
            if any(isinstance(each, ast.Starred) for each in node.args):
                continue  # the texts of another error, passed on
            texts = dict(zip(("problem", "remedy"), node.args, strict=False))
            texts |= {each.arg: each.value for each in node.keywords if each.arg}
            if any(name not in texts or can_be_empty(texts[name], given) for name in ("problem", "remedy")):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def can_be_empty(node: ast.expr, given: dict[str, ast.expr]) -> bool:
    """Return whether a text is known to be empty in some case; ``given`` holds the module's assignments by name."""
    match node:
        case ast.Constant(value=value):
            return not isinstance(value, str) or not value.strip()
        case ast.JoinedStr(values=parts):
            return all(isinstance(part, ast.Constant) and can_be_empty(part, given) for part in parts)
        case ast.IfExp(body=one, orelse=other):
            return can_be_empty(one, given) or can_be_empty(other, given)
        case ast.BoolOp(op=ast.Or(), values=[*_, last]):
            return can_be_empty(last, given)
        case ast.Name(id=name) if name in given:
            return can_be_empty(given[name], {})
        case _:
            return False


def fragments(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """Yield each problem of an error in ``names`` that is not a sentence. A value, a field or a file may begin it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func) in names and node.args:
            match node.args[0]:
                case ast.JoinedStr(values=[*_, ast.FormattedValue(value=ast.Attribute(attr="problem"))]):
                    continue  # the sentence of another error ends it
                case ast.Constant() | ast.JoinedStr() as problem:
                    text = next(strings(problem))
                    if not re.match(r"[^a-z]|p2ptrain\b|[a-z_]+\.[a-z]", text) or not text.endswith("."):
                        yield text


def strings(tree: ast.AST) -> Iterator[str]:
    """Yield all texts in a tree except its docstrings, with ``…`` for inserted values."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in (node for node in ast.walk(tree) if id(node) not in docstrings):
        match node:
            case ast.Constant(value=str(text)):
                yield text
            case ast.JoinedStr(values=parts):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)


def rows(heading: str) -> list[list[str]]:
    """Return the cells of all table rows in the section of the page that begins with ``heading``."""
    section = re.split(r"^#+ ", ERRORS.split(f"\n{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in table]


def quoted(cell: str) -> list[str]:
    """Return the texts in backquotes."""
    return re.findall(r"`([^`]+)`", cell)


NAMES = user_errors(TREES.values())
LINES = rows("## Terminal lines and the event log")
BY_TAG = {tag.strip("[]"): quoted(row[2]) for row in LINES if len(row) == 3 for tag in quoted(row[0])}
IN_LOG_ONLY = [kind for row in LINES if len(row) == 2 for kind in quoted(row[0])]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('raise HomeError(f"{path} is gone.", "Make it again.")', 0),
        ('raise HomeError("It is gone.", remedy=f"Make {path} again.")', 0),
        ("raise errors.HomeError(*error.args)", 0),
        ('raise HomeError("It is gone.")', 1),
        ('raise errors.HomeError("It is gone.", " ")', 1),
        ('raise HomeError("It is gone.", "Wait." if late else "")', 1),
        ('raise HomeError("", "Wait.")', 1),
        ('fix = ""\nraise HomeError("It is gone.", fix)', 1),
        ('class GoneError(HomeError):\n    "Gone."\nfail(GoneError("It is gone.", None))', 1),
        ('raise ValueError("a bug")', 0),
    ],
)
def test_a_missing_remedy_is_found(source: str, count: int) -> None:
    tree = ast.parse(textwrap.dedent(source))
    assert len([*without_remedy(tree, user_errors([tree]))]) == count


@pytest.mark.parametrize("path", TREES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_error_for_users_carries_a_remedy(path: Path) -> None:
    assert [*without_remedy(TREES[path], NAMES)] == []


def test_one_function_knows_what_helps_against_an_error_of_a_disk() -> None:
    """Look for texts that advise about space or permissions whatever the error was."""
    advice = re.compile(r"\bfree (some )?space\b|\bcheck (its|the)\b.*\b(permissions|disk)\b", re.IGNORECASE)
    found = {path.name for path, tree in TREES.items() if any(map(advice.search, strings(tree)))}
    assert found == {"files.py", "space.py"}  # the second measures the space itself


@pytest.mark.parametrize(
    ("problem", "is_sentence"),
    [
        ('"It is gone."', True),
        ('f"{path} is gone."', True),
        ('f"manifest.toml is gone: {why}."', True),
        ('f"{path} is gone. {error.problem}"', True),
        ('"it is gone."', False),
        ('"It is gone"', False),
        ('f"{path} is gone: {why}"', False),
    ],
)
def test_a_problem_that_is_not_a_sentence_is_found(problem: str, is_sentence: bool) -> None:
    found = [*fragments(ast.parse(f'raise HomeError({problem}, "Make it again.")'), NAMES)]
    assert (found == []) == is_sentence


@pytest.mark.parametrize(
    "path",
    [path for path in TREES if not path.is_relative_to(ROOT / "lab")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_problems_are_sentences(path: Path) -> None:
    assert [*fragments(TREES[path], NAMES)] == []


def test_the_errors_for_users_are_found() -> None:
    calls = [each for tree in TREES.values() for each in ast.walk(tree) if isinstance(each, ast.Call)]
    assert len([each for each in calls if name_of(each.func) in NAMES]) > 100


def test_every_tag_of_a_line_is_explained() -> None:
    texts = [text for tree in TREES.values() for text in strings(tree)]
    tags = {found[1] for text in texts if (found := TAG.match(text))}
    for tree in (tree for path, tree in TREES.items() if path.is_relative_to(ROOT / "bootstrap")):
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=func, args=[ast.Constant(value=str(tag)), _]) if name_of(func) in ("say", "_say"):
                    tags.add(tag)
    tags |= {tag for script in SCRIPTS for tag in re.findall(r'echo "' + TAG.pattern, script)}
    assert set(BY_TAG) == tags


def test_every_kind_in_the_event_log_is_listed() -> None:
    kinds = set()
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        match node:
            case ast.Call(func=ast.Attribute(attr="note"), args=[ast.Constant(value=str(kind)), *_]):
                kinds.add(kind)
            case ast.Call(func=ast.Attribute(attr="note"), args=[ast.IfExp(body=one, orelse=other), *_]):
                kinds |= {each.value for each in (one, other) if isinstance(each, ast.Constant)}
            case ast.Call(func=ast.Name(id="Note"), keywords=keywords):
                values = [each.value for each in keywords if each.arg == "kind"]
                kinds |= {each.value for each in values if isinstance(each, ast.Constant)}
    listed = [*IN_LOG_ONLY, *(kind for several in BY_TAG.values() for kind in several)]
    assert sorted(listed) == sorted(kinds)


def test_every_kind_is_listed_beside_the_tag_of_its_line() -> None:
    tree = TREES[ROOT / "peer/messages.py"]
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found = 0
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Dict)):
        for key, value in zip(node.keys, node.values, strict=True):
            texts = strings(functions.get(name_of(value), value))
            tags = {tag[1] for text in texts if (tag := TAG.match(text))}
            if tags:
                assert isinstance(key, ast.Constant)
                assert [tag for tag, kinds in BY_TAG.items() if key.value in kinds] == [*tags]
                found += 1
    assert found == len([kind for kinds in BY_TAG.values() for kind in kinds])


def test_lines_that_are_explained_exist() -> None:
    explained = [kind for row in rows("## Lines that need explanation") for kind in quoted(row[0])]
    known = {kind for kinds in BY_TAG.values() for kind in kinds}
    assert explained
    assert [kind for kind in explained if kind not in known or explained.count(kind) > 1] == []


def test_every_reason_to_decline_is_explained() -> None:
    explained = [reason for row in rows("## Why an exchange was skipped") for reason in quoted(row[0])]
    assert sorted(explained) == sorted(reason.value for reason in DeclineReason)


def test_messages_that_are_quoted_exist() -> None:
    texts = [" ".join(text.split()) for tree in TREES.values() for text in strings(tree)]
    messages = [message for row in rows("## Symptoms") for message in re.findall(r'"([^"]+)"', row[0])]
    assert messages
    for message in messages:
        pattern = re.compile(".*".join(map(re.escape, message.split("…"))))
        assert any(map(pattern.search, texts)), f"nothing in the code says {message}"


def test_every_check_of_the_doctor_is_explained() -> None:
    checks = set()
    for tree in (tree for path, tree in TREES.items() if path.is_relative_to(ROOT / "peer/doctor")):
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id="ok" | "note" | "bad" | "skipped"), args=[ast.Constant(value=name), *_]):
                    checks.add(name)
    explained = [check for row in rows("## What the doctor checks") for check in quoted(row[0])]
    assert sorted(explained) == sorted(checks)


def test_every_exit_status_is_explained() -> None:
    statuses = {
        str(node.value.value)
        for tree in TREES.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        if any(name_of(target).startswith("EXIT_") for target in node.targets)
    }
    explained = [status for row in rows("## Exit statuses") for status in row[0].split(", ")]
    assert statuses
    assert statuses <= set(explained)
