"""The limit of open files, which a bootstrap of a large swarm needs raised."""

from __future__ import annotations

import resource

import pytest

from p2ptrain.base import descriptors

NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 524288), [(4096, 524288)]),
        ((1024, 2048), [(2048, 2048)]),
        ((1024, NO_LIMIT), [(4096, NO_LIMIT)]),
        ((8192, 524288), []),
        ((NO_LIMIT, NO_LIMIT), []),
    ],
)
def test_the_limit_is_raised_as_far_as_permitted(
    before: tuple[int, int], after: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: before)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: made.append(limits))
    descriptors.allow(4096)
    assert made == after


def test_a_system_that_refuses_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, NO_LIMIT))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    descriptors.allow(4096)
