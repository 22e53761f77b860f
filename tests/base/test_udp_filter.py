"""The seccomp program is evaluated in Python for each architecture, and by the kernel for the present one."""

from __future__ import annotations

import errno
import platform
import struct
import subprocess
import sys

import pytest

from p2ptrain.base import udp_filter
from p2ptrain.base.launcher import launched

X86_64, I386, AARCH64, ARM = 0xC000003E, 0x40000003, 0xC00000B7, 0x40000028  # linux/audit.h
NATIVE = {"x86_64": (X86_64, 41), "aarch64": (AARCH64, 198)}
ALLOWED, REFUSED = 0x7FFF0000, 0x00050000 | errno.EPERM
STREAM, DGRAM, RAW, FLAGS = 1, 2, 3, 0o2004000  # with SOCK_CLOEXEC and SOCK_NONBLOCK, as Go asks for


def decision(machine: str, audit: int, number: int, *arguments: int) -> int:
    """Evaluate the program on one system call, as seccomp(2) says."""
    program = udp_filter.program(machine)
    assert program is not None
    data = struct.pack("<IIQ6Q", number, audit, 0, *arguments, *[0] * (6 - len(arguments)))
    accumulator, at = 0, 0
    while True:
        code, if_so, if_not, value = struct.unpack_from("<HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x06:
            return int(value)
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value}[code]
            at += if_so if holds else if_not


@pytest.mark.parametrize("machine", NATIVE)
def test_only_internet_sockets_other_than_tcp_are_refused(machine: str) -> None:
    audit, socket_number = NATIVE[machine]
    for family in 2, 10:
        for flags in 0, FLAGS:
            assert decision(machine, audit, socket_number, family, STREAM | flags) == ALLOWED
            assert decision(machine, audit, socket_number, family, DGRAM | flags) == REFUSED
            assert decision(machine, audit, socket_number, family, RAW | flags) == REFUSED
            # The kernel reads 32 bits of each argument.
            assert decision(machine, audit, socket_number, family | 1 << 32, DGRAM | flags | 1 << 40) == REFUSED
    for family in 1, 16:  # Unix; netlink, by which Go reads the interfaces
        for kind in STREAM, DGRAM, RAW:
            assert decision(machine, audit, socket_number, family, kind | FLAGS) == ALLOWED
    assert decision(machine, audit, socket_number + 1, 2, DGRAM) == ALLOWED
    assert decision(machine, audit, 425, 8) == REFUSED  # io_uring_setup


@pytest.mark.parametrize("machine", NATIVE)
@pytest.mark.parametrize("audit", [X86_64, I386, AARCH64, ARM, 0])
def test_another_architecture_does_not_bypass_the_filter(machine: str, audit: int) -> None:
    if audit != NATIVE[machine][0]:
        for number in 41, 198, 102, 359, 281:  # socket of each; 102: socketcall of i386
            assert decision(machine, audit, number, 2, DGRAM) == REFUSED


def test_the_x32_abi_does_not_bypass_the_filter() -> None:
    assert decision("x86_64", X86_64, 0x40000000 | 41, 2, DGRAM) == REFUSED


def test_other_machines_have_no_program() -> None:
    assert udp_filter.program("riscv64") is None


def test_the_kernel_holds_a_child_to_it() -> None:
    if reason := udp_filter.unavailable():
        pytest.skip(reason)
    script = (
        "import socket\n"
        "for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM:\n"
        "    for family in socket.AF_INET, socket.AF_INET6, socket.AF_UNIX:\n"
        "        try: socket.socket(family, kind).close(); print('yes', end=' ')\n"
        "        except OSError as error: print(error.errno, end=' ')\n"
    )
    said = []
    for udp in True, False:
        command = launched(sys.executable, "-I", "-S", "-c", script, udp=udp)
        said.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert said == [["yes"] * 6, ["yes"] * 3 + [str(errno.EPERM)] * 2 + ["yes"]]


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "riscv64")])
def test_machines_without_a_filter_say_why(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "system", lambda: system)
    udp_filter.unavailable.cache_clear()
    try:
        assert (machine if system == "linux" else system) in udp_filter.unavailable()
        assert launched("/bin/true", udp=False)[-2:] == ["", "/bin/true"]  # it starts, unfiltered
    finally:
        udp_filter.unavailable.cache_clear()
