"""Seccomp filter that keeps a child process from creating UDP sockets (Linux on x86-64 and ARM64).

p2pd is meant to use TCP alone, but dials any QUIC address that a stranger names, and its QUIC library has known faults
(docs/SECURITY.md). Under the filter an internet socket that is not a stream socket fails with EPERM, and so does
io_uring, which creates sockets by itself, and every system call of another architecture or ABI.

Sources: seccomp(2); numbers from Linux's ``include/uapi/linux``: seccomp.h, audit.h, filter.h and ``asm/unistd_64.h``.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import struct
import sys
from dataclasses import dataclass

_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # classic BPF, 32-bit words
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
_NUMBER, _ARCHITECTURE, _DOMAIN, _TYPE = 0, 4, 16, 24  # offsets in struct seccomp_data; of arguments the low words
_TYPE_MASK = 0xF  # without SOCK_CLOEXEC and SOCK_NONBLOCK
_IO_URING_SETUP = 425  # on all architectures
_X32_BIT = 0x40000000
_AF_INET, _AF_INET6, _SOCK_STREAM = 2, 10, 1  # of Linux, also where this module is only imported
_SET_SECCOMP, _MODE_FILTER = 22, 2  # prctl(2)


@dataclass(frozen=True, slots=True)
class _Abi:
    audit: int
    """AUDIT_ARCH_*: what the kernel reports for native system calls."""
    socket: int
    """Number of socket(2)."""


_ABIS = {"x86_64": _Abi(0xC000003E, 41), "aarch64": _Abi(0xC00000B7, 198)}


def program(machine: str) -> bytes | None:
    """Return the filter as an array of ``struct sock_filter``, 8 bytes each; None for an unsupported machine.

    Args:
        machine: the kernel's name of the architecture, as in ``platform.machine()``.
    """
    abi = _ABIS.get(machine)
    if abi is None:
        return None
    # A jump names how many instructions it skips if the comparison holds, and if not. REFUSE is 12, ALLOW 13.
    code = (
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 0, 10, abi.audit),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 8, 0, _X32_BIT),  # ARM64 has no such numbers
        (_EQUAL, 7, 0, _IO_URING_SETUP),
        (_EQUAL, 0, 7, abi.socket),
        (_LOAD, 0, 0, _DOMAIN),
        (_EQUAL, 1, 0, _AF_INET),
        (_EQUAL, 0, 4, _AF_INET6),
        (_LOAD, 0, 0, _TYPE),
        (_AND, 0, 0, _TYPE_MASK),
        (_EQUAL, 1, 0, _SOCK_STREAM),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    )
    return b"".join(struct.pack("=HBBI", *each) for each in code)


@functools.cache
def unavailable() -> str:
    """Return why this machine cannot filter, in a few words; empty if it can."""
    if sys.platform != "linux":
        return f"{platform.system() or sys.platform} has no seccomp"
    machine = platform.machine()
    if program(machine) is None or struct.calcsize("P") != 8:
        return f"there is no filter for {machine} with {8 * struct.calcsize('P')}-bit Python"
    # The kernel reads the program first: EFAULT means that it would accept one.
    ctypes.CDLL(None, use_errno=True).prctl(_SET_SECCOMP, _MODE_FILTER, None, 0, 0)
    code = ctypes.get_errno()
    return "" if code == errno.EFAULT else f"the kernel or a sandbox refuses seccomp filters ({os.strerror(code)})"
