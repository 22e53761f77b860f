"""Pages generated from the code: ``python docs/generate.py --write``.

- docs/ARCHITECTURE.md: one line per package;
- docs/generated/MAP.md: one line per module;
- docs/generated/GUESSES.md: one line per number that has no source yet.

Text outside a page's markers is kept. Without ``--write``, the names of outdated pages are printed and the exit status
is 1.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("p2ptrain", "peer", "bootstrap", "sim", "lab", "bench")

BEGIN, END = "<!-- generated: python docs/generate.py --write -->", "<!-- end -->"

GUESS = re.compile(r"\bGuess: (.+?)(?=\.(?:\s+[A-Z]|\s*$)|$)")
"""The marker of a guess; the group is the measurement that would settle it."""

LONGEST_VALUE = 30
"""Characters of a value in the register; longer ones are left out."""


def sources() -> list[Path]:
    """Return all Python files of the project except tests, relative to its root, folder by folder."""
    found = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(found, key=lambda path: (PACKAGES.index(path.parts[0]), path.parent.parts, path.stem))


def read(path: Path) -> str:
    """Return the text of a file whose path is relative to the project's root."""
    return (ROOT / path).read_text(encoding="utf-8")


def first_sentence(source: str) -> str:
    """Return the first sentence of a module's docstring as Markdown, without its full stop."""
    paragraph = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0]
    return re.split(r"\.(?:\s|$)", " ".join(paragraph.split()))[0].replace("``", "`").replace("|", "\\|")


# --- The map.


def package_list() -> str:
    """Return a list of all packages and their subjects."""
    packages = [path for path in sources() if path.name == "__init__.py" and str(path.parent) != "p2ptrain"]
    return "\n".join(f"- `{path.parent}`: {first_sentence(read(path))}" for path in packages)


def module_list() -> str:
    """Return a list of all modules and their subjects, under a heading for each folder."""
    lines: list[str] = []
    folder = None
    for path in sources():
        if path.stem.startswith("__"):
            continue
        if path.parent != folder:
            folder = path.parent
            lines += ["", f"## {folder}", ""]
        sentence = first_sentence(read(path))
        start = re.split(r":(?:\s|$)", sentence)[0]
        if start.count("(") != start.count(")"):  # the colon is inside parentheses
            start = sentence
        lines.append(f"- `{path.stem}`: {start if len(start.split()) >= 4 else sentence}")
    return "\n".join(lines).strip()


# --- The register of guesses.


@dataclass(frozen=True, slots=True)
class Remark:
    """A docstring or comment, with the name and the value of the constant or field that it describes, if any."""

    name: str
    value: str
    text: str


Assigned = dict[int, tuple[str, str]]
"""Name and value of what is assigned, by line."""


def docstrings(scope: ast.AST, prefix: str, assigned: Assigned) -> Iterator[Remark]:
    """Yield all docstrings in a scope, those below constants and fields included; enter assignments in ``assigned``."""
    if isinstance(scope, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield Remark(prefix.rstrip("."), "", ast.get_docstring(scope) or "")
    target = None
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from docstrings(node, f"{prefix}{node.name}.", assigned)
            target = None
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            left = node.targets[0] if isinstance(node, ast.Assign) else node.target
            target = (prefix + ast.unparse(left).strip("()"), ast.unparse(node.value) if node.value else "")
            assigned.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), target))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            if target:
                yield Remark(*target, node.value.value)
            target = None


def comments(source: str, assigned: Assigned) -> Iterator[Remark]:
    """Yield all comments; consecutive lines are one, and a comment on lines of its own describes what follows."""
    block: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# -")
            if token.line.strip() == token.string:
                block.append(text)
            else:
                yield Remark(*assigned.get(token.start[0], ("", "")), text)
        elif token.type != tokenize.NL and block:
            name, _ = assigned.get(token.start[0], ("", ""))
            yield Remark(name, "", " ".join(block))
            block = []


def remarks(source: str) -> list[Remark]:
    """Return all docstrings and comments of a module, with single spaces."""
    assigned: Assigned = {}
    found = [*docstrings(ast.parse(source), "", assigned), *comments(source, assigned)]
    return [Remark(each.name, each.value, " ".join(each.text.split())) for each in found]


def guesses(source: str) -> list[str]:
    """Return the register's lines for a module."""
    lines = []
    for each in remarks(source):
        for settles in GUESS.findall(each.text):
            value = f"={each.value}" if each.value and len(each.value) <= LONGEST_VALUE else ""
            measurement = re.sub(r"^measure | would settle (?:it|them)\b", "", settles).split(";")[0]
            lines.append(f"- `{each.name or 'module'}{value}`: {measurement}")
    return lines


def unmarked_guesses(source: str) -> list[str]:
    """Return the docstrings and comments that mention a guess without the marker ``Guess: …``."""
    return [each.text for each in remarks(source) if re.search(r"(?i)\bguess(?:es)?\b", GUESS.sub("", each.text))]


def register() -> str:
    """Return a list of the guesses that peers and bootstraps use, under a heading for each module."""
    lines: list[str] = []
    for path in sources():
        if path.parts[0] not in ("sim", "lab", "bench") and (found := guesses(read(path))):
            lines += ["", f"### {path.with_suffix('')}", "", *found]
    return "\n".join(lines).strip()


PAGES = {
    ROOT / "docs" / "ARCHITECTURE.md": package_list,
    ROOT / "docs" / "generated" / "MAP.md": module_list,
    ROOT / "docs" / "generated" / "GUESSES.md": register,
}


def updated(page: Path) -> str:
    """Return the text of a page with everything between its markers generated anew. Raises ValueError without them."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{PAGES[page]()}\n\n{END}{after}"


def main(write: bool) -> int:
    """Name the outdated pages, and write them if asked to. Returns the exit status."""
    outdated = {page: text for page in PAGES if (text := updated(page)) != page.read_text(encoding="utf-8")}
    for page, text in outdated.items():
        sys.stdout.write(f"{page.relative_to(ROOT)} {'written' if write else 'is outdated'}\n")
        if write:
            page.write_text(text, encoding="utf-8")
    return 1 if outdated and not write else 0


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:]))
