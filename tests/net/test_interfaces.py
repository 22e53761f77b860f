"""A node's own addresses, from its interfaces."""

from __future__ import annotations

import sys
from pathlib import Path

from p2ptrain.net import interfaces

HOSTS = ["127.0.0.1", "192.168.1.2", "::1", "fe80::1", "2a01:a::2"]


def test_an_unspecified_host_stands_for_all_addresses_of_its_family() -> None:
    assert interfaces.listening(["/ip4/0.0.0.0/tcp/5"], HOSTS) == ["/ip4/127.0.0.1/tcp/5", "/ip4/192.168.1.2/tcp/5"]
    assert interfaces.listening(["/ip6/::/tcp/5"], HOSTS) == ["/ip6/::1/tcp/5", "/ip6/2a01:a::2/tcp/5"]
    assert interfaces.listening(["/ip4/192.168.1.9/tcp/5"], HOSTS) == ["/ip4/192.168.1.9/tcp/5"]


def test_a_node_that_punches_announces_private_addresses_or_else_loopback() -> None:
    both = interfaces.listening(["/ip4/0.0.0.0/tcp/5", "/ip6/::/tcp/5"], HOSTS)
    assert interfaces.unreachable_from_afar(both) == ["/ip4/192.168.1.2/tcp/5"]
    assert interfaces.unreachable_from_afar(["/ip4/46.10.1.2/tcp/5"]) == ["/ip4/127.0.0.1/tcp/5"]


def test_this_machine_has_a_loopback() -> None:
    assert "127.0.0.1" in interfaces.interface_hosts()


def test_default_gateways_are_those_of_routes_to_everywhere(tmp_path: Path) -> None:
    def row(destination: str, gateway: str, mask: str) -> str:
        numbers = (
            int.from_bytes(bytes(map(int, each.split("."))), sys.byteorder) for each in (destination, gateway, mask)
        )
        there, by, wide = (f"{each:08X}" for each in numbers)
        return f"eth0\t{there}\t{by}\t0003\t0\t0\t0\t{wide}\t0\t0\t0"

    table = tmp_path / "route"
    rows = [row("0.0.0.0", "192.168.1.1", "0.0.0.0"), row("10.0.0.0", "192.168.1.9", "255.0.0.0")]
    table.write_text("\n".join(["Iface\tDestination", *rows, row("0.0.0.0", "0.0.0.0", "0.0.0.0")]))
    assert interfaces.default_gateways(table) == {"192.168.1.1"}
    assert interfaces.default_gateways(tmp_path / "none") is None
