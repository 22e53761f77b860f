"""Network shell: everything that touches a socket.

``docs/generated/MAP.md`` lists the modules.

Only ``p2pd.daemon``, ``p2pd.control``, ``p2pd.unary``, ``dht_protocol``, ``dht``, ``node``, ``directory`` and
``access_list_store`` import hivemind, which takes seconds and imports torch. Therefore this package re-exports nothing.
"""

import importlib.util
import multiprocessing
import os
import sys
import threading

if sys.platform == "linux":
    # hivemind sets "file_system" for the whole process by default: the first tensor that the data library shares would
    # start a torch_shm_manager process for every peer.
    os.environ.setdefault("HIVEMIND_MEMORY_SHARING_STRATEGY", "file_descriptor")

# hivemind makes locks at its import, for processes that share its DHT. Ours has one.
try:
    _fork = multiprocessing.get_context("fork")
    _fork.Lock()
    # From Python 3.14 on, locks of the default context start a process that tracks them, for each peer.
    multiprocessing.Lock = _fork.Lock
except (OSError, ImportError):  # no writable /dev/shm
    multiprocessing.Lock = threading.Lock  # type: ignore[assignment]

if "hivemind" not in sys.modules and (_spec := importlib.util.find_spec("hivemind")) is not None:
    # The package's own __init__ is not executed: it imports hivemind's trainer and scipy, a fifth of a peer's start.
    sys.modules["hivemind"] = importlib.util.module_from_spec(_spec)
