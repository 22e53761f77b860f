"""Which sequence a peer reads at which step: a pure function of (seed, peer id, step).

Nobody hands out data and nobody keeps books. Every peer walks through the whole training set in its own order: for each
(seed, peer, epoch) a keyed permutation of ``0..total-1``, so that a peer reads every sequence once before it reads any
twice, and two peers' orders are unrelated. The position in that walk is the peer's own step counter, so a peer that is
stopped anywhere resumes at the very next token.

The permutation is a Feistel network over the smallest even number of bits that can hold ``total``, with cycle walking
for the values in between (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002): a constant amount
of memory, whatever the corpus holds.
"""

from __future__ import annotations

import hashlib

import numpy as np

ROUNDS = 8
"""Four rounds suffice in theory for large halves (Luby and Rackoff 1988); eight because ours may be tiny: a guess."""


def sequences(seed: int, peer: str, step: int, per_step: int, total: int) -> list[int]:
    """The training sequences that ``peer`` reads at inner step ``step``.

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
    """The fraction of the training set that a peer has read at least once after ``step`` inner steps, 0 to 1."""
    return min(1.0, step * per_step / total)


def permuted(place: int, total: int, key: bytes) -> int:
    """Where the permutation of ``0..total-1`` under ``key`` sends ``place``."""
    half_bits = _half_bits(total)
    value = place
    while True:
        value = _feistel(value, half_bits, key)
        if value < total:  # at least a quarter of the domain is: four tries on average at worst
            return value


def whole_walk(seed: int, peer: str, epoch: int, total: int) -> np.ndarray:
    """One peer's walk through one epoch at once: [total] int64, what ``permuted`` gives for every place.

    For whoever reads many sequences of a small corpus: it hashes 8 sqrt(4 total) times at most, where the places one by
    one take 8 to 32 hashes each. Memory is a few times the result.
    """
    half_bits, key = _half_bits(total), _key(seed, peer, epoch)
    mask = (1 << half_bits) - 1
    rounds = [np.array([_hash(number, half, key) & mask for half in range(mask + 1)]) for number in range(ROUNDS)]
    values = np.arange(total)
    outside = np.arange(total)  # places that still have no value below total
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
    """One pass of the network: a permutation of ``0..4**half_bits-1``."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(ROUNDS):
        left, right = right, left ^ (_hash(number, right, key) & mask)
    return left << half_bits | right


def _hash(number: int, half: int, key: bytes) -> int:
    """The function of round ``number``, 63 bits."""
    block = number.to_bytes(1, "little") + half.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(block, key=key, digest_size=8).digest(), "little") & (2**63 - 1)


def _key(seed: int, peer: str, epoch: int) -> bytes:
    """32 bytes that name one peer's walk through one epoch."""
    return hashlib.blake2b(f"p2ptrain data {seed} {epoch} {peer}".encode(), digest_size=32).digest()
