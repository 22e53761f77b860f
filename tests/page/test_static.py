"""The page's files: no foreign origins, no executable text, and sufficient contrast."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import p2ptrain.page
from p2ptrain.page.public import public_page
from p2ptrain.page.server import ASSETS, PUBLIC_ASSETS, PUBLIC_SCRIPTS, SCRIPTS

STATIC = Path(p2ptrain.page.__file__).parent / "static"
OURS = ("index.html", "run.html", "page.css", *(f"{name}.js" for name in dict.fromkeys([*SCRIPTS, *PUBLIC_SCRIPTS])))
MOST_LINES = 350
TEXT, SIGN = 4.5, 3.0
"""Least contrasts of WCAG 2.2, level AA: of text, and of other things that must be visible."""
THEMES = ("light", "dark")


def read(name: str) -> str:
    return (STATIC / name).read_text()


def palette() -> dict[str, tuple[str, str]]:
    """Return each colour's values in the light and the dark theme."""
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", read("page.css"))
    return {name: (light, dark) for name, light, dark in found}


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, as WCAG 2.2 defines it."""

    def luminance(colour: str) -> float:
        parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_what_it_is_defined_to_be() -> None:
    """Check two known values: black on white is 21, and a colour on itself 1."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#777777") == 1.0


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("ground", ["page", "card", "raised"])
def test_text_can_be_read(theme: str, ground: str) -> None:
    """Check text on all its backgrounds, in both themes."""
    which, colours = THEMES.index(theme), palette()
    found = {name: contrast(colours[name][which], colours[ground][which]) for name in ("ink", "muted", "accent", "bad")}
    assert {name: value for name, value in found.items() if value < TEXT} == {}


@pytest.mark.parametrize("theme", THEMES)
def test_text_on_colour_can_be_read(theme: str) -> None:
    """Check the bar, and the button to copy."""
    which, colours = THEMES.index(theme), palette()
    assert contrast(colours["bad"][which], colours["bad-wash"][which]) >= TEXT
    assert contrast(colours["card"][which], colours["accent"][which]) >= TEXT


@pytest.mark.parametrize("theme", THEMES)
def test_signs_can_be_seen(theme: str) -> None:
    """Check peers' curves, state marks, and borders of controls."""
    which, colours = THEMES.index(theme), palette()
    signs = [name for name in colours if name.startswith("peer-")] + ["edge", "good", "second"]
    found = {name: contrast(colours[name][which], colours["card"][which]) for name in signs}
    assert len(signs) == 11
    assert {name: value for name, value in found.items() if value < SIGN} == {}


def mixed(one: str, other: str, share: float) -> str:
    """Return ``share`` of one colour over another, as a browser blends them."""
    both = ((int(one[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(share * over + (1 - share) * under):02x}" for over, under in both)


def test_a_mixture_is_what_it_is_defined_to_be() -> None:
    assert mixed("#ffffff", "#000000", 0.5) == "#808080"
    assert mixed("#123456", "#fedcba", 1.0) == "#123456"


SHINING = re.compile(r"^([^{}]+)\{[^{}]*\bopacity: ([\d.]+);", re.MULTILINE)
ALPHAS = {"page.js": r"\balpha: ([\d.]+)", "gossip.js": r"globalAlpha = gone \? ([\d.]+)"}


def test_no_text_shines_through() -> None:
    """Check opacity: half-transparent text has less contrast than its colours, so only drawings may have it."""
    found = {selector.strip() for selector, _ in SHINING.findall(read("page.css"))}
    assert {each for each in found if not each.endswith(".swatch")} == set()


@pytest.mark.parametrize("theme", THEMES)
def test_lines_that_shine_through_can_be_seen(theme: str) -> None:
    """Check training losses, and peers that are gone."""
    which, colours = THEMES.index(theme), palette()
    shares = [float(share) for _, share in SHINING.findall(read("page.css"))]
    shares += [float(share) for name, alpha in ALPHAS.items() for share in re.findall(alpha, read(name))]
    assert len(shares) == 3
    card = colours["card"][which]
    found = {
        (name, share): contrast(mixed(both[which], card, share), card)
        for name, both in colours.items()
        for share in shares
        if name.startswith("peer-")
    }
    assert {name: value for name, value in found.items() if value < SIGN} == {}


@pytest.mark.parametrize("name", OURS)
def test_nothing_is_asked_of_anybody_else(name: str) -> None:
    """Check that the only address is the name of SVG, which is never requested."""
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w{2,}[^\s'\"]*", read(name)))
    assert {each for each in addresses if each != "http://www.w3.org/2000/svg"} == set()


@pytest.mark.parametrize("name", OURS)
def test_text_never_becomes_markup_or_code(name: str) -> None:
    """Check for functions that make markup or code of text, and that the page has no inline script or handler."""
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|DOMParser|\bon\w+="
    assert re.findall(ways, read(name)) == []


def test_the_pages_load_what_is_served() -> None:
    """Check that all scripts are loaded in order, and that no file is left over."""
    for page, scripts in (("index.html", SCRIPTS), ("run.html", PUBLIC_SCRIPTS)):
        loaded = re.findall(r'<script (?:defer )?src="([\w.]+)"', read(page))
        assert [each.removesuffix(".js") for each in loaded if not each.startswith("uPlot")] == list(scripts)
    files = {path.name for path in STATIC.iterdir()}
    assert files == {name for name, _ in [*ASSETS.values(), *PUBLIC_ASSETS.values()]} | {"run.html", "uPlot.LICENSE"}


def test_the_public_page_has_the_parts_that_both_pages_share() -> None:
    """Check that each element that scripts of the public page look up is in it once."""
    public = {"run": {"name": "", "run_tokens": 1}, "figures": {}, "total_peers": 0}
    page = public_page(*((STATIC / name).read_bytes() for name in ("run.html", "index.html")), public).decode()
    assert "<!--" not in page
    ids = re.findall(r'\bid="([\w-]+)"', page)
    assert len(ids) == len(set(ids))
    wanted = {each for name in PUBLIC_SCRIPTS for each in re.findall(r'\bat\("([\w-]+)"\)', read(f"{name}.js"))}
    assert wanted - set(ids) == set()


@pytest.mark.parametrize("name", [each for each in OURS if each.endswith(".js")])
def test_scripts_are_strict_and_short(name: str) -> None:
    """Check strict mode, and a length at which a script is easy to read."""
    text = read(name)
    assert text.startswith('"use strict";\n')
    assert len(text.splitlines()) <= MOST_LINES
