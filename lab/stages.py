"""Where a scenario is acted out: on the loopback of this machine, or on hosts in network namespaces.

(Or in containers: ``lab.containers``.)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from lab.freezing import Suspend, family
from lab.hosts import Access, Network
from lab.script import Script
from p2ptrain.base.errors import UserError
from p2ptrain.page.listen_address import LOOPBACK, ListenAddress, check_listen_address, listener_at
from p2ptrain.sim.testbed_fields import BOOTSTRAP, Partition, RealGroup
from peer.testnet.processes import Wrap

StageName = Literal["local", "namespaces", "docker"]

TOKEN = "P2PTRAIN_PAGE_TOKEN"
"""A variable that bootstraps read: the page's address stays what it was when its bootstrap is started again."""
HOSTS = "P2PTRAIN_PAGE_HOSTS"
"""Another: the names by which the page opens."""
OWN_NAMES = f"{LOOPBACK},localhost"


class Sleep(Protocol):
    """Somebody is asleep."""

    def end(self) -> None:
        """Wake up. Safe to call twice. In a thread, as ``Stage.nap``; raises DeviceError where it sleeps on."""
        ...


class Stage(Protocol):
    """What the conductor needs of it."""

    arguments: Sequence[str]
    """For every process that it starts here."""

    @property
    def page(self) -> Sequence[str]:
        """For the first bootstrap: where it shows the swarm; none: nowhere."""
        ...

    def inside(self, host: str, who: str) -> Wrap:
        """Where the processes of somebody on this host run."""
        ...

    def started(self, who: str, settings: RealGroup | None) -> None:
        """Somebody's first process was started; None: a bootstrap's."""
        ...

    def left(self) -> int:
        """What is still there of everybody and is no process of this system."""
        ...

    def kill(self, who: str, pid: int) -> None:
        """As when the power fails: all of somebody's processes, of which ``pid`` was started here, at once.

        Called in a thread, where it may take its time. Raises DeviceError where they live on.
        """
        ...

    def nap(self, who: str, pid: int) -> Sleep:
        """All of them stop until the end of the nap. In a thread, as ``kill``; raises DeviceError where they go on."""
        ...

    def sleeps(self, host: str, is_asleep: bool) -> None:
        """Nothing passes a sleeping host's line."""
        ...

    def parts(self, key: str) -> None:
        """The network falls apart as this partition says."""
        ...

    def heals(self, key: str) -> None:
        """That is over."""
        ...

    def close(self) -> None: ...


class OwnProcesses:
    """Everybody's processes are this system's."""

    page: Sequence[str] = ()

    def started(self, who: str, settings: RealGroup | None) -> None:
        """Lines are made before anybody starts."""

    def left(self) -> int:
        return 0

    def kill(self, who: str, pid: int) -> None:
        for each in family(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)

    def nap(self, who: str, pid: int) -> Sleep:
        return Suspend(family(pid))


class Loopback(OwnProcesses):
    """Everybody on 127.0.0.1, without lines."""

    arguments: Sequence[str] = ("--local",)

    def __init__(self, page: str = "") -> None:
        self.page = ["--page", page] if page else []

    def inside(self, host: str, who: str) -> Wrap:
        return lambda *command: command

    def sleeps(self, host: str, is_asleep: bool) -> None:
        """Its processes are frozen; a loopback has no line to cut."""

    def parts(self, key: str) -> None:
        raise AssertionError("plan.check refuses partitions here")

    heals = parts

    def close(self) -> None:
        """Nothing was made."""


class Namespaces(OwnProcesses):
    """Each peer and the bootstrap on a host of its own."""

    arguments: Sequence[str] = ()

    def __init__(self, script: Script, partitions: Sequence[Partition], seed: int) -> None:
        self._network = Network()
        self._partitions = partitions
        self._script = script
        try:
            for name in script.bootstraps:
                self._network.add(name)
            for number, (host, part) in enumerate(script.hosts.items()):
                self._network.add(host, access(part.settings), seed + number)
        except BaseException:
            self._network.close()
            raise

    def inside(self, host: str, who: str) -> Wrap:
        return self._network.hosts[host].inside

    def sleeps(self, host: str, is_asleep: bool) -> None:
        self._network.cut(host, is_asleep)

    def parts(self, key: str) -> None:
        sides = self._partitions[int(key)].sides
        self._network.part(int(key), [members(side, self._script.seats) for side in sides])

    def heals(self, key: str) -> None:
        self._network.heal(int(key))

    def close(self) -> None:
        self._network.close()


def access(group: RealGroup) -> Access:
    """The line of one of these peers."""
    return Access(group.up_mbit_s, group.down_mbit_s, group.latency_s, group.packet_loss, group.router)


def own_latency(group: RealGroup) -> float:
    """What the scenario says itself, for stages that have no lines but those that are asked for; else none."""
    return group.latency_s if "latency_s" in group.model_fields_set else 0.0


def members(side: Sequence[str], seats: Callable[[str], list[str]]) -> list[str]:
    """The hosts on one side of a partition."""
    return [host for name in side for host in ([BOOTSTRAP] if name == BOOTSTRAP else seats(name))]


def looked_at(page: str, stage: StageName) -> str:
    """What is to be asked of this stage: ``page`` itself, or on stage docker a port of this computer; empty: no page.

    Raises UserError where nothing can be shown there.
    """
    if not page:
        return ""
    if stage == "namespaces":
        raise UserError(
            "No page can be opened on stage namespaces: no link leads out of there.",
            "Do without --page, or choose --stage docker or --stage local.",
        )
    place = ListenAddress.parse(page)
    if stage == "local":
        check_listen_address(place)
        return page
    if place.host not in (LOOPBACK, "localhost"):
        raise UserError(
            "On stage docker the page is published at 127.0.0.1 alone.",
            "Give a port, such as --page 8080. From elsewhere: ssh -L 8080:127.0.0.1:8080.",
        )
    with listener_at(ListenAddress(LOOPBACK, place.port)) as listener:
        return str(listener.getsockname()[1])


def token() -> str:
    """The owner's, or one drawn."""
    return os.environ.get(TOKEN) or secrets.token_urlsafe(18)
