"""Description and addresses for package indexes; everything else is in setup.cfg.

A package index shows README.md without the repository, so its relative links must name an address or go. Set
``P2PTRAIN_SOURCE_URL`` to the repository's address to build a package for publication.
"""

import os
import re
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!\w+:)([^()\s]*)\)")
"""A relative link or image: ``!`` of an image, text, target."""


def described(readme: str, source: str) -> str:
    """Return README.md with absolute links into ``source``; without links and images if ``source`` is empty."""

    def absolute(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        if not source:
            return "" if image else text
        kind = "raw" if image else "blob"
        return f"{image}[{text}]({target if target.startswith('#') else f'{source}/{kind}/main/{target}'})"

    return LINK.sub(absolute, readme)


if __name__ == "__main__":
    address = os.environ.get("P2PTRAIN_SOURCE_URL", "").rstrip("/")
    setup(
        long_description=described((Path(__file__).parent / "README.md").read_text(encoding="utf-8"), address),
        long_description_content_type="text/markdown",
        project_urls={
            name: f"{address}{path}"
            for name, path in (
                ("Source", ""),
                ("Documentation", "/tree/main/docs"),
                ("Changelog", "/blob/main/CHANGELOG.md"),
            )
            if address
        },
    )
