"""Short reasons from errors that p2pd has written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.net.p2pd.error_text import short_reason

ONE = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
OTHER = "12D3KooWSHj3RRbBjD15g6wekV8y3mm57Pobmps2g2WJm6F67Lay"
FAILED = f"failed to dial: failed to dial {ONE}: all dials failed"
HERE, THERE = "/ip4/127.0.0.1/tcp/4001", "/ip6/2001:db8::1/tcp/4002"
REFUSED = f"* [{HERE}] dial tcp4 127.0.0.1:4001: connect: connection refused"


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (f"{FAILED} {REFUSED}", "connection refused (127.0.0.1:4001)"),
        (
            f"{FAILED} * [{HERE}] dial backoff after: dial tcp4 127.0.0.1:4001: connect: connection refused",
            "connection refused (127.0.0.1:4001)",
        ),
        (f"{FAILED} * [{HERE}] dial backoff", "failed moments ago, not retried yet (127.0.0.1:4001)"),
        (
            f"{FAILED} {REFUSED} * [{THERE}] dial tcp6 [2001:db8::1]:4002: i/o timeout",
            "connection refused (127.0.0.1:4001); no answer ([2001:db8::1]:4002)",
        ),
        (
            f"{FAILED} * [{HERE}] dial tcp4 127.0.0.1:4001: i/o timeout * [{THERE}] dial tcp6 …: i/o timeout",
            "no answer (127.0.0.1:4001, [2001:db8::1]:4002)",
        ),
        (
            FAILED + "".join(f" * [/ip4/10.0.0.{host}/tcp/1] dial tcp4: no route to host" for host in range(5)),
            "no route to it (10.0.0.0:1, 10.0.0.1:1, 10.0.0.2:1 and 2 more)",
        ),
        (
            f"{FAILED} * [{HERE}] failed to negotiate security protocol: context deadline exceeded",
            "connected, but then no answer (127.0.0.1:4001)",
        ),
        (
            f"{FAILED} * [{HERE}] failed to negotiate security protocol: peer id mismatch: "
            f"expected {ONE}, but remote key matches {OTHER}",
            "another node answers (127.0.0.1:4001)",
        ),
        (
            f"{FAILED} * [{HERE}/p2p/{OTHER}/p2p-circuit] error opening relay circuit: NO_RESERVATION (204)",
            "no longer at this relay (relay 127.0.0.1:4001)",
        ),
        (f"{FAILED} * [{HERE}] something new", "something new (127.0.0.1:4001)"),
        ("failed to find any peer in table", "no address of it is known"),
        (
            "failed to negotiate protocol: protocols not supported: [/p2ptrain/exchange/7]",
            "it takes no part in exchanges now, or has another version",
        ),
        (f"{FAILED} {REFUSED}; {FAILED} {REFUSED}; not invited", "connection refused (127.0.0.1:4001); not invited"),
        ("the stream from JZ4vSb ended", "the stream from JZ4vSb ended"),
        (
            "p2pd does not answer: [Errno 24] Too many open files",
            "p2pd does not answer: [Errno 24] Too many open files",
        ),
        ("", ""),
    ],
)
def test_real_errors(error: str, short: str) -> None:
    assert short_reason(error) == short


@given(st.text())
def test_any_text_has_a_short_form(text: str) -> None:
    assert isinstance(short_reason(f"{FAILED} * [{HERE}] {text}"), str)
    assert isinstance(short_reason(text), str)
