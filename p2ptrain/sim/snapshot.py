"""A whole simulation as bytes, and back: how a long one is interrupted and goes on.

Everything in a simulation is plain data, objects of this package, tensors and random generators; what is scheduled are
bound methods with their arguments. So the graph of objects is written down as it is: each object once, references by
number, circles and shared objects kept. Reading it makes the same graph again, and the simulation ends bitwise as if
it had never stopped (``tests/sim/test_resume.py``).

It is no general serializer: only the types listed here, and classes and functions of p2ptrain, torch and the standard
library by their names. Reading creates objects and sets attributes; it runs no code that the file names, but for
classes' ``__new__``. Anything else is a ``TypeError``, a bug of ours.
"""

from __future__ import annotations

import collections
import importlib
import types
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from enum import Enum
from queue import Empty, SimpleQueue
from random import Random
from typing import Any

import msgpack
import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

_ATOMS = (type(None), bool, int, float, str, bytes)

_PACKAGES = ("p2ptrain", "torch", "numpy", "math", "time", "builtins", "collections", "_operator")
"""Where classes and functions may come from."""


def dump(root: object) -> bytes:
    """The graph of everything that can be reached from ``root``."""
    writer = _Writer()
    place = writer.token(root)
    writer.run()
    packed: bytes = msgpack.packb([place, writer.records, writer.storages], use_bin_type=True)
    return packed


def load(data: bytes) -> Any:
    """Inverse of ``dump``; raises ValueError for anything that it did not write."""
    try:
        place, records, storages = msgpack.unpackb(data, raw=False, use_list=True)
        return _Reader(records, storages).root(place)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ImportError) as error:
        raise ValueError(f"no snapshot of a simulation: {error}") from error


