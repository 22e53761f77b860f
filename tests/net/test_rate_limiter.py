"""Token buckets: bursts pass, floods do not, and one peer's flood does not affect others."""

from __future__ import annotations

from p2ptrain.net.rate_limiter import RateLimit, RateLimiter, TokenBucket

EACH = RateLimit(burst=3.0, per_s=1.0)
ALL = RateLimit(burst=10.0, per_s=5.0)


def limiter(most: int = 100) -> RateLimiter[str]:
    return RateLimiter(EACH, ALL, most)


def admitted(limits: RateLimiter[str], who: str, times: int, now: float) -> int:
    return sum(limits.admits(who, now) for _ in range(times))


def test_a_burst_passes_and_then_the_rate_counts() -> None:
    limits = limiter()
    assert admitted(limits, "amber", 10, 0.0) == 3
    assert admitted(limits, "amber", 10, 0.9) == 0
    assert admitted(limits, "amber", 10, 2.1) == 2
    assert admitted(limits, "amber", 10, 1e6) == 3


def test_who_floods_is_turned_down_and_the_others_are_not() -> None:
    limits = limiter()
    served = {"amber": 0, "liar": 0}
    for tick in range(1000):
        now = tick / 100
        served["liar"] += admitted(limits, "liar", 50, now)
        served["amber"] += tick % 100 == 0 and limits.admits("amber", now)
    assert served == {"amber": 10, "liar": 12}


def test_many_together_have_a_limit_too() -> None:
    limits = limiter()
    assert sum(limits.admits(f"peer {number}", 0.0) for number in range(50)) == 10
    assert sum(limits.admits(f"other {number}", 1.0) for number in range(50)) == 5


def test_memory_is_bounded_and_a_flood_of_names_frees_nobody() -> None:
    limits = RateLimiter[str](EACH, RateLimit(1e9, 1e9), most=10)
    assert admitted(limits, "liar", 3, 0.0) == 3
    for number in range(1000):
        limits.admits(f"peer {number}", 0.001 * number)
        assert not limits.admits("liar", 0.001 * number) or number > 300
        assert len(limits) <= 10


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    bucket = TokenBucket(EACH, 10.0)
    assert [bucket.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(0.0)
    assert not bucket.take(10.5)
    assert bucket.take(11.0)
