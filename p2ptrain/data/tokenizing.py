"""From an author's sources to units of ids, on all cores, from where an earlier attempt stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

from p2ptrain.data.fidelity import FidelityCheck
from p2ptrain.data.parts import Parts, Unit
from p2ptrain.data.reading import Item, Taken, TextMix
from p2ptrain.data.stream import Cut, encode_cuts
from p2ptrain.data.tokenizer import Tokenizer
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


def batches(mix: TextMix[Item], size: Callable[[Item], int], most: int) -> Iterator[ReadBatch[Item]]:
    """Yield the items in batches of about ``most`` characters."""
    items: list[Taken[Item]] = []
    characters = 0
    for taken in mix:
        items.append(taken)
        characters += size(taken.item)
        if characters >= most:
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


def cut_size(cut: Cut) -> int:
    return len(cut.text)


def write_text(
    mix: TextMix[Cut],
    tokenizer: Tokenizer,
    parts: Parts,
    check: FidelityCheck,
    most_tokens: int | None,
    unfinished: Unfinished,
    tell: Tell,
) -> bool:
    """Encode the text and write its training shards; return whether it was all, not ``most_tokens``.

    Args:
        most_tokens: training tokens after which reading stops; None: it does not.
        unfinished: where the state is saved after each shard.

    Raises:
        CorpusError: the text cannot be read, or the tokenizer does not know it.
        HomeError: a shard or the state cannot be written.
    """
    saved_shards = parts.shards
    for batch in ahead(batches(mix, cut_size, BATCH_CHARACTERS)):
        cuts = [taken.item for taken in batch.items]
        for cut in cuts:
            check.sample(cut.text)
        for taken, ids in zip(batch.items, encode_cuts(cuts, tokenizer), strict=True):
            cut = taken.item
            check.count(ids, len(cut.text.encode(errors="replace")), cut.begins)
            parts.add(Unit(ids, taken.source, cut.begins, cut.ends))
            if most_tokens is not None and parts.training >= most_tokens:
                return False
        if batch.state is not None and parts.shards > saved_shards:
            numbers, arrays = parts.state()
            unfinished.save({"mix": batch.state, "check": check.state(), "parts": numbers}, arrays)
            saved_shards = parts.shards
        by_limit = 0.0 if most_tokens is None else parts.training / most_tokens
        tell(parts.all, max(batch.done_share, by_limit))
    return True
