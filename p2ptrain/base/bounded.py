"""A dict of bounded size."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(dict[K, V]):
    """Dict that keeps the ``capacity`` entries written last and forgets older ones.

    Only ``d[key] = value`` counts as a write: it moves the key to the end. Do not use ``update``, ``setdefault`` or
    ``|=``, which skip the bound.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._capacity:
            del self[next(iter(self))]
