"""The page in a real browser: what people see, and what strangers cannot do to it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import NoAlertPresentException, StaleElementReferenceException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from p2ptrain.page.contributors import Contribution
from p2ptrain.page.listen_address import ListenAddress
from p2ptrain.page.samples import SampleText
from p2ptrain.page.server import ASSETS
from p2ptrain.page.view import ExchangeRow, FailureRow, View

if TYPE_CHECKING:
    from tests.page.conftest import Shown

pytestmark = pytest.mark.net

PATIENCE_S = 30.0
"""Timeout, in seconds, for what takes one on an idle machine."""
LOOK_S = 0.05
MOST_LIVE = 120
"""Most lit edges: MOST_EDGES of gossip.js."""
MOST_NODES_PER_PEER = 30
"""Most nodes of the page per peer: a row has nine cells, each with an element for its text."""
DASH = "\u2013"
HOSTILE = "<img src=x onerror=alert(1)>"
TURNING = "\u202egnihtemos\u200b\u2066\u3164"


class Page:
    """The page in the browser."""

    def __init__(self, browser: webdriver.Chrome, shown: Shown) -> None:
        self.browser = browser
        self.shown = shown

    def open(self) -> None:
        """Load the page, and wait for the first document."""
        self.browser.get(self.shown.url)
        self.until(lambda: self.shows)

    def until(self, holds: Callable[[], object]) -> None:
        """Wait for a condition."""

        def looked(_: object) -> object:
            try:
                return holds()
            except StaleElementReferenceException:
                return False

        WebDriverWait(self.browser, PATIENCE_S, LOOK_S).until(looked)

    def run(self, script: str, *arguments: object) -> Any:
        return self.browser.execute_script(script, *arguments)

    @property
    def shows(self) -> str:
        """Return ``at`` of the last document that was shown completely; empty before the first one."""
        return str(self.run("return document.documentElement.dataset.shown ?? ''"))

    def once_asked(self, holds: Callable[[], object]) -> None:
        """Wait for the effect of a new document; make the page request it if it can, which is faster."""
        self.until(lambda: self.run("dispatchEvent(new Event('online'))") or holds())

    def next_document(self) -> None:
        """Publish the view, and wait until it is shown."""
        self.shown.publish()
        self.once_asked(lambda: self.shows == f"{self.shown.at:.0f}")

    def text(self, name: str) -> str:
        return str(self.run("return document.getElementById(arguments[0]).textContent", name))

    def gossip(self, figure: str) -> int:
        """Return the counts of the gossip picture: ``lit`` (so far), ``live`` (now), ``peers``."""
        return int(self.run("return document.getElementById('gossip').dataset[arguments[0]]", figure))

    def row(self, peer: str) -> WebElement:
        return self.browser.find_element("css selector", f'#people tr[data-peer="{peer}"]')

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def complaints(self) -> list[str]:
        """Return the browser's log messages since the last call."""
        found: list[dict[str, Any]] = self.browser.execute("getLog", {"type": "browser"})["value"]
        return [each["message"] for each in found]

    def device(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, **features: str) -> None:
        """Set the system's preferences: ``color_scheme="dark"``, ``reduced_motion="reduce"``."""
        wanted = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})


@pytest.fixture
def page(chromium: webdriver.Chrome, shown: Shown) -> Iterator[Page]:
    """Yield the page for a swarm of eight, 1,280 pixels wide, light. Leaves it blank, so that it stops polling."""
    found = Page(chromium, shown)
    found.device(1280, 900)
    found.prefer(color_scheme="light")
    found.open()
    found.complaints()
    yield found
    chromium.get("about:blank")


def alerted(page: Page) -> bool:
    """Return whether a script from a peer's text has run."""
    try:
        page.browser.switch_to.alert.dismiss()
    except NoAlertPresentException:
        return False
    return True


# --- function --------------------------------------------------------------------------------------------------------


def test_it_loads_without_a_complaint_and_asks_nobody_else(page: Page) -> None:
    """Check that the console has no error, also none of the content security policy, and that one origin is
    requested."""
    page.open()
    assert page.complaints() == []
    asked = page.run("return performance.getEntriesByType('resource').map((each) => each.name)")
    origin = page.shown.url.rstrip("/")
    assert {each for each in asked if not each.startswith((origin + "/", "data:"))} == set()
    served = {each.removeprefix(origin + "/") for each in asked}
    assert set(ASSETS) - {""} <= served, "an asset that the page does not load"


def test_the_figures_are_those_of_the_document(page: Page) -> None:
    """Check the displayed figures: rounded, with units."""
    expected = {
        "run-name": "tiny-stories",
        "what": "What Amber sees of the swarm",
        "state": "training",
        "fraction": "46 %",
        "held-out": "1.987",
        "peers": "8",
        "exchanges": "972",
        "disagreement": "2.1 %",
        "up-note": "175 MB in all",
    }
    assert {name: page.text(name).replace("\u00a0", " ") for name in expected} == expected
    assert "1.987" in page.browser.title
    for name in ("up", "down"):  # not from the curve, whose last point may be old
        assert page.text(name) == page.run("return ui.rate(arguments[0])", page.shown.view.figures[name])


