"""The documents stay true and short: links, files, formats and fields in them exist, and budgets hold.

``test_errors_doc`` checks what docs/ERRORS.md lists, ``test_readme`` the commands of README.md and the how-to pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from docs import generate
from p2ptrain.base.ids import PROTOCOL_VERSION
from p2ptrain.framing import MAX_BODY_BYTES, FrameKind
from p2ptrain.manifest.model import Model
from p2ptrain.manifest.sources import ShardsCorpus
from p2ptrain.net.transport import EXCHANGE_PROTOCOL
from p2ptrain.wire import _MESSAGES, MAX_FRAGMENTS, MAX_KNOWN, MAX_PRESENCE_BYTES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SOURCES = ("docs", "p2ptrain", "peer", "bootstrap", "bench", "docker", "tests")

DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
    *sorted(DOCS.glob("*.md")),
]

MARKDOWN = sorted({*ROOT.glob("*.md"), *(path for folder in SOURCES for path in (ROOT / folder).rglob("*.md"))})
"""Every Markdown file of the repository, without ``.venv`` and ``out``."""

README_LINES = 150
"""Most lines of README.md: a first visitor reads it to the end."""

WORDS = 41_000
"""Most words of ``DOCUMENTS`` together; generated pages belong into docs/results or docs/generated."""

GUESSES_WORDS = 3_000
"""Most words of the generated register: a row is short."""

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+(?:\([^()\s]*\))?)(?:\s+\"[^\"]*\")?\)")
"""An inline link or image; the group is its target."""


def prose(document: Path) -> str:
    """Return a document's text without its code blocks and inline code."""
    text = re.sub(r"^(```|~~~).*?^\1\s*$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub gives a document's headings, and those that it sets itself."""
    text = re.sub(r"^(```|~~~).*?^\1\s*$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    seen: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", text, flags=re.MULTILINE):
        bare = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", bare.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
        seen[slug] = seen.get(slug, 0) + 1
    return found


def dead_links(document: Path) -> list[str]:
    """Return links and images that lead to missing targets inside the repository."""
    dead = []
    for target in [*LINK.findall(prose(document)), *re.findall(r"<img [^>]*src=\"([^\"]+)\"", prose(document))]:
        if re.match(r"\w+:", target):
            continue  # an external target
        name, _, anchor = target.partition("#")
        file = (document.parent / name) if name else document
        if not file.exists() or (anchor and (file.suffix != ".md" or anchor not in anchors(file))):
            dead.append(target)
    return dead


@pytest.mark.parametrize("document", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_anchors_and_images_exist(document: Path) -> None:
    assert dead_links(document) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# What is `it`, really?\n## Twice\n## Twice\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#what-is-it-really) [b](other.md#twice-1) [c](https://example.org/x) ![d [e]](gone.png)\n"
        "[f](other.md#no-heading) [g](#nowhere) [h](gone.md) `[i](code.md)`\n"
        "```\n[j](block.md)\n```\n# Here\n[k](#here)\n"
    )
    assert dead_links(page) == ["gone.png", "other.md#no-heading", "#nowhere", "gone.md"]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_the_documents_are_short() -> None:
    words = {document.name: len(document.read_text(encoding="utf-8").split()) for document in DOCUMENTS}
    assert sum(words.values()) <= WORDS, words


def test_the_register_of_guesses_is_short() -> None:
    assert len((DOCS / "generated" / "GUESSES.md").read_text(encoding="utf-8").split()) <= GUESSES_WORDS


@pytest.mark.parametrize("page", generate.PAGES, ids=lambda path: path.name)
def test_generated_pages_are_as_the_code_says(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == generate.updated(page), "run: python docs/generate.py --write"


def test_the_map_names_every_module() -> None:
    listed = re.findall(r"^- `(\w+)`: \S", generate.module_list(), flags=re.MULTILINE)
    assert listed == [path.stem for path in generate.sources() if not path.stem.startswith("__")]


def test_guesses_are_found_where_they_may_stand() -> None:
    source = '''"""Numbers. Guess: sweep each."""
A_S = 2.0
"""Pause, in seconds. Guess: measure v1.2 at 0.5 s. Ends there."""
B = 3  # Retries. Guess: count them
# --- Limits. Guess: measure real ones.

C = 1
class Limits:
    """Limits."""

    d: int = 4
    """Places. Guess: the places of real
    relays would settle it."""
'''
    assert generate.guesses(source) == [
        "- `module`: sweep each",
        "- `A_S=2.0`: v1.2 at 0.5 s",
        "- `Limits.d=4`: the places of real relays",
        "- `B=3`: count them",
        "- `C`: real ones",
    ]


@pytest.mark.parametrize("document", [*DOCUMENTS, *sorted(DOCS.glob("generated/*.md"))], ids=lambda path: path.name)
def test_files_and_functions_that_are_named_exist(document: Path) -> None:
    """Check that ``path/to/file.py`` exists, and that ``file.py:name`` is defined in it."""
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


def test_every_field_of_a_corpus_and_every_architecture_is_told() -> None:
    told = (DOCS / "DATA.md").read_text(encoding="utf-8")
    configs = [variant.model_fields["config"].annotation for variant in get_args(get_args(Model)[0])]
    for section in (ShardsCorpus, *configs):
        for name, field in section.model_fields.items():
            assert f"`{name}`" in told or name == "kind", name
            if isinstance(field.default, int | float):
                assert f"| {field.default:,} |" in told, name
    for architecture in re.findall(
        r'Literal\["(\w+(?:LM|HeadModel))"\]', (ROOT / "p2ptrain/manifest/model.py").read_text()
    ):
        assert f"`{architecture}`" in told
