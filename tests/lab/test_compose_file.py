"""Requirements of docker/compose.yaml, read without an engine."""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml

from bootstrap import cli as bootstrap_cli
from peer import cli as peer_cli

DOCKER = Path(__file__).parent.parent.parent / "docker"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return document


def test_whoever_has_something_to_save_has_the_time(compose: dict[str, Any]) -> None:
    """Check the grace period of containers that save at the end: by default, Docker kills after 10 s."""
    least = dict.fromkeys(("peer", "slow", "hidden", "adversary"), 60) | {"bootstrap": 30}
    for name, seconds in least.items():
        service = compose["services"][name]
        assert int(service["stop_grace_period"].removesuffix("s")) >= seconds, name
        assert service["init"], name  # the first process of a container receives no signal without a handler of its own


def test_every_peer_has_a_home_of_its_own_and_nobody_has_the_engines_socket(compose: dict[str, Any]) -> None:
    """Check that each replica has an anonymous volume, and no address, name or port that only one replica could
    have."""
    services = compose["services"]
    for name in ("peer", "slow", "hidden", "adversary"):
        assert "/data" in services[name]["volumes"], name
        assert "swarm:/swarm:ro" in services[name]["volumes"], name
    assert not {"container_name", "ports", "hostname"} & set(services["peer"])
    assert services["peer"]["networks"] == ["backbone"]
    assert not any("docker.sock" in volume for each in services.values() for volume in each.get("volumes", []))
    ports = [port for each in services.values() for port in each.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_no_website_reads_the_page_by_the_token_that_everybody_knows(compose: dict[str, Any]) -> None:
    """Check that DNS rebinding through the owner's browser fails: the page opens by this computer's names only."""
    environment = compose["services"]["bootstrap"]["environment"]
    assert with_defaults(environment["P2PTRAIN_PAGE_HOSTS"]) == "127.0.0.1,localhost"
    for module in (peer_cli.peer, bootstrap_cli.bootstrap):
        assert "P2PTRAIN_PAGE_HOSTS" in [each.envvar for each in module.params]


def test_only_who_is_root_first_may_shape_its_line(compose: dict[str, Any]) -> None:
    """Check that only containers that start as root may shape their link, and that none is privileged."""
    root = {name for name, service in compose["services"].items() if service.get("user") == "root"}
    assert root == {name for name, service in compose["services"].items() if "cap_add" in service}
    assert root == {"slow", "router", "hidden"}
    assert not any("privileged" in service for service in compose["services"].values())


def test_who_is_of_a_profile_waits_for_nobody_outside_of_it(compose: dict[str, Any]) -> None:
    """Check profiles: a service that depends on one of an excluded profile makes the file invalid."""
    services = compose["services"]
    for name, service in services.items():
        for other in service.get("depends_on", {}):
            assert set(services[other].get("profiles", [])) <= set(service.get("profiles", [])), (name, other)
    assert {each for service in services.values() for each in service.get("profiles", [])} == {
        "slow",
        "nat",
        "adversary",
    }


def test_nobody_is_given_an_address_that_is_somebody_elses(compose: dict[str, Any]) -> None:
    """Check that fixed addresses lie outside the dynamic range: they stay free while their owner is down."""
    fixed = 0
    for service in compose["services"].values():
        networks = service["networks"] if isinstance(service["networks"], dict) else {}
        for network, settings in networks.items():
            if "ipv4_address" in settings:
                fixed += 1
                pool = compose["networks"][network]["ipam"]["config"][0]
                default = {key: with_defaults(pool[key]) for key in ("subnet", "ip_range", "gateway")}
                address = ip_address(with_defaults(settings["ipv4_address"]))
                assert address in ip_network(default["subnet"])
                assert address not in ip_network(default["ip_range"])
                assert address != ip_address(default["gateway"])
    assert fixed == 2


def with_defaults(text: str) -> str:
    """Return the text with the defaults of its variables filled in."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_cards_are_for_those_who_train_and_nothing_else_changes(compose: dict[str, Any]) -> None:
    cards: dict[str, Any] = yaml.safe_load((DOCKER / "compose.gpu.yaml").read_text())
    assert {each for each in cards if not each.startswith("x-")} == {"services"}
    assert set(cards["services"]) == set(compose["services"])
    for name, service in cards["services"].items():
        assert set(service) <= {"build", "deploy"}, name
        assert service["build"] == {"args": {"VARIANT": "${VARIANT:-cuda}"}}, name  # one build for all
        assert set(service["build"]["args"]) <= set(compose["x-build"]["args"])
        assert ("deploy" in service) is (name not in ("bootstrap", "router")), name
    [device] = cards["services"]["peer"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert "cuda)" in (DOCKER / "install-needs.sh").read_text()
