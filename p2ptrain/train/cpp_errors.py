"""Silence for C++ code that prints each error before it returns it.

AOTInductor's libraries and torch's C functions write what they caught, with a C++ backtrace, to ``std::cerr``, and
return a status. The message can be asked for, so a user need not see the rest. File descriptor 2 stays as it is, since
other threads write to it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cache

import torch  # noqa: F401  # its libraries initialize std::cerr

BAD = 1
"""``std::ios_base::badbit`` of libstdc++: a stream with it drops what is written to it."""


@cache
def _stream() -> tuple[ctypes._NamedFuncPointer, int] | None:
    """Return ``std::ios::clear`` and the address of the ``std::ios`` in ``std::cerr``; None without libstdc++."""
    try:
        library = ctypes.PyDLL("libstdc++.so.6")
        clear = library["_ZNSt9basic_iosIcSt11char_traitsIcEE5clearESt12_Ios_Iostate"]
        stream = ctypes.addressof(ctypes.c_char.in_dll(library, "_ZSt4cerr"))
    except (OSError, AttributeError, ValueError):  # another system's C++ library
        return None
    clear.argtypes, clear.restype = (ctypes.c_void_p, ctypes.c_int), None
    table = ctypes.c_size_t.from_address(stream).value
    base = ctypes.c_ssize_t.from_address(table - 3 * ctypes.sizeof(ctypes.c_void_p)).value  # Itanium C++ ABI, 2.5.2
    return clear, stream + base


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Drop what any thread writes to ``std::cerr`` in this block."""
    found = _stream()
    if found is None:
        yield
        return
    clear, stream = found
    clear(stream, BAD)
    try:
        yield
    finally:
        clear(stream, 0)
