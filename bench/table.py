"""Figures as rows: target, measured value, and whether the target was reached. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

FIGURES = ("codecs", "goodput", "goodput_line", "trainer", "peer", "directory")
"""Modules of this package with a ``measure()``, in the order of measurement. Modules that need a special machine also
have a ``why_not()``."""

REQUIRED_GOODPUT = 0.8
REQUIRED_SHARE_OF_A_LINE = 0.9
MOST_GROWTH_OF_A_LOOKUP = 1.1
SHOWN_SWARMS = ("8", "100", "1000", "10000")


@dataclass(frozen=True, slots=True)
class FigureRow:
    """One figure with its target."""

    what: str
    target: str
    """Empty if there is no target."""
    value: str
    reached: bool | None = None
    """None if there is no target."""


def rows(figures: Mapping[str, Mapping[str, Any]]) -> list[FigureRow]:
    """Return the rows of the measured figures, given by name of the module."""
    return [row for name in FIGURES if name in figures for row in _ROWS[name](figures[name])]


def table(shown: list[FigureRow]) -> Table:
    """Return the table for the terminal."""
    made = Table(title="figures")
    for heading in ("figure", "target", "measured", ""):
        made.add_column(heading)
    for row in shown:
        made.add_row(row.what, row.target, row.value, _verdict(row))
    return made


def markdown(shown: list[FigureRow]) -> list[str]:
    """Return the table in Markdown."""
    lines = ["| figure | target | measured | |", "|---|---|---|---|"]
    return lines + [f"| {row.what} | {row.target} | {row.value} | {_verdict(row)} |" for row in shown]


def _verdict(row: FigureRow) -> str:
    return {None: "", True: "reached", False: "MISSED"}[row.reached]


def _codecs(figures: Mapping[str, Any]) -> Iterator[FigureRow]:
    required = figures["required_gb_per_s"]
    for label, each in figures["codecs"].items():
        speeds = (each["encode_gb_per_s"], each["difference_gb_per_s"])
        asked = label in figures["required_of"]
        yield FigureRow(
            f"{label}: encode, difference, GB/s of fp32 input on one core",
            f">= {required}" if asked else "",
            f"{speeds[0]:.2f}, {speeds[1]:.2f} (memory copy: {figures['memcpy_gb_per_s']:.1f})",
            min(speeds) >= required if asked else None,
        )


def _goodput(figures: Mapping[str, Any]) -> Iterator[FigureRow]:
    yield FigureRow(
        f"goodput of an exchange of {figures['payload_mb']:.0f} MB each way against a bare p2pd stream",
        f">= {REQUIRED_GOODPUT}",
        f"{figures['ratio']:.2f} ({figures['ours_mb_per_s']:.0f} against {figures['bare_mb_per_s']:.0f} MB/s)",
        figures["ratio"] >= REQUIRED_GOODPUT,
    )


def _goodput_line(figures: Mapping[str, Any]) -> Iterator[FigureRow]:
    for delay_ms, each in figures["by_delay_ms"].items():
        yield FigureRow(
            f"goodput of an exchange of {figures['payload_mb']:.0f} MB each way on a line of {figures['mbit_s']:g} "
            f"Mbit/s, {delay_ms} ms away, over what the line carries",
            f">= {REQUIRED_SHARE_OF_A_LINE}",
            f"{each['exchange_share']:.3f} (bare TCP: both ways {each['tcp_share']:.3f}, one way "
            f"{each['tcp_one_way_share']:.3f})",
            each["exchange_share"] >= REQUIRED_SHARE_OF_A_LINE,
        )


def _trainer(figures: Mapping[str, Any]) -> Iterator[FigureRow]:
    for name, each in figures.items():
        required = each["required_share"]
        asked = name == "llama-15m"
        core = "" if each["trainer_has_a_core"] else ", no core of its own"
        target = f"<= {100 * required:.0f} %" if asked else ""
        per_phase = (
            f"{each['preset_exchanges_per_outer_step']} exchanges and {1000 * each['showing_s_per_phase']:.1f} ms of "
            f"showing in {each['preset_inner_phase_s']:.3g} s"
        )
        for what, key in (("blocked by exchanges", "blocked"), ("lost in all", "lost")):
            share = each[f"preset_{key}_share"]
            yield FigureRow(
                f"{name}: trainer time {what}{core}",
                target,
                f"{100 * share:.2f} % ({1000 * each[f'{key}_s_per_exchange']:.1f} ms each, {per_phase})",
                share <= required if asked else None,
            )


def _peer(figures: Mapping[str, Any]) -> Iterator[FigureRow]:
    memory = figures["peak_memory_mb"]
    yield FigureRow("demo peer: peak memory, MB", "", ", ".join(f"{name} {peak:.0f}" for name, peak in memory.items()))
    alone, joining = figures["empty_swarm"], figures["joining"]
    yield FigureRow(
        "demo peer, nothing cached, empty swarm: seconds from start to first inner step",
        "",
        f"{alone['seconds_to_first_inner_step']:.1f}",
    )
    yield FigureRow(
        "demo peer joining a swarm under way: seconds to first inner step, to first exchange",
        "",
        f"{joining['seconds_to_first_inner_step']:.1f}, {joining['seconds_to_first_exchange']:.1f}",
    )
    yield FigureRow(
        f"demo peer: bytes sent per exchange of {figures['parameters']:,} parameters",
        "",
        f"{figures['sent_bytes_per_exchange']:,.0f} ({figures['sent_bytes_per_parameter']:.3f} per parameter)",
    )
    yield FigureRow(
        "demo peer, two on this machine: trainer time blocked", "", f"{100 * figures['blocked_fraction']:.2f} %"
    )


def _directory(figures: Mapping[str, Any]) -> Iterator[FigureRow]:
    for size in SHOWN_SWARMS:
        each = figures[size]
        yield FigureRow(
            f"directory, {int(size):,} peers: keys asked and records found in a lookup; kB a minute of a peer",
            "",
            f"{each['gets_per_lookup']:.2f}, {each['records_per_lookup']:.0f}; "
            f"{each['kilobytes_per_peer_per_minute']:.0f}",
        )
    growth = figures[SHOWN_SWARMS[-1]]["gets_per_lookup"] / figures[SHOWN_SWARMS[0]]["gets_per_lookup"]
    yield FigureRow(
        "directory: keys that a lookup asks at 10,000 peers over those at 8",
        f"<= {MOST_GROWTH_OF_A_LOOKUP:g}",
        f"{growth:.3f}",
        growth <= MOST_GROWTH_OF_A_LOOKUP,
    )


_ROWS = {
    "codecs": _codecs,
    "goodput": _goodput,
    "goodput_line": _goodput_line,
    "trainer": _trainer,
    "peer": _peer,
    "directory": _directory,
}
