"""The table of benchmarks, and benchmarks that a machine cannot run."""

from __future__ import annotations

import importlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click import ClickException
from click.testing import CliRunner

from bench import __main__ as bench
from bench import card, goodput_line
from bench.goodput_line import LineCase, figures, measure
from bench.table import _ROWS, FIGURES, rows


def of_a_line(**shares: float) -> dict[str, Any]:
    each = {"tcp_share": 0.94, "tcp_one_way_share": 0.95, **shares}
    return {"goodput_line": {"payload_mb": 33.6, "mbit_s": 100.0, "by_delay_ms": {"0": each}}}


def test_every_figure_is_measured_and_shown() -> None:
    assert list(FIGURES) == list(_ROWS)
    assert [name for name in FIGURES if not callable(importlib.import_module(f"bench.{name}").measure)] == []


@pytest.mark.parametrize(("share", "reached"), [(0.9, True), (0.899, False)])
def test_nine_tenths_of_a_line_are_asked_for(share: float, reached: bool) -> None:
    (row,) = rows(of_a_line(exchange_share=share))
    assert (row.target, row.reached) == (">= 0.9", reached)
    assert row.value == f"{share:.3f} (bare TCP: both ways 0.940, one way 0.950)"


def test_a_share_is_what_passed_over_what_the_line_carries_in_that_time() -> None:
    # 25 MiB are 209.7 Mbit: 2.097 s at 100 Mbit/s.
    seconds = {"exchange": [2.33, 4.0, 2.2], "tcp": [2.2, 2.0, 2.2], "tcp_one_way": [2.15, 2.15, 9.0]}
    found = figures(seconds, LineCase(mebibytes=25, pairs=3, mbit_s=100.0))
    assert found == {
        "exchange_share": 0.9,
        "exchange_share_min": 0.524,
        "tcp_share": 0.953,
        "tcp_one_way_share": 0.975,
        "of_tcp": 0.944,
    }


def test_what_a_machine_cannot_measure_is_left_out_with_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput_line, "why_not", lambda: "Network namespaces need root.")
    monkeypatch.setattr(bench, "measured", lambda name, scratch: pytest.fail(f"{name} was measured"))
    target = tmp_path / "bench.json"
    done = CliRunner().invoke(bench.main, ["--only", "goodput_line", "--json", str(target)])
    assert done.exit_code == 0, done.output
    assert "goodput_line is skipped: Network namespaces need root." in done.output
    assert not target.exists() or json.loads(target.read_bytes())["figures"] == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are root's")
@pytest.mark.net
@pytest.mark.lab
def test_an_exchange_and_bare_tcp_have_their_turns_on_lines_near_and_far() -> None:
    found = measure(LineCase(mebibytes=1, pairs=1, delays_ms=(0.0, 10.0)))
    assert list(found["by_delay_ms"]) == ["0", "10"]
    for each in found["by_delay_ms"].values():
        assert all(0 < share < 1.2 for share in each.values() if share != each["of_tcp"])


class Browser:
    """Browser that reports these numbers of lit edges, one per request."""

    def __init__(self, lit: list[int]) -> None:
        self.lit = lit
        self.taken = 0

    def execute_script(self, script: str) -> int:
        return self.lit.pop(0) if len(self.lit) > 1 else self.lit[0]

    def get_screenshot_as_png(self) -> bytes:
        self.taken += 1
        return b"picture %d" % self.taken


def test_a_picture_of_the_gossip_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a picture without lit edges is taken again, and that none is taken before an edge is lit."""
    pictures = pytest.importorskip("bench.pictures", exc_type=ImportError)
    monkeypatch.setattr(pictures.time, "sleep", lambda seconds: None)
    again = Browser([0, 1, 2, 0, 2, 1])
    assert pictures.lit_picture(again) == b"picture 2"
    monkeypatch.setattr(pictures, "LIT_S", 0.05)
    with pytest.raises(ClickException, match="no picture shows"):
        pictures.lit_picture(Browser([1]))


def test_what_a_card_does_is_told_in_tables() -> None:
    environment = {"machine": "some", "python": "3", "torch": "2", "date": "today", "commit": "abc"}
    document = {
        "card": {"name": "Some card"},
        "environment": environment,
        "placement": {
            "demo": {
                "parameters": 1000,
                "computes_in": "bfloat16",
                "micro_batch": 2,
                "sequences_per_step": 4,
                "searched_s": 1.5,
                "peak_gb": 0.25,
                "waits": 3,
            }
        },
        "gossip": {
            "demo": {
                "exchanges": 7,
                "time_ratio": 1.01,
                "blocked_s_per_exchange": 0.002,
                "preset_blocked_share": 0.003,
                "preset_lost_share": 0.01,
            }
        },
        "speed": {"demo": {"as found": 12_345.6, "fp32": None}},
        "learning": {"demo": {"steps": 9, "before": 5.5, "fp32": [2.0, 3.0], "16 bits": [2.5, 3.5]}},
        "codecs": {"topk": {"on_card_fault": "no", "on_host_gb_per_s": 1.0, "messages_equal": False}},
    }
    told = card.lines(document)
    assert told[0].startswith("Some card; some; Python 3")
    assert "| demo | 1,000 | bfloat16 | 2 of 4 | 1.5 s | 0.2 GB | 3 |" in told
    assert "| demo | 7 | 1.010 of the time without | 2.0 ms | 0.30 % | 1.00 % |" in told
    assert "| demo | 12,346 | out of memory |" in told
    assert "| demo | 9 | 5.500 | 2.5000 ± 0.7071 | 3.0000 ± 0.7071 | 0.5000 ± 0.0000 |" in told
    assert "| topk | not at all | 1.00 GB/s | no |" in told
    document["placement"]["demo"] |= {"peak_gb": None, "waits": None}  # a backend that counts none
    assert "| demo | 1,000 | bfloat16 | 2 of 4 | 1.5 s | not counted | not counted |" in card.lines(document)
    del document["placement"]
    assert not any("at once" in line for line in card.lines(document))  # no table for what was not measured


def test_waits_for_a_card_are_counted_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def work() -> None:
        assert modes == ["warn"]
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    assert card.waits(torch.device("cuda"), work) == 2
    assert modes == ["warn", "default"]
    assert card.waits(torch.device("cpu"), work) is None


def test_without_a_card_there_is_nothing_to_measure(tmp_path: Path) -> None:
    done = CliRunner().invoke(card.main, ["--device", "cpu", "--json", str(tmp_path / "card.json")])
    assert done.exit_code == 1
    assert "p2ptrain doctor" in done.output
    assert not (tmp_path / "card.json").exists()
