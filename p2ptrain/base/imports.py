"""Imports of large libraries, faster and with a Ctrl+C that works, and of packages that only a clone has."""

from __future__ import annotations

import contextlib
import gc
import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import ModuleType

from p2ptrain.base.documents import CLONE
from p2ptrain.base.errors import UserError


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """Import without garbage collection, now and later, of what is loaded.

    Modules stay until the process ends, but the collector examines them again and again, and once more at exit: more
    than a quarter of the time that a peer needs to import its libraries.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def command_imports() -> Iterator[None]:
    """Import what a command needs; an interrupt ends the process immediately.

    There is nothing to save yet, and libraries turn a KeyboardInterrupt during their imports into other errors: numpy's
    lazy imports recurse endlessly.
    """
    before = signal.getsignal(signal.SIGINT)
    is_ours = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with large_imports():
            yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, before)


def package_of_clone(name: str, needed_by: str) -> ModuleType:
    """Import a package, ``lab`` or ``sim``, from the clone that this module is part of.

    Raises UserError if there is no clone: the installed package has neither.
    """
    if not (CLONE / name / "__init__.py").is_file():
        raise UserError(
            f"{needed_by} needs a clone of the repository: the installed package does not contain {name}/.",
            "Clone the repository, run `make install` in it, and use its .venv/bin/p2ptrain.",
        )
    if str(CLONE) not in sys.path:
        sys.path.insert(0, str(CLONE))
    return importlib.import_module(name)
