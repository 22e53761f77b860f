"""C++ errors: silent within the block alone."""

import ctypes
import sys

import pytest

from p2ptrain.train.cpp_errors import muted


@pytest.mark.skipif(sys.platform != "linux", reason="libstdc++")
def test_what_cpp_code_prints_is_dropped_within_the_block_alone(capfd):
    library = ctypes.PyDLL("libstdc++.so.6")
    write = library["_ZStlsISt11char_traitsIcEERSt13basic_ostreamIcT_ES5_PKc"]  # operator<<(ostream&, const char*)
    write.argtypes, write.restype = (ctypes.c_void_p, ctypes.c_char_p), ctypes.c_void_p
    stream = ctypes.addressof(ctypes.c_char.in_dll(library, "_ZSt4cerr"))
    write(stream, b"before ")
    with muted():
        write(stream, b"within ")
        sys.stderr.write("python ")
    write(stream, b"after")
    assert capfd.readouterr().err == "before python after"