def test_a_bootstrap_tells_what_its_peers_do(page: Page) -> None:
    """Check a bootstrap's page, which counts live peers by state, since a bootstrap does not train."""
    document = page.shown.view.document(page.shown.at)
    page.shown.replace({**document, "kind": "bootstrap", "state": "serving", "me": None})
    page.until(lambda: page.text("state") == "7 training, 1 joining")
    assert page.text("up-note").endswith(" by those here")
    assert " by those here" in page.text("progress-tokens")
    nobody = {**document, "kind": "bootstrap", "state": "serving", "me": None, "peers": [], "total_peers": 0}
    page.shown.replace(nobody)
    page.until(lambda: page.text("state") == "serving")


def test_time_left_and_what_this_computer_contributes(page: Page) -> None:
    """Check texts with figures of all peers, of a peer alone, and without figures."""
    document = page.shown.view.document(page.shown.at)
    figures = {**document["figures"], "tokens_per_s": 2000.0, "blocked_share": None}
    told = {"swarm_tokens_per_s": 6000.0, "remaining_s": 600.0, "shortened_s": 300.0}
    for changed, left, note in (
        (told, "about 10\u00a0min left; this computer shortens it by 5\u00a0min", "2.00\u00a0k by this one"),
        ({**told, "shortened_s": None}, "about 10\u00a0min left", "2.00\u00a0k by this one"),
        ({**told, "remaining_s": 0.0, "swarm_tokens_per_s": 2000.0}, "", ""),
        ({}, "", ""),
    ):
        page.shown.replace({**document, "figures": figures | changed})
        page.until(lambda left=left: page.text("progress-tokens").partition("about")[2] == left[5:])
        assert page.text("speed-note") == note


def test_numbers_move(page: Page) -> None:
    """Check that a change of the view appears on the page without an action."""
    page.shown.view.figures["held_out"] = 5.7
    page.shown.view.state, page.shown.view.why = "finishing", "everything is learned"
    page.shown.publish()
    page.until(lambda: page.text("held-out") == "5.700")
    assert page.text("held-out-note") == "guess among 299"
    assert (page.text("state"), page.text("why")) == ("finishing", "everything is learned")


def test_charts_are_drawn_and_can_change_their_axis(page: Page) -> None:
    """Check three charts; the loss chart can use time as its axis, and the button has that state for screen readers."""
    assert page.count(".plot canvas") == 3
    page.run("document.querySelector('#loss-chart canvas').id = 'before'")
    page.browser.find_element("id", "by-time").click()
    page.until(lambda: page.count("#before") == 0)
    assert page.count("#loss-chart canvas") == 1
    assert page.browser.find_element("id", "by-time").get_attribute("aria-pressed") == "true"
    assert page.browser.find_element("id", "by-tokens").get_attribute("aria-pressed") == "false"


def test_a_chart_is_given_new_data_and_not_drawn_anew(page: Page) -> None:
    """Check that a chart keeps its zoom when data arrives."""
    page.run("document.querySelector('#loss-chart canvas').id = 'before'")
    for curve in page.shown.view.curves.values():
        curve.train.add(600_000.0, page.shown.at + 60, 1.8)
    page.next_document()
    assert page.count("#before") == 1


PLOTS = """
    const make = uPlot;
    window.plots = [];
    uPlot = function (...those) {
      const plot = new make(...those);
      window.plots.push(plot);
      return plot;
    };
"""
"""Script that keeps all charts made from now on."""


@pytest.mark.parametrize(("honest", "told"), [(7, 99.0), (1, 99.0), (7, 0.0)])
def test_no_stranger_makes_everybodys_lines_flat(page: Page, honest: int, told: float) -> None:
    """Check an outlier among curves near 2, on a bootstrap's page: it is cut off, and early losses stay visible."""
    view = page.shown.view
    view.kind = "bootstrap"
    kept = dict(list(view.curves.items())[: honest + 1])
    view.curves.clear()
    for index, (peer, curve) in enumerate(kept.items()):
        curve.train.points.clear()
        curve.held_out.points = [
            (1000.0 * step, page.shown.at - 60.0 + step, told if index == honest else 2.0 + 1.5 / (1 + step))
            for step in range(30)
        ]
        view.curves[peer] = curve
    page.run(PLOTS)
    page.next_document()
    low, high = page.run("const { min, max } = window.plots.at(-1).scales.y; return [min, max]")
    assert 3.5 < high < 10.0
    assert 0.5 < low < 2.05


def test_the_line_under_the_pointer_is_named(page: Page) -> None:
    """Check that the pointer shows the name and the value of the nearest curve."""
    chart = page.browser.find_element("css selector", "#loss-chart .u-over")
    hint = page.browser.find_element("css selector", "#loss-chart .hint")
    half = chart.size["height"] // 2
    for down in range(half - 40, -half, -6):
        ActionChains(page.browser, duration=0).move_to_element_with_offset(chart, 0, down).perform()
        if hint.is_displayed():
            break
    told = str(hint.get_property("textContent"))
    assert re.fullmatch(r"(Amber|\w.*), (training|held out): \d\.\d\d at \d.* tokens", told), told