class _Writer:
    """Numbers objects as they are met, and writes down one after the other."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.storages: list[bytes] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []  # or a number could be reused while we write
        self._todo: deque[tuple[int, object]] = deque()
        self._storage_numbers: dict[int, int] = {}

    def token(self, value: object) -> Any:
        """What stands for a value in a record: itself, or its number in a list."""
        if type(value) in _ATOMS:
            if type(value) is int and not -(2**63) <= value < 2**63:
                return ["i", str(value)]
            return value
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.records)
            self._kept.append(value)
            self.records.append(None)
            self._todo.append((number, value))
        return [number]

    def run(self) -> None:
        while self._todo:
            number, value = self._todo.popleft()
            self.records[number] = self._record(value)

    def _tokens(self, values: Iterator[object] | Any) -> list[Any]:
        return [self.token(value) for value in values]

    def _record(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind in (list, tuple, set, frozenset):
            return [kind.__name__, self._tokens(value)]
        if kind in (dict, Counter):
            return [kind.__name__, self._tokens(value.keys()), self._tokens(value.values())]
        if kind is defaultdict:
            factory = self.token(value.default_factory)
            return ["defaultdict", factory, self._tokens(value.keys()), self._tokens(value.values())]
        if kind is deque:
            return ["deque", value.maxlen, self._tokens(value)]
        if kind is slice:
            return ["slice", self._tokens((value.start, value.stop, value.step))]
        if kind is types.MethodType:
            return ["method", self.token(value.__self__), value.__func__.__name__]
        if isinstance(value, type) or kind in (types.FunctionType, types.BuiltinFunctionType):
            return ["name", *_name(value)]
        if isinstance(value, Enum):
            return ["enum", *_name(kind), value.name]
        if isinstance(value, tuple):  # a NamedTuple
            return ["named", *_name(kind), self._tokens(value)]
        if isinstance(value, Tensor):
            return ["tensor", *self._tensor(value)]
        if isinstance(value, Random):
            version, state, following = value.getstate()
            return ["random", version, np.array(state, dtype=np.uint32).tobytes(), following]
        if isinstance(value, torch.Generator):
            return ["generator", str(value.device), value.get_state().numpy().tobytes()]
        if isinstance(value, torch.device | torch.dtype):
            return ["torch", str(value)]
        if isinstance(value, array):
            return ["numbers", value.typecode, value.tobytes()]
        if isinstance(value, np.ndarray):
            return ["array", value.dtype.str, list(value.shape), value.tobytes()]
        if isinstance(value, SimpleQueue):
            return ["queue", self._tokens(_drained(value))]
        if isinstance(value, BaseModel):
            return ["model", *_name(kind), value.model_dump_json()]
        return ["object", *_name(kind), *self._attributes(value)]

    def _attributes(self, value: Any) -> tuple[list[str], list[Any]]:
        names = [name for name in _slots(type(value)) if hasattr(value, name)]
        names += [name for name in getattr(value, "__dict__", {}) if name not in names]
        return names, [self.token(getattr(value, name)) for name in names]

    def _tensor(self, value: Tensor) -> tuple[Any, ...]:
        storage = value.untyped_storage()
        number = self._storage_numbers.get(storage.data_ptr() if len(storage) else -1)
        if number is None:
            number = len(self.storages)
            flat = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            self.storages.append(flat.cpu().numpy().tobytes())
            self._storage_numbers[storage.data_ptr() if len(storage) else -1] = number
            self._kept.append(storage)
        shape = list(value.shape), list(value.stride()), value.storage_offset()
        return number, str(value.dtype), str(value.device), *shape


class _Reader:
    """Makes all objects empty, then fills them: references first, what is looked up by hash last."""

    def __init__(self, records: list[Any], storages: list[bytes]) -> None:
        self._records = records
        self._storages = storages
        self._made: dict[int, Any] = {}
        self._tensors: dict[tuple[int, str], Any] = {}

    def root(self, place: Any) -> Any:
        later: list[int] = []
        for number in range(len(self._records)):
            self._get(number)
        for number, record in enumerate(self._records):
            if record[0] in ("dict", "Counter", "defaultdict", "set", "queue"):
                later.append(number)
            else:
                self._fill(number, record)
        for number in later:
            self._fill(number, self._records[number])
        return self._value(place)

    def _value(self, token: Any) -> Any:
        if type(token) is not list:
            return token
        return int(token[1]) if token[0] == "i" else self._get(token[0])

    def _values(self, tokens: list[Any]) -> list[Any]:
        return [self._value(token) for token in tokens]

    def _get(self, number: int) -> Any:
        if number not in self._made:
            self._made[number] = self._make(self._records[number])
        return self._made[number]

    def _make(self, record: list[Any]) -> Any:
        """What cannot be filled later is made whole; all other objects are made empty."""
        kind, *rest = record
        if kind in _EMPTY:
            return _EMPTY[kind](*rest)
        if kind in ("tuple", "frozenset"):
            return (tuple if kind == "tuple" else frozenset)(self._values(rest[0]))
        match kind:
            case "slice":
                return slice(*self._values(rest[0]))
            case "method":
                return getattr(self._value(rest[0]), rest[1])
            case "name":
                return _named(*rest)
            case "enum":
                return _named(*rest[:2])[rest[2]]
            case "named":
                return _named(*rest[:2])._make(self._values(rest[2]))
            case "random":
                state = tuple(int(each) for each in np.frombuffer(rest[1], dtype=np.uint32))
                random = Random()
                random.setstate((rest[0], state, rest[2]))
                return random
            case "generator":
                generator = torch.Generator(rest[0])
                generator.set_state(torch.from_numpy(np.frombuffer(rest[1], dtype=np.uint8).copy()))
                return generator
            case "torch":
                return _torch_name(rest[0])
            case "numbers":
                return array(rest[0], rest[1])
            case "array":
                return np.frombuffer(rest[2], dtype=np.dtype(rest[0])).reshape(rest[1]).copy()
            case "model":
                return _named(*rest[:2]).model_validate_json(rest[2])
            case "tensor":
                return self._tensor(*rest)
            case "object":
                made = _named(*rest[:2])
                return made.__new__(made)
        raise ValueError(f"there is no kind {kind!r}")

    def _fill(self, number: int, record: list[Any]) -> None:
        made = self._made[number]
        match record:
            case ["list" | "deque", *_, items]:
                made.extend(self._values(items))
            case ["dict" | "Counter" | "defaultdict", *_, keys, values]:
                dict.update(made, zip(self._values(keys), self._values(values), strict=True))  # a Counter's own adds up
            case ["set", items]:
                made.update(self._values(items))
            case ["queue", items]:
                for item in self._values(items):
                    made.put(item)
            case ["object", _, _, names, values]:
                for name, value in zip(names, self._values(values), strict=True):
                    object.__setattr__(made, name, value)
        if record[0] == "defaultdict":
            made.default_factory = self._value(record[1])

    def _tensor(self, storage: int, dtype: str, device: str, shape: Any, stride: Any, offset: int) -> Tensor:
        flat = self._tensors.get((storage, device))
        if flat is None:
            raw = np.frombuffer(self._storages[storage], dtype=np.uint8).copy()
            flat = self._tensors[storage, device] = torch.from_numpy(raw).to(device).untyped_storage()
        return torch.empty(0, dtype=_torch_name(dtype), device=device).set_(flat, offset, shape, stride)


_EMPTY: dict[str, Callable[..., Any]] = {
    "list": lambda items: [],
    "dict": lambda keys, values: {},
    "Counter": lambda keys, values: collections.Counter(),
    "defaultdict": lambda factory, keys, values: defaultdict(),
    "set": lambda items: set(),
    "deque": lambda maxlen, items: deque(maxlen=maxlen),
    "queue": lambda items: SimpleQueue(),
}


def _name(thing: Any) -> tuple[str, str]:
    """How a class or function is found again. TypeError for one that cannot be."""
    module, name = thing.__module__ or "builtins", thing.__qualname__
    if module.partition(".")[0] not in _PACKAGES or "<" in name:
        raise TypeError(f"{module}.{name} cannot be written into a snapshot")
    return module, name


def _named(module: str, name: str) -> Any:
    if module.partition(".")[0] not in _PACKAGES:
        raise ValueError(f"{module}.{name} is none of ours")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _torch_name(text: str) -> Any:
    return getattr(torch, text.removeprefix("torch.")) if text.startswith("torch.") else torch.device(text)


def _slots(kind: type) -> list[str]:
    """All slots of a class and its bases, by the names they have on objects."""
    names: list[str] = []
    for base in reversed(kind.__mro__):
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__weakref__", "__dict__"):
                names.append(name)
    return names


def _drained(queue: SimpleQueue[Any]) -> list[Any]:
    """What is in a queue, which keeps it."""
    items = []
    try:
        while True:
            items.append(queue.get_nowait())
    except Empty:
        for item in items:
            queue.put(item)
    return items
