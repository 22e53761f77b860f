"""``p2ptrain simulate --serve`` as a process: its page shows the simulation, and Ctrl+C ends it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from commanding import SCENARIO

pytestmark = pytest.mark.net


def test_its_page_is_there_until_ctrl_c(tmp_path: Path) -> None:
    scenario, report = tmp_path / "small.toml", tmp_path / "report.json"
    scenario.write_text(SCENARIO)
    command = [sys.executable, "-m", "p2ptrain.cli", "simulate", str(scenario), "--serve", "0", "--report", str(report)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            said = ""
            while "Press Ctrl+C to close the page." not in said:
                line = process.stdout.readline()
                assert line, said
                said += line
            found = re.search(r"Watch the simulation at (http://127\.0\.0\.1:\d+/)", said)
            assert found, said
            with urllib.request.urlopen(f"{found[1]}status", timeout=10) as answer:
                shown = json.load(answer)
            with urllib.request.urlopen(found[1], timeout=10) as answer:
                assert b"<html" in answer.read()
            process.send_signal(signal.SIGINT)
            said += process.communicate(timeout=60)[0]
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert shown["state"] == "over"
    assert len(shown["peers"]) == 4
    assert shown["figures"]["exchanges"] > 0
    assert json.loads(report.read_text())
    assert "Traceback" not in said
