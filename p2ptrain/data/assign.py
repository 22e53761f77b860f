"""Assignment of sequences to peers and steps: a pure function of (seed, peer id, step).

Each peer walks through the whole training set in its own order: a keyed permutation of ``0..total-1`` per (seed, peer,
epoch). A peer reads every sequence once before it reads any twice, and the orders of two peers are independent: when n
peers together have read as much as the text, none of them has read (1 - 1/n)^n of it, a quarter to 37 %. The position
in the walk is the peer's step counter, so a peer resumes at the next token.

The permutation is a Feistel network over the smallest even number of bits that can hold ``total``, with cycle walking
for the values in between (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). Memory is constant
for any corpus.
"""

from __future__ import annotations

import hashlib

import numpy as np

ROUNDS = 8
"""Feistel rounds. Four suffice in theory for large halves (Luby and Rackoff 1988), but these may be tiny. Guess: a test
of uniformity for small corpora would settle it."""


def sequences(seed: int, peer: str, step: int, per_step: int, total: int) -> list[int]:
    """Return the training sequences that ``peer`` reads at inner step ``step``.

    Args:
        seed: the run's seed.
        peer: the peer's id.
        step: inner steps this peer has made before, from 0.
        per_step: sequences per inner step.
        total: sequences in the training set.

    Returns:
        ``per_step`` indices in ``0..total-1``.
    """
    if total < 1 or per_step < 1 or step < 0:
        raise ValueError(f"no sequences at step={step} with per_step={per_step}, total={total}")
    found: list[int] = []
    for position in range(step * per_step, (step + 1) * per_step):
        epoch, place = divmod(position, total)
        found.append(permuted(place, total, _key(seed, peer, epoch)))
    return found


def coverage(step: int, per_step: int, total: int) -> float:
    """Return the fraction of the training set that a peer has read at least once after ``step`` inner steps, 0 to 1."""
    return min(1.0, step * per_step / total)


def permuted(place: int, total: int, key: bytes) -> int:
    """Return the value at position ``place`` of the permutation of ``0..total-1`` under ``key``."""
    half_bits = _half_bits(total)
    value = place
    while True:
        value = _feistel(value, half_bits, key)
        if value < total:  # true for at least a quarter of the domain: at worst four tries on average
            return value


def whole_walk(seed: int, peer: str, epoch: int, total: int) -> np.ndarray:
    """Return one peer's order for one epoch, int64 [total]: ``permuted`` of every place.

    Faster for many sequences of a small corpus: at most 8 sqrt(4 total) hashes, where single places take 8 to 32 hashes
    each. Memory is a few times the result.
    """
    half_bits, key = _half_bits(total), _key(seed, peer, epoch)
    mask = (1 << half_bits) - 1
    rounds = [np.array([_hash(number, half, key) & mask for half in range(mask + 1)]) for number in range(ROUNDS)]
    values = np.arange(total)
    outside = np.arange(total)  # places whose value is not yet below total
    while len(outside):
        left, right = values[outside] >> half_bits, values[outside] & mask
        for table in rounds:
            left, right = right, left ^ table[right]
        values[outside] = left << half_bits | right
        outside = outside[values[outside] >= total]
    return values


def _half_bits(total: int) -> int:
    return max(1, ((total - 1).bit_length() + 1) // 2)


def _feistel(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(ROUNDS):
        left, right = right, left ^ (_hash(number, right, key) & mask)
    return left << half_bits | right


def _hash(number: int, half: int, key: bytes) -> int:
    """Compute the round function of round ``number``, 63 bits."""
    block = number.to_bytes(1, "little") + half.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(block, key=key, digest_size=8).digest(), "little") & (2**63 - 1)


def _key(seed: int, peer: str, epoch: int) -> bytes:
    return hashlib.blake2b(f"p2ptrain data {seed} {epoch} {peer}".encode(), digest_size=32).digest()
