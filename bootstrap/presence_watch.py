"""Periodic lookup of the live peers, which are logged, saved for the next start, and shown on the page."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import median

from bootstrap import messages
from bootstrap.messages import Say
from bootstrap.swarm_view import SwarmView
from p2ptrain.base.clock import wall
from p2ptrain.base.errors import NetworkError
from p2ptrain.net.directory import PeerCache
from p2ptrain.net.node import Node
from p2ptrain.swarm import Presence

LOOKUP_EVERY_S = 3.0
"""Interval between lookups. Guess: measure a lookup's cost; one in our own store takes a few ms."""
STATUS_EVERY_S = 60.0
"""Interval between status lines while nobody joins or leaves. Guess: ask owners."""


async def watch(node: Node, run_tokens: int, cache: PeerCache, say: Say, view: SwarmView) -> None:
    """Report peers that join and leave, and save their addresses, until cancelled. Survives NetworkError.

    In a swarm so large that a lookup returns a sample, only the number of peers is reported.
    """
    loop = asyncio.get_running_loop()
    before: messages.View = {}
    saw_all = True
    reported_at = loop.time()
    say("peers", messages.status_line(before, run_tokens))
    while True:
        await asyncio.sleep(LOOKUP_EVERY_S)
        has_company = node.has_company
        try:
            found = await node.directory.lookup() if has_company else []
        except NetworkError:  # known records stay valid until they expire
            view.meet((), 0 if node.directory.sees_all else node.directory.size)
            continue
        _judge_clock(found, say)
        now, sees_all = messages.living(found), node.directory.sees_all
        total = None if sees_all else node.directory.size
        view.meet(found, total if has_company else 0)  # 0: nobody could be asked
        lines = messages.news(before, now, run_tokens) if saw_all and sees_all else []
        is_due = loop.time() - reported_at > STATUS_EVERY_S
        if lines or is_due:
            node.learn(now.values())
            try:
                if now:  # otherwise the last peers stay in the cache, since they may come back
                    cache.save(now.values())
            except OSError as error:
                say("bootstrap", f"the list of peers could not be saved: {error.strerror}")
        for line in lines:
            say("peers", line)
        if (lines and len(now) > 1) or (now and is_due):
            size = 0 if sees_all else node.directory.size
            say("peers", messages.status_line(now, run_tokens, size))
            reported_at = loop.time()
        before, saw_all = now, sees_all


def _judge_clock(found: Sequence[Presence], say: Say) -> None:
    """Decide which time is right after a jump of the system's clock: peers renew their records every few seconds."""
    if found and not wall.is_judged and not wall.judge(median(wall() - each.issued_at for each in found)):
        say("bootstrap", f"this machine's clock jumped; its {len(found)} peers show that it is wrong now. Set it")