def test_the_legend_goes_by_name(page: Page) -> None:
    """Check the order of the legend: the average first, then peers by name."""
    view = page.shown.view
    names = ["average", *sorted(each.name for each in view.curves.values())]
    assert view.curve("", "average") is not None
    view.curves = dict(reversed(view.curves.items()))
    page.next_document()
    shown = page.run("return [...document.querySelectorAll('#legend .name')].map((each) => each.textContent)")
    assert shown == names


def test_a_simulation_has_its_own_time(page: Page, exchange: Callable[..., ExchangeRow]) -> None:
    """Check a simulation: seconds since its start, the average among the curves, and no bytes if they are unknown."""
    view = View("simulation")
    average = view.curve("", "average")
    assert average is not None
    for step in range(50):
        average.held_out.add(1000.0 * step, 60.0 * step, 5.0 - 0.05 * step)
    view.exchanges.append(ExchangeRow(view.next_serial(), 2940.0, "aaaaaaaa", "bbbbbbbb", 0.0, 0))
    page.shown.view, page.shown.at = view, 3000.0
    page.next_document()
    assert page.text("what").startswith("A simulation")
    assert not page.browser.find_element("id", "contributions-card").is_displayed()
    assert page.text("legend") == "average"
    cells = page.run("return [...document.querySelectorAll('#latest td')].map((each) => each.textContent)")
    assert cells == ["aaaaaa ↔ bbbbbb", DASH, DASH, DASH]
    page.browser.find_element("id", "by-time").click()
    assert page.count("#loss-chart canvas") == 1


FORMATS = {
    "bytes": {0: "0 B", 999: "999 B", 999.6: "1.00 kB", 359_600: "360 kB", 1e6: "1.00 MB", 2.5e12: "2.50 TB"},
    "rate": {1234.0: "1.23 kB/s"},
    "percent": {0: "0 %", 0.0004: "0.04 %", 0.0168: "1.7 %", 0.46: "46 %", 1: "100 %"},
    "duration": {
        0: "0 ms",
        0.0004: "0.4 ms",
        0.02: "20 ms",
        0.9996: "1.0 s",
        9.97: "10 s",
        150: "3 min",
        7200: "2.0 h",
    },
    "ago": {-3: "just now", 1.4: "just now", 30: "30 s ago", 90: "2 min ago", 7200: "2.0 h ago", 2e5: "2.3 d ago"},
    "count": {0: "0", 972: "972", 123_456: "123,456", 1.2e6: "1.20 M"},
    "loss": {1.98765: "1.988"},
}


@pytest.mark.parametrize("function", FORMATS)
def test_numbers_read_well(page: Page, function: str) -> None:
    """Check number formats: few digits, units that fit, and a dash for what is not a number."""
    for value, text in FORMATS[function].items():
        assert page.run(f"return ui.{function}(arguments[0])", value).replace("\u00a0", " ") == text
    for nothing in ("null", "undefined", "NaN", "Infinity", "'3'"):
        assert page.run(f"return ui.{function}({nothing})") == DASH


def test_peers_keep_their_colours(page: Page) -> None:
    """Check colours while other peers come and go."""
    peers = list(page.shown.view.peers)
    looks = "return JSON.stringify(arguments[0].map((each) => ui.look(each)))"
    before = page.run(looks, peers)
    assert len({each["ink"] for each in json.loads(before)}) == 8
    page.run(
        """
        for (let visit = 0; visit < 8; visit += 1) {
          ui.dress([...arguments[0], ...Array.from({ length: 200 }, (_, index) => `guest ${visit} ${index}`)]);
          for (let index = 0; index < 200; index += 1) ui.look(`stranger ${visit} ${index}`);
        }
        """,
        peers,
    )
    assert page.run(looks, peers) == before


# --- events ----------------------------------------------------------------------------------------------------------


def test_an_exchange_lights_an_edge_that_fades(page: Page, exchange: Callable[..., ExchangeRow]) -> None:
    """Check one edge per exchange, though several documents contain it, and that it fades."""
    before = page.gossip("lit")
    exchange(page.shown.view, page.shown.at, 1, 2, random.Random(1))
    page.shown.publish()
    page.until(lambda: page.gossip("lit") == before + 1)
    page.until(lambda: page.gossip("live") == 0)
    page.next_document()
    assert page.gossip("lit") == before + 1
    first = page.browser.find_element("css selector", "#latest tr")
    assert first.text.startswith("Birch ↔ Copper-Owl")


STEPS = """
    window.steps = [];
    new MutationObserver(() => {
      const lit = document.getElementById("gossip").dataset.lit;
      if (window.steps.at(-1) !== lit) window.steps.push(lit);
    }).observe(document.getElementById("gossip"), { attributes: true });
"""
"""Script that records how many edges have been lit so far, at each change."""


