"""Figures as rows: what was asked for, what was measured, whether it was reached. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

FIGURES = ("codecs", "goodput", "goodput_line", "trainer", "peer", "directory")
"""Modules of this package with a ``measure()``, in the order in which they are measured. One that not every machine can
measure has a ``why_not()``, too."""

REQUIRED_GOODPUT = 0.8
REQUIRED_SHARE_OF_A_LINE = 0.9
MOST_GROWTH_OF_A_LOOKUP = 1.1
SHOWN_SWARMS = ("8", "100", "1000", "10000")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure."""

    what: str
    target: str
    """Empty: a figure to know, with nothing asked of it."""
    value: str
    reached: bool | None = None
    """None: nothing was asked."""


def rows(figures: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """The rows of whatever was measured, by the name of the module."""
    return [row for name in FIGURES if name in figures for row in _ROWS[name](figures[name])]


def table(shown: list[Row]) -> Table:
    """For the terminal."""
    made = Table(title="figures")
    for heading in ("figure", "target", "measured", ""):
        made.add_column(heading)
    for row in shown:
        made.add_row(row.what, row.target, row.value, _verdict(row))
    return made


def markdown(shown: list[Row]) -> list[str]:
    """For a document."""
    lines = ["| figure | target | measured | |", "|---|---|---|---|"]
    return lines + [f"| {row.what} | {row.target} | {row.value} | {_verdict(row)} |" for row in shown]


def _verdict(row: Row) -> str:
    return {None: "", True: "reached", False: "MISSED"}[row.reached]


def _codecs(figures: Mapping[str, Any]) -> Iterator[Row]:
    required = figures["required_gb_per_s"]
    for label, each in figures["codecs"].items():
        speeds = (each["encode_gb_per_s"], each["difference_gb_per_s"])
        asked = label in figures["required_of"]
        yield Row(
            f"{label}: encode, difference, GB/s of fp32 input on one core",
            f">= {required}" if asked else "",
            f"{speeds[0]:.2f}, {speeds[1]:.2f} (memory copy: {figures['memcpy_gb_per_s']:.1f})",
            min(speeds) >= required if asked else None,
        )


def _goodput(figures: Mapping[str, Any]) -> Iterator[Row]:
    yield Row(
        f"goodput of an exchange of {figures['payload_mb']:.0f} MB each way against a bare p2pd stream",
        f">= {REQUIRED_GOODPUT}",
        f"{figures['ratio']:.2f} ({figures['ours_mb_per_s']:.0f} against {figures['bare_mb_per_s']:.0f} MB/s)",
        figures["ratio"] >= REQUIRED_GOODPUT,
    )


def _goodput_line(figures: Mapping[str, Any]) -> Iterator[Row]:
    for delay_ms, each in figures["by_delay_ms"].items():
        yield Row(
            f"goodput of an exchange of {figures['payload_mb']:.0f} MB each way on a line of {figures['mbit_s']:g} "
            f"Mbit/s, {delay_ms} ms away, over what the line carries",
            f">= {REQUIRED_SHARE_OF_A_LINE}",
            f"{each['exchange_share']:.3f} (bare TCP: both ways {each['tcp_share']:.3f}, one way "
            f"{each['tcp_one_way_share']:.3f})",
            each["exchange_share"] >= REQUIRED_SHARE_OF_A_LINE,
        )


def _trainer(figures: Mapping[str, Any]) -> Iterator[Row]:
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
            yield Row(
                f"{name}: trainer time {what}{core}",
                target,
                f"{100 * share:.2f} % ({1000 * each[f'{key}_s_per_exchange']:.1f} ms each, {per_phase})",
                share <= required if asked else None,
            )


def _peer(figures: Mapping[str, Any]) -> Iterator[Row]:
    memory = figures["peak_memory_mb"]
    yield Row("demo peer: peak memory, MB", "", ", ".join(f"{name} {peak:.0f}" for name, peak in memory.items()))
    alone, joining = figures["empty_swarm"], figures["joining"]
    yield Row(
        "demo peer, nothing cached, empty swarm: seconds from start to first inner step",
        "",
        f"{alone['seconds_to_first_inner_step']:.1f}",
    )
    yield Row(
        "demo peer joining a swarm under way: seconds to first inner step, to first exchange",
        "",
        f"{joining['seconds_to_first_inner_step']:.1f}, {joining['seconds_to_first_exchange']:.1f}",
    )
    yield Row(
        f"demo peer: bytes sent per exchange of {figures['parameters']:,} parameters",
        "",
        f"{figures['sent_bytes_per_exchange']:,.0f} ({figures['sent_bytes_per_parameter']:.3f} per parameter)",
    )
    yield Row("demo peer, two on this machine: trainer time blocked", "", f"{100 * figures['blocked_fraction']:.2f} %")


def _directory(figures: Mapping[str, Any]) -> Iterator[Row]:
    for size in SHOWN_SWARMS:
        each = figures[size]
        yield Row(
            f"directory, {int(size):,} peers: keys asked and records found in a lookup; kB a minute of a peer",
            "",
            f"{each['gets_per_lookup']:.2f}, {each['records_per_lookup']:.0f}; "
            f"{each['kilobytes_per_peer_per_minute']:.0f}",
        )
    growth = figures[SHOWN_SWARMS[-1]]["gets_per_lookup"] / figures[SHOWN_SWARMS[0]]["gets_per_lookup"]
    yield Row(
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
