"""Mistakes on the command line, before anything starts."""

from __future__ import annotations

import configparser
import socket
from pathlib import Path
from typing import Any

import pytest
from setuptools import find_packages

from lab.stages import page_argument
from p2ptrain.base.errors import UserError
from peer.testnet.command import testnet

ROOT = Path(__file__).parents[3]


def test_a_page_that_cannot_be_served_replaces_no_earlier_testnet(tmp_path: Path) -> None:
    earlier = tmp_path / "summary.json"
    earlier.write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}: Address already in use"):
            testnet(["--page", str(port), "--out", str(tmp_path)], standalone_mode=False)
    assert earlier.read_text() == "{}"


def test_a_scenario_can_be_watched_except_on_hosts_that_no_link_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acted: list[tuple[Any, ...]] = []

    def run_scenario(*arguments: Any) -> int:
        acted.append(arguments)
        return 0

    monkeypatch.setattr("lab.run_scenario", run_scenario)
    assert testnet(["--scenario", "it.toml", "--page", "8080"], standalone_mode=False) == 0
    assert testnet(["--scenario", "it.toml", "--stage", "docker"], standalone_mode=False) == 0
    assert [(each[2], each[-1]) for each in acted] == [("local", "8080"), ("docker", "")]
    with pytest.raises(UserError, match="no link leads out of it"):
        page_argument("8080", "namespaces")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        with pytest.raises(UserError, match="Address already in use"):
            page_argument(port, "local")
    assert page_argument("0.0.0.0:0", "local") == "0.0.0.0:0"


def test_a_scenario_without_a_clone_is_refused_kindly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check an installed package without the repository around it."""
    monkeypatch.setattr("p2ptrain.base.imports.CLONE", tmp_path)
    with pytest.raises(UserError, match="--scenario needs a clone") as caught:
        testnet(["--scenario", "it.toml"], standalone_mode=False)
    assert "make install" in caught.value.remedy


def test_the_package_that_is_shipped_has_neither_laboratory_nor_simulator() -> None:
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    packages = find_packages(str(ROOT), include=config["options.packages.find"]["include"].split())
    assert "peer.testnet" in packages
    assert [each for each in packages if {"lab", "sim"} & set(each.split("."))] == []