def test_what_a_document_reports_at_once_does_not_happen_at_once(
    page: Page, exchange: Callable[..., ExchangeRow]
) -> None:
    """Check that new events are spread over time, and that the latest are listed."""
    view = page.shown.view
    before = page.gossip("lit")
    page.run(STEPS)
    rows = [exchange(view, page.shown.at - 0.25 * age, age % 8, 0, random.Random(age)) for age in range(12)]
    page.shown.publish()
    page.until(lambda: page.gossip("lit") == before + 12)
    assert len(page.run("return window.steps")) >= 3
    newest = page.run(
        "return arguments[0].map((row) => ui.bytes(row.bytes))", [{"bytes": row.bytes} for row in rows[:5]]
    )
    sizes = "return [...document.querySelectorAll('#latest tr')].map((row) => row.cells[1].textContent)"
    page.until(lambda: page.run(sizes) == newest)


def test_a_failure_lights_up_and_is_told_with_its_reason(page: Page) -> None:
    """Check that a failure appears in the picture and in the list of failures."""
    before = page.gossip("lit")
    peer = list(page.shown.view.peers)[2]
    row = FailureRow(page.shown.view.next_serial(), page.shown.at, peer, "no exchange with Elm: it is asleep")
    page.shown.view.failures.append(row)
    page.shown.publish()
    page.until(lambda: page.gossip("lit") == before + 1)
    page.once_asked(lambda: "it is asleep" in page.text("failures"))


def test_what_happened_before_it_came_does_not_light_up(page: Page) -> None:
    """Check that exchanges in the first document do not light up."""
    page.next_document()
    assert page.gossip("lit") == 0


def test_without_motion_edges_still_light_up(page: Page, exchange: Callable[..., ExchangeRow]) -> None:
    """Check reduced motion: edges appear without animation."""
    page.prefer(reduced_motion="reduce")
    page.open()
    exchange(page.shown.view, page.shown.at, 1, 2, random.Random(1))
    page.shown.publish()
    page.until(lambda: page.gossip("live") == 1)
    page.until(lambda: page.gossip("live") == 0)


def test_a_peer_that_has_gone_is_shown_as_gone(page: Page) -> None:
    """Check the word, the style, the last place in the table, and the lower count."""
    rows = list(page.shown.view.peers.values())
    page.shown.view.place(rows[:3] + rows[4:])
    page.shown.publish()
    page.once_asked(lambda: page.row(rows[3].id).get_attribute("data-state") == "gone")
    assert "gone" in page.row(rows[3].id).text
    assert page.run("return document.querySelector('#people tbody tr:last-child').dataset.peer") == rows[3].id
    assert page.text("peers") == "7"
    assert "1 gone" in page.text("peers-note")


def test_the_table_is_sorted_by_what_is_clicked(page: Page) -> None:
    """Check sorting by speed: descending, ascending, then the default order; aria-sort tells which."""

    def first() -> str:
        return str(page.run("return document.querySelector('#people tbody tr').dataset.peer"))

    by_speed = sorted(page.shown.view.peers.values(), key=lambda row: row.tokens_per_s or 0.0)
    title = page.browser.find_element("xpath", "//th[.='Tokens/s']")
    for expected, sort in ((by_speed[-1].id, "descending"), (by_speed[0].id, "ascending"), (page.shown.view.me, None)):
        title.find_element("tag name", "button").click()
        assert (first(), title.get_attribute("aria-sort")) == (expected, sort)


def test_on_a_phone_a_list_sorts_the_table(page: Page) -> None:
    """Check narrow screens: a list replaces the table's headers, both agree, and cards lie on the page itself."""

    def first() -> str:
        return str(page.run("return document.querySelector('#people tbody tr').dataset.peer"))

    choice = page.browser.find_element("id", "people-sort")
    assert not choice.is_displayed()
    by_speed = sorted(page.shown.view.peers.values(), key=lambda row: row.tokens_per_s or 0.0)
    page.browser.find_element("xpath", "//th[.='Tokens/s']/button").click()
    assert choice.get_property("value") == "Tokens/s"
    page.device(390, 740)
    page.until(choice.is_displayed)
    assert choice.accessible_name == "Sort by"
    Select(choice).select_by_visible_text("Loss")
    assert first() == min(page.shown.view.peers.values(), key=lambda row: row.loss or 99.0).id
    Select(choice).select_by_visible_text("default order")
    assert first() == page.shown.view.me
    Select(choice).select_by_visible_text("Tokens/s")
    assert first() == by_speed[-1].id
    box = "const box = document.querySelector('.people .scroll'); return box.scrollHeight <= box.clientHeight + 1"
    assert page.run(box)


# --- hostile text ----------------------------------------------------------------------------------------------------


