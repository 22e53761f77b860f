"""A page served in a thread of its own, for a program without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from p2ptrain.page.server import STOP_S, PageServer


@contextlib.contextmanager
def in_thread(server: PageServer) -> Iterator[PageServer]:
    """Bind the server and serve the page while the block runs. Raises UserError if it cannot listen."""
    server.bind()
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop, begun = runner.get_loop(), threading.Event()
    serving = loop.create_task(server.serve())
    loop.call_soon(begun.set)

    def run() -> None:
        with runner:
            runner.run(asyncio.wait([serving]))

    thread = threading.Thread(target=run, name="page", daemon=True)
    thread.start()
    begun.wait()  # a task that is cancelled before its first step would not close the listener
    try:
        yield server
    finally:
        with contextlib.suppress(RuntimeError):  # the loop has already ended
            loop.call_soon_threadsafe(serving.cancel)
        thread.join(2 * STOP_S + 2.0)
