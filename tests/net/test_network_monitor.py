"""Changes of this machine's network, with made-up addresses and clocks."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys

import pytest
import virtual_time

from lab.hosts import Access, Network
from lab.moves import change_network
from lab.script import ActKind
from p2ptrain.net.network_monitor import (
    DEAD_S,
    POLL_S,
    READY_S,
    ChangeDetector,
    InterfaceAddresses,
    NetworkCause,
    NetworkChange,
    NetworkMonitor,
)

HOME = InterfaceAddresses(frozenset({("wlan0", "192.168.1.2")}), frozenset({"192.168.1.2"}))
PHONE = InterfaceAddresses(frozenset({("usb0", "10.0.0.7")}), frozenset({"10.0.0.7"}))
NO_ROUTE = InterfaceAddresses(HOME.hosts, frozenset())
NOTHING = InterfaceAddresses(frozenset(), frozenset())
BRIDGED = InterfaceAddresses(HOME.hosts | {("docker0", "172.17.0.1")}, HOME.sources)
SECOND = InterfaceAddresses(HOME.hosts | PHONE.hosts, PHONE.sources)
LAN = InterfaceAddresses(HOME.hosts, frozenset())
OTHER_LAN = InterfaceAddresses(frozenset({("eth0", "10.1.1.1")}), frozenset())
SAME_ADDRESS = InterfaceAddresses(frozenset({("eth0", "192.168.1.2")}), HOME.sources)

WATCHING = """
import asyncio
from p2ptrain.net import network_monitor
network_monitor.POLL_S = 0.1

async def main():
    look = network_monitor.InterfaceAddresses.now
    monitor = network_monitor.NetworkMonitor(look)
    monitor.begin()
    print(sorted(look().sources), flush=True)
    while True:
        change = await monitor.until_broken(lambda: None)
        print(change.cause, sorted(look().sources), flush=True)