def test_strangers_text_is_text(page: Page) -> None:
    """Check every place of a peer's text: it creates no element, runs no script, and requests nothing."""
    view, images = page.shown.view, page.count("img, iframe, object, embed, body script")
    peers = list(view.peers.values())
    rows = [replace(row, nickname=HOSTILE, device=HOSTILE, state=HOSTILE, path=HOSTILE) for row in peers[1:]]
    view.place([replace(peers[0], nickname=HOSTILE), *rows])
    view.state = view.why = view.join = HOSTILE
    view.run = replace(view.run, name=HOSTILE, recipe=HOSTILE, codec=HOSTILE, id=HOSTILE)
    view.sample = SampleText(page.shown.at, peers[1].id, 1, HOSTILE, HOSTILE)
    for curve in view.curves.values():
        curve.name = HOSTILE
    view.failures.append(FailureRow(view.next_serial(), page.shown.at, peers[1].id, HOSTILE))
    page.next_document()
    assert page.text("run-name") == page.text("state") == page.text("why") == page.text("sample-text") == HOSTILE
    assert page.row(peers[1].id).find_element("css selector", ".name").get_property("textContent") == HOSTILE
    assert HOSTILE in page.text("failures")
    assert HOSTILE in page.text("legend")
    assert page.count("img, iframe, object, embed, body script") == images
    assert not alerted(page)
    assert page.complaints() == []


def test_a_name_cannot_turn_its_surroundings_round(page: Page) -> None:
    """Check that direction marks and invisible characters are removed; a name without others becomes the id."""
    peers = list(page.shown.view.peers.values())
    rows = [replace(peers[0], nickname=TURNING), replace(peers[1], nickname="\u200b\u2067\u3164"), *peers[2:]]
    page.shown.view.place(rows)
    page.next_document()
    names = [page.row(row.id).find_element("css selector", ".name").get_property("textContent") for row in rows[:2]]
    assert names == ["gnihtemos", peers[1].id[-6:]]
    assert page.row(peers[0].id).find_element("css selector", "bdi.name").value_of_css_property("unicode-bidi") in (
        "isolate",
        "isolate-override",
    )


# --- restarts of the server ------------------------------------------------------------------------------------------


def test_it_tells_when_nobody_answers_and_heals(page: Page, exchange: Callable[..., ExchangeRow]) -> None:
    """Check the bar that shows the last contact: it disappears with a new process on the port, and edges light
    again."""
    port = page.shown.port
    there = (
        "const away = document.getElementById('away'); return getComputedStyle(away).display !== 'none' && !away.hidden"
    )
    assert page.run(there), "words that appear together with their place are not told by all screen readers"
    assert not page.browser.find_element("id", "away").is_displayed()
    page.shown.end()
    page.until(lambda: "has ended or cannot be reached; last seen " in page.text("away"))
    assert page.browser.find_element("id", "away").is_displayed()
    assert page.text("held-out") == "1.987", "what was seen last stays to be read"
    page.shown.view.figures["held_out"] = 1.5
    page.shown.publish()
    page.shown.serve(ListenAddress(port=port))
    page.until(lambda: not page.browser.find_element("id", "away").is_displayed())
    assert page.text("held-out") == "1.500"
    page.next_document()
    before = page.gossip("lit")
    exchange(page.shown.view, page.shown.at, 1, 2, random.Random(1))
    page.shown.publish()
    page.until(lambda: page.gossip("lit") > before)


def test_a_run_that_has_ended_is_told_as_a_success(page: Page) -> None:
    """Check the end of a testnet, whose server ends too: the last figures stay, without an error."""
    page.shown.view.figures["fraction"] = 0.996
    page.shown.view.state = "finishing"
    page.next_document()
    page.shown.end()
    page.until(lambda: page.text("away").startswith("The run has ended. These are its last figures, of "))
    assert page.browser.find_element("id", "away").is_displayed()
    assert (page.text("held-out"), page.text("state")) == ("1.987", "ended")
    assert page.count("html.stale") == 0
    assert not page.browser.find_element("id", "join").is_displayed()


def test_serials_that_begin_anew_are_news(page: Page, make_view: Callable[..., View]) -> None:
    """Check that a restarted process, whose serials start at one, has its first events shown."""
    port = page.shown.port
    page.shown.end()
    page.until(lambda: page.browser.find_element("id", "away").is_displayed())
    fresh = make_view(8)
    fresh.exchanges.clear()
    fresh.failures.clear()
    fresh._serial = 0
    page.shown.view = fresh
    page.shown.publish()
    page.shown.serve(ListenAddress(port=port))
    page.until(lambda: not page.browser.find_element("id", "away").is_displayed())
    page.next_document()
    before = page.gossip("lit")
    row = FailureRow(fresh.next_serial(), page.shown.at, fresh.me, "first")
    fresh.failures.append(row)
    page.shown.publish()
    page.until(lambda: page.gossip("lit") == before + 1)


def test_a_token_that_is_no_longer_known_is_said(page: Page) -> None:
    """Check a restart with a token: polling on is useless, and the page says to open the printed address."""
    port = page.shown.port
    page.shown.end()
    page.shown.serve(ListenAddress("0.0.0.0", port, "a-token-for-tests"))
    page.once_asked(lambda: "token is no longer valid" in page.text("away"))


