"""The documents stay true: links lead somewhere, and what they tell of files, formats and fields is so.

``test_errors_doc`` checks docs/ERRORS.md.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from p2ptrain.framing import MAX_BODY_BYTES, FrameKind
from p2ptrain.ids import PROTOCOL_VERSION
from p2ptrain.manifest import preset
from p2ptrain.manifest.document import parse_data
from p2ptrain.manifest.model import MAX_PARAMETERS, DecoderConfig, GroupedConfig
from p2ptrain.manifest.sources import FileCorpus, HubCorpus
from p2ptrain.net.transport import EXCHANGE_PROTOCOL
from p2ptrain.wire import _MESSAGES, MAX_FRAGMENTS, MAX_KNOWN, MAX_PRESENCE_BYTES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]


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