asyncio.run(main())
"""


def seen(*places: InterfaceAddresses, step_s: float = POLL_S) -> list[NetworkChange | None]:
    """Return what a detector finds at each of these places after the first."""
    detector = ChangeDetector(places[0], 100.0)
    return [detector.observe(each, 100.0 + number * step_s) for number, each in enumerate(places[1:], 1)]


def test_nothing_changes_while_nothing_changes() -> None:
    assert seen(HOME, HOME, HOME) == [None, None]


def test_another_address_breaks_connections_once_there_is_a_network_again() -> None:
    assert seen(HOME, PHONE, PHONE) == [NetworkChange(NetworkCause.MOVED), None]
    assert seen(HOME, NOTHING, NOTHING, PHONE) == [None, None, NetworkChange(NetworkCause.MOVED)]


def test_one_more_address_breaks_nothing_but_is_told() -> None:
    assert seen(HOME, BRIDGED, BRIDGED, HOME) == [NetworkChange(None), None, NetworkChange(None)]
    assert seen(HOME, SAME_ADDRESS) == [NetworkChange(None)]


def test_another_way_out_breaks_nothing_while_the_old_address_is_there() -> None:
    moved = NetworkChange(NetworkCause.MOVED)
    assert seen(HOME, SECOND, PHONE) == [NetworkChange(None), NetworkChange(None)]
    assert seen(HOME, SECOND, HOME) == [NetworkChange(None), moved]


def test_a_short_absence_breaks_nothing_and_a_long_one_does() -> None:
    short, long = round(DEAD_S / 2 / POLL_S), round(1.5 * DEAD_S / POLL_S)
    assert seen(HOME, *[NO_ROUTE] * short, HOME)[-1] == NetworkChange(None)
    found = seen(HOME, *[NO_ROUTE] * long, HOME, HOME)
    assert found[:-2] == [None] * long
    assert found[-2:] == [NetworkChange(NetworkCause.ABSENT, long * POLL_S), None]


def test_an_address_that_comes_back_soon_is_looked_at_but_breaks_nothing() -> None:
    """Check a loose plug: connections survive it, unless the machine is now behind another router."""
    assert seen(HOME, NOTHING, NOTHING, HOME, HOME) == [None, None, NetworkChange(None), None]


def test_a_sleep_breaks_connections_even_if_it_ends_without_a_network() -> None:
    slept = NetworkChange(NetworkCause.SLEPT, 3600.0)
    assert seen(HOME, HOME, step_s=3600.0) == [slept]
    detector = ChangeDetector(HOME, 0.0)
    assert detector.observe(NOTHING, 3600.0) is None
    assert detector.observe(PHONE, 3602.0) == slept
    assert detector.observe(PHONE, 3604.0) is None


def test_a_network_without_a_route_to_the_internet_is_one() -> None:
    moved = NetworkChange(NetworkCause.MOVED)
    assert seen(LAN, OTHER_LAN) == [moved]
    waited = round(READY_S / POLL_S)
    found = seen(HOME, *[OTHER_LAN] * (waited + 2))
    assert found == [*[None] * waited, moved, None]


def test_the_monitor_reports_what_breaks_connections_and_calls_back_for_the_rest() -> None:
    """Check also a time without a node, and one in which the interfaces cannot be read: neither is a sleep."""

    async def main() -> None:
        place, is_readable, calls = [HOME], [True], list[float]()
        clock = asyncio.get_running_loop().time

        def look() -> InterfaceAddresses:
            if not is_readable[0]:
                raise OSError(errno.EMFILE, "no file descriptor is free")
            return place[0]

        monitor = NetworkMonitor(look, clock)

        def watching() -> asyncio.Task[NetworkChange]:
            return asyncio.create_task(monitor.until_broken(lambda: calls.append(clock())))

        watched = watching()
        await asyncio.sleep(10.0)
        place[0] = BRIDGED
        await asyncio.sleep(10.0)
        assert len(calls) == 1
        is_readable[0] = False
        await asyncio.sleep(3 * DEAD_S)
        is_readable[0] = True
        await asyncio.sleep(10.0)
        assert not watched.done()
        place[0] = PHONE
        assert (await watched).cause is NetworkCause.MOVED
        await asyncio.sleep(3 * DEAD_S)  # p2pd could not be started again
        watched = watching()
        await asyncio.sleep(10.0)
        assert not watched.done()
        place[0] = HOME
        assert (await watched).cause is NetworkCause.MOVED
        assert len(calls) == 1

    virtual_time.run(main())


def test_a_change_between_the_beginning_and_the_first_wait_is_noticed() -> None:
    """Check the time in which a peer's first node starts: its connections come from the address that is gone."""

    async def main() -> None:
        place = [HOME]
        monitor = NetworkMonitor(lambda: place[0], asyncio.get_running_loop().time)
        monitor.begin()
        await asyncio.sleep(3 * DEAD_S)
        place[0] = PHONE
        change = await monitor.until_broken(lambda: pytest.fail("the change breaks connections"))
        assert change == NetworkChange(NetworkCause.MOVED)

    virtual_time.run(main())


@pytest.mark.net
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are root's")
def test_the_monitor_notices_a_new_address_and_another_network() -> None:
    with Network() as network:
        host = network.add("laptop", Access(router=True))
        command = host.inside(sys.executable, "-c", WATCHING)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            try:
                assert program.stdout.readline() == "['192.168.1.2']\n"
                for kind, place in (ActKind.READDRESS, "192.168.1.52"), (ActKind.MOVE, "192.168.43.2"):
                    change_network(network, "laptop", kind)
                    assert program.stdout.readline() == f"moved ['{place}']\n"
            finally:
                program.kill()


def test_the_addresses_are_those_of_this_machine() -> None:
    here = InterfaceAddresses.now()
    assert here.sources <= {host for _, host in here.hosts}
    assert "127.0.0.1" not in {host for _, host in here.hosts}