def test_a_token_does_not_stay_in_the_address(page: Page) -> None:
    """Check that the token leaves the address bar and the history, and that the page can still be reloaded."""
    page.shown.end()
    page.shown.serve(ListenAddress("0.0.0.0", 0, "a-token-for-tests"))
    assert page.shown.url.endswith("?token=a-token-for-tests")
    page.browser.get(page.shown.url + "&by=mail#people-title")
    page.until(lambda: page.shows)
    assert page.browser.current_url == page.shown.server.address + "?by=mail#people-title"
    history = page.browser.execute_cdp_cmd("Page.getNavigationHistory", {})["entries"]
    assert [each["url"] for each in history if "a-token-for-tests" in each["url"]] == []
    page.browser.refresh()
    page.until(lambda: page.shows)
    assert page.complaints() == []


def test_a_newer_document_is_refused(page: Page) -> None:
    """Check that a page rejects a document of a newer version with a message."""
    page.shown.replace({**page.shown.view.document(page.shown.at), "schema": 2})
    page.once_asked(lambda: "newer than the page" in page.text("away"))


def test_a_document_that_cannot_be_shown_is_said_to_be_and_the_next_one_is(page: Page) -> None:
    """Check that an invalid document is reported, and that the next one is shown."""
    page.shown.replace({**page.shown.view.document(page.shown.at), "curves": 5})
    page.once_asked(lambda: "cannot be shown" in page.text("away"))
    assert page.run("return document.documentElement.classList.contains('stale')")
    page.next_document()
    assert not page.run("return document.documentElement.classList.contains('stale')")
    assert page.text("away") == ""
    assert len(page.complaints()) > 0  # the reason is in the console


# --- extremes --------------------------------------------------------------------------------------------------------


def test_two_hundred_peers_and_two_thousand_exchanges(
    page: Page, make_view: Callable[..., View], exchange: Callable[..., ExchangeRow]
) -> None:
    """Check that the page responds, and that its lit edges and nodes are bounded."""
    page.shown.view = make_view(200)
    page.next_document()
    assert page.gossip("peers") == 200
    assert page.count("#people tbody tr") == 200
    seed = random.Random(1)
    for _ in range(40):
        for _ in range(50):
            exchange(page.shown.view, page.shown.at, seed.randrange(200), seed.randrange(200), seed)
        page.shown.publish()
        assert page.gossip("live") <= MOST_LIVE
    page.until(lambda: page.gossip("lit") > MOST_LIVE)
    nodes = page.count("*")
    page.next_document()
    assert page.gossip("live") <= MOST_LIVE
    assert page.count("*") == nodes, "the page grows while it is looked at"
    assert nodes < 200 * MOST_NODES_PER_PEER
    assert page.complaints() == []


MOST_BUSY_S = 2.0
"""Most processor seconds for a document of 200 peers: ten times an idle machine's."""


def test_two_hundred_peers_leave_time_for_whoever_looks(
    page: Page, make_view: Callable[..., View], exchange: Callable[..., ExchangeRow]
) -> None:
    """Check that a click is handled while every number changes with every document, and that the page has idle time."""
    page.browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})

    def busy_s() -> float:
        metrics = page.browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

    seed = random.Random(1)
    page.shown.view = make_view(200)
    page.next_document()
    title = page.browser.find_element("xpath", "//th[.='Tokens/s']")
    costs = []
    for turn in range(5):
        rows = page.shown.view.peers.values()
        page.shown.view.place([replace(row, tokens_per_s=seed.uniform(1e3, 2e4), loss=seed.random()) for row in rows])
        for _ in range(25):
            exchange(page.shown.view, page.shown.at, seed.randrange(200), 0, seed)
        page.shown.publish()
        before = busy_s()
        page.once_asked(lambda: page.shows == f"{page.shown.at:.0f}")
        costs.append(busy_s() - before)
        title.find_element("tag name", "button").click()
        assert title.get_attribute("aria-sort") == ("descending", "ascending", None)[turn % 3]
    assert sorted(costs)[2] < MOST_BUSY_S, costs
    page.browser.execute_cdp_cmd("Performance.disable", {})


