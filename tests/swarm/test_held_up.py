"""A peer whose process was stopped for a moment, while answers came in."""

from __future__ import annotations

from table import Table

from p2ptrain.swarm.deadlines import FIRST_REPLY_S, PROMPT_BOUNDS_S
from p2ptrain.swarm.events import Close, Effect, ExchangeDue, Open, OuterStepDone, Received, Swap, Woke
from p2ptrain.swarm.messages import Accept
from p2ptrain.swarm.peer import Peer
from p2ptrain.swarm.rules import ASLEEP_S, UNREAD_S


def offering() -> tuple[Peer, Open, float]:
    """Return a core with an open offer, and the deadline of the answer."""
    table = Table("amber", "birch")
    table.start()
    table.run(3.0)
    core = table["amber"].core
    effects = core.handle(OuterStepDone(1, 10.0, 10), table.now)
    [offer] = [effect for effect in effects if isinstance(effect, Open)]
    core.handle(Woke(), table.now + PROMPT_BOUNDS_S[1])  # late, and nobody else to call
    return core, offer, table.now + FIRST_REPLY_S


def closed(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, Close)]


def test_what_came_meanwhile_is_read_before_anybody_is_given_up() -> None:
    core, offer, deadline = offering()
    assert not closed(core.handle(ExchangeDue(), deadline + 2.0))  # something else is read first
    accept = Accept(offer.message.fragments, offer.message.terms, known=())
    assert any(isinstance(each, Swap) for each in core.handle(Received(offer.link, accept), deadline + 2.0))


def test_it_is_read_after_a_sleep_too() -> None:
    """Check a long stop: the partner may have committed, and giving up now would be a half-commit."""
    core, offer, deadline = offering()
    assert not closed(core.handle(Woke(), deadline + 2 * ASLEEP_S))
    accept = Accept(offer.message.fragments, offer.message.terms, known=())
    assert any(isinstance(each, Swap) for each in core.handle(Received(offer.link, accept), deadline + 2 * ASLEEP_S))


def test_who_has_sent_nothing_is_given_up_a_moment_later() -> None:
    core, offer, deadline = offering()
    assert not closed(core.handle(Woke(), deadline + 2.0))
    assert Close(offer.link) in core.handle(Woke(), deadline + 2.0 + UNREAD_S)


def test_who_is_woken_in_time_gives_up_at_once() -> None:
    core, offer, deadline = offering()
    assert Close(offer.link) in core.handle(Woke(), deadline + 0.1)
