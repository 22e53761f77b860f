"""A node's own addresses, from its interfaces."""

from __future__ import annotations

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
