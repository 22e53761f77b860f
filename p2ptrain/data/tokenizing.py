"""From an author's sources to units of ids, on all cores, from where an earlier attempt stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

from p2ptrain.data.parts import Parts, Unit
from p2ptrain.data.reading import Item, Taken, TextMix
from p2ptrain.data.unfinished import Unfinished

BATCH_CHARACTERS = 1 << 20
"""Characters that are encoded at once: enough texts for all cores, and about 200 MB of memory."""

Tell = Callable[[int, float], None]
"""Progress: tokens so far, and the share of the work that is done."""

_Any = TypeVar("_Any")


class ReadBatch(NamedTuple, Generic[Item]):
    """Consecutive items, and where reading goes on after them."""

    items: list[Taken[Item]]
    state: dict[str, Any] | None
    """None if reading cannot go on there."""
    done_share: float


def batches(mix: TextMix[Item]) -> Iterator[ReadBatch[Item]]:
    """Yield the items in batches of about ``BATCH_CHARACTERS``."""
    items: list[Taken[Item]] = []
    characters = 0
    for taken in mix:
        items.append(taken)
        characters += mix.size(taken.item)
        if characters >= BATCH_CHARACTERS:
            yield ReadBatch(items, mix.state(), mix.done_share)
            items, characters = [], 0
    if items:
        yield ReadBatch(items, mix.state(), mix.done_share)


def ahead(items: Iterable[_Any]) -> Iterator[_Any]:
    """Yield items, the next of which is made by a thread meanwhile: reading waits for disks and networks."""
    iterator = iter(items)
    end = object()
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, iterator, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, iterator, end)
            yield item  # type: ignore[misc]


def write_units(
    mix: TextMix[Item],
    encode: Callable[[list[Taken[Item]]], Iterable[Unit]],
    parts: Parts,
    counted: Callable[[], dict[str, Any]],
    most_tokens: int | None,
    unfinished: Unfinished,
    tell: Tell,
) -> bool:
    """Encode what is read and write its training shards; return whether it was all, not ``most_tokens``.

    Args:
        counted: returns what was counted so far, for the saved state.
        most_tokens: training tokens after which reading stops; None: it does not.

    Raises:
        CorpusError: something cannot be read, or not be encoded.
        HomeError: a shard or the state cannot be written.
    """
    for batch in ahead(batches(mix)):
        for unit in encode(batch.items):
            parts.add(unit)
            if most_tokens is not None and parts.training >= most_tokens:
                return False
        if batch.state is not None and unfinished.is_due:
            numbers, arrays = parts.state()
            unfinished.save({"mix": batch.state, "parts": numbers, **counted()}, arrays)
        by_limit = 0.0 if most_tokens is None else parts.training / most_tokens
        tell(parts.all, max(batch.done_share, by_limit))
    return True
