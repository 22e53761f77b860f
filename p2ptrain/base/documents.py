"""Place of the documents: the clone, or what the wheel installed under ``share/doc/p2ptrain``."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

CLONE = Path(__file__).parents[2]


def documents() -> Path | None:
    """Return the directory that has README.md and ``docs``; None if they are not installed."""
    if (CLONE / "docs" / "INSTALL.md").is_file():
        return CLONE
    try:
        files = metadata.files("p2ptrain") or []
    except metadata.PackageNotFoundError:
        return None
    pages = (Path(str(file.locate())) for file in files if file.match("share/doc/p2ptrain/docs/INSTALL.md"))
    return next((page.resolve().parents[1] for page in pages if page.is_file()), None)


def document(name: str) -> str:
    """Return the path of the page ``docs/NAME`` on this machine, or this short form if it is not installed."""
    folder = documents()
    return str(folder / "docs" / name) if folder else f"docs/{name}"


def install_extra(name: str) -> str:
    """Return the remedy for a missing package of the extra ``name`` of setup.cfg."""
    return f"Install p2ptrain with its extra {name}: {document('INSTALL.md')} has the commands."