def bare(value: Any) -> Any:
    """Return a document without values: null for each value; lists and objects stay."""
    if isinstance(value, dict):
        return {name: each if name in ("id", "peer", "a", "b", "n") else bare(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [bare(each) for each in value] if value and isinstance(value[0], dict) else []
    return None


@pytest.mark.parametrize("how", ["nothing in it", "null everywhere", "nothing at all"])
def test_what_is_not_known_is_a_dash(page: Page, make_view: Callable[..., View], how: str) -> None:
    """Check that no NaN, undefined, null or Infinity appears, and no error, for any missing part."""
    empty = View("bootstrap").document(page.shown.at)
    full = make_view(8).document(page.shown.at)
    documents = {
        "nothing in it": empty,
        "null everywhere": {**bare(full), "schema": 1, "kind": "peer"},
        "nothing at all": {"schema": 1},
    }
    page.shown.replace({**documents[how], "at": None})
    page.once_asked(lambda: page.shows == "null")
    for name in ("peers", "speed", "exchanges", "disagreement", "up", "down", "fraction", "state"):
        assert page.text(name) == ("0" if name == "peers" and how == "nothing in it" else DASH), name
    text = page.browser.find_element("tag name", "body").text
    assert not {word for word in ("NaN", "undefined", "null", "Infinity", "[object") if word in text}
    assert page.complaints() == []


# --- appearance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [360, 390, 600, 768, 1024])
def test_the_page_never_scrolls_sideways(page: Page, make_view: Callable[..., View], width: int) -> None:
    """Check widths from phones to screens, with long words in every place."""
    page.shown.view = make_view(40)
    long = "m" * 32
    rows = [replace(row, nickname=long, device=long) for row in page.shown.view.peers.values()]
    page.shown.view.place(rows)
    page.shown.view.run = replace(page.shown.view.run, name="n" * 80)
    page.shown.view.why = "w" * 240
    for curve in page.shown.view.curves.values():
        curve.name = long
    page.shown.view.failures.append(FailureRow(10**6, page.shown.at, rows[0].id, "l" * 240))
    for row in rows:
        page.shown.view.contributions.take(Contribution(row.id, long, 10**9, 1e6, 10**8, ("a",)))
    for step in range(3):
        page.shown.view.write(SampleText(page.shown.at + step, "a", step, "", f"{'t' * 240}{step}", 1e9 * step))
    page.device(width, 740)
    page.next_document()
    page.until(lambda: page.run("return document.documentElement.scrollWidth") <= width)
    right = "return document.querySelector('#loss-chart canvas').getBoundingClientRect().right"
    page.until(lambda: page.run(right) <= width)


def test_light_and_dark(page: Page) -> None:
    """Check that the theme follows the system until the button changes it, and that a reload keeps the choice."""

    def background() -> str:
        return str(page.run("return getComputedStyle(document.body).backgroundColor"))

    light = background()
    page.prefer(color_scheme="dark")
    page.until(lambda: background() != light)
    dark = background()
    button = page.browser.find_element("id", "theme")
    button.click()
    assert background() == light
    assert button.get_attribute("aria-label") == "Switch to dark colours"
    page.open()
    assert background() == light
    page.browser.find_element("id", "theme").click()
    assert background() == dark
    page.prefer(color_scheme="light")  # a choice equal to the system's is dropped, and the page follows the system
    page.until(lambda: background() == light)


def test_an_explanation_opens_and_closes_by_keyboard(page: Page) -> None:
    """Check Enter and Escape, that Escape keeps the focus, and that one explanation at a time is open."""
    first, second = page.browser.find_elements("css selector", ".figures summary")[:2]
    first.send_keys(Keys.ENTER)
    page.until(lambda: page.count("details[open]") == 1)
    second.send_keys(Keys.ENTER)
    page.until(lambda: second.find_element("xpath", "..").get_attribute("open") is not None)
    assert page.count("details[open]") == 1
    second.send_keys(Keys.ESCAPE)
    page.until(lambda: page.count("details[open]") == 0)
    assert page.browser.switch_to.active_element == second


def test_every_figure_is_explained_and_every_control_has_a_name(page: Page) -> None:
    """Check that each tile and card has an explanation, and each control a name for screen readers."""
    page.shown.view.public = "run"
    page.next_document()
    assert page.count(".figures dt") == page.count(".figures dt details > p") == 7
    assert page.count(".card") == page.count(".card .head details > p")
    assert page.count("summary:not([aria-label]), canvas[role=img]:not([aria-label])") == 0
    for each in page.browser.find_elements("css selector", "button, summary, section, canvas#gossip, progress, input"):
        assert each.accessible_name, each.get_attribute("outerHTML")
    assert page.count("header, main, footer") == 3
    assert page.count("h1") == 1


def test_the_join_command_is_copied(page: Page) -> None:
    """Check the clipboard of browsers that allow it."""
    page.run(
        "Object.defineProperty(navigator, 'clipboard', { value: { writeText: (text) => (window.copied = text) } })"
    )
    page.browser.find_element("id", "join-copy").click()
    page.until(lambda: page.text("join-told") == "Copied.")
    assert page.run("return window.copied") == page.shown.view.join


def test_the_join_command_is_selected_where_nothing_can_be_copied(page: Page) -> None:
    """Check that the page says what to do instead."""
    field = page.browser.find_element("id", "join-command")
    assert field.get_attribute("value") == page.shown.view.join
    page.run("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as over plain http
    page.browser.find_element("id", "join-copy").click()
    page.until(lambda: "Selected" in page.text("join-told"))
    assert page.run("return getSelection().toString()") == page.shown.view.join


def test_how_far_a_join_command_reaches_stands_beside_it(page: Page) -> None:
    assert page.text("join-note") == ""
    page.shown.view.join_note = "This address works inside your own network only. <b>Forward</b> a port"
    page.next_document()
    assert page.text("join-note") == page.shown.view.join_note


def test_without_a_join_command_there_is_no_place_for_it(page: Page) -> None:
    """Check a run that a link alone does not admit to."""
    page.shown.view.join = ""
    page.next_document()
    assert not page.browser.find_element("id", "join").is_displayed()


# --- people ----------------------------------------------------------------------------------------------------------


def contributed(page: Page) -> None:
    """Let three peers have contributed, one of which is gone, with a measured speed."""
    table, [first, second, *_] = page.shown.view.contributions, page.shown.view.peers
    for minute in range(11):
        table.observe(60_000.0 * minute, page.shown.at + 30.0 * minute)
    table.take(Contribution(first, "Amber", 300_000, 5400.0, 240_000, ("a", "b"), page.shown.at))
    table.take(Contribution(second, HOSTILE, 150_000, None, 0, (), page.shown.at))
    table.take(Contribution("12D3KooWgone99", "", 60_000, 60.0, 60_000, ("a",), page.shown.at))


def cells_of(page: Page) -> list[list[str]]:
    """Return the texts of the table of contributions."""
    found = page.run(
        "return [...document.querySelectorAll('#contributors tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    return [[text.replace("\u00a0", " ") for text in row] for row in found]


def test_contributions_are_a_table_with_the_largest_first(page: Page) -> None:
    """Check values with units, what is only claimed, a name that is not markup, and a peer that left."""
    assert page.browser.find_element("id", "contributors-nothing").is_displayed()
    contributed(page)
    page.next_document()
    ids = list(page.shown.view.peers)
    assert cells_of(page) == [
        [f"Amber{ids[0][-6:]}", "300 k", "1.5 h", "50 %", "10 min", "80 % by 2"],
        [f"{HOSTILE}{ids[1][-6:]}", "150 k", DASH, "25 %", "3 min", "only claimed"],
        ["gone99gone99", "60.0 k", "60 s", "10 %", "67 s", "100 % by 1"],
    ]
    assert not alerted(page)
    assert page.text("contributors-note").replace("\u00a0", " ") == "90.0 k tokens by others"
    assert page.count("#contributors tr.me") == page.count("#contributors tr.away-now") == 1


def test_what_the_model_wrote_before_stands_beside_what_it_writes_now(page: Page) -> None:
    """Check that the first text is shown first, that another one can be chosen, and that the choice stays."""
    assert not page.browser.find_element("id", "sample-before").is_displayed()
    for step in range(1, 4):
        text = f"{HOSTILE} text {step}"
        page.shown.view.write(SampleText(page.shown.at + step, "a", step, "", text, 1000.0 * step))
    page.next_document()
    assert (page.text("before-text"), page.text("sample-text")) == (f"{HOSTILE} text 1", f"{HOSTILE} text 3")
    assert page.text("sample-now").replace("\u00a0", " ") == "Now, at 3.00 k tokens"
    Select(page.browser.find_element("id", "sample-choice")).select_by_index(1)
    assert page.text("before-text") == f"{HOSTILE} text 2"
    page.shown.view.write(SampleText(page.shown.at + 4, "a", 4, "", "newest", 4000.0))
    page.next_document()
    assert (page.text("before-text"), page.text("sample-text")) == (f"{HOSTILE} text 2", "newest")
    assert not alerted(page)


def test_the_link_to_the_public_page_has_no_token(page: Page) -> None:
    """Check that the owner's page offers the link if there is a public page, and that the button copies it."""
    assert not page.browser.find_element("id", "share").is_displayed()
    page.shown.view.public = "run"
    page.next_document()
    page.run(
        "Object.defineProperty(navigator, 'clipboard', { value: { writeText: (text) => (window.copied = text) } })"
    )
    page.browser.find_element("id", "link-copy").click()
    page.until(lambda: page.text("link-told") == "Copied.")
    assert page.run("return window.copied") == f"{page.shown.url}run"


@pytest.mark.parametrize("width", [360, 1280])
def test_everybody_sees_the_public_page(page: Page, width: int) -> None:
    """Check the page without a token: its figures, no complaint of the browser, and that it fits on a phone."""
    page.shown.end()
    page.shown.serve(ListenAddress("0.0.0.0", 0, "secret"), is_public=True)
    contributed(page)
    for step in (1, 2):
        page.shown.view.write(SampleText(page.shown.at + step, "a", step, "", f"{'m' * 99} {step}", 1000.0 * step))
    page.shown.publish()
    page.device(width, 740)
    page.browser.get("about:blank")  # the first page complains that its server has ended
    page.complaints()
    page.browser.get(f"http://127.0.0.1:{page.shown.port}/run")
    page.until(lambda: page.shows)
    assert page.complaints() == []
    assert page.text("run-name") == "tiny-stories"
    assert (page.text("fraction"), page.text("peers"), page.text("held-out")) == ("46\u00a0%", "8", "1.987")
    assert cells_of(page)[0][1] == "300 k"
    assert page.text("before-text").endswith("m 1")
    assert page.browser.find_element("id", "join-command").get_attribute("value") == page.shown.view.join
    assert page.browser.find_element("id", "link").get_attribute("value").endswith(f":{page.shown.port}/run")
    assert page.browser.find_element("id", "link-copy").is_displayed()
    assert not page.browser.find_element("id", "state").is_displayed()  # of one peer or bootstrap
    assert page.run("return document.documentElement.scrollWidth") <= width
    assert not alerted(page)
    for each in page.browser.find_elements("css selector", "button, input, summary, select"):
        assert each.accessible_name or not each.is_displayed(), each.get_attribute("outerHTML")
