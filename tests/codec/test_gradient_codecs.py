"""Codecs that leave out elements: which they choose, what they reject, and that error feedback loses nothing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2ptrain import codec
from p2ptrain.base.errors import RemoteError
from p2ptrain.codec import CodecTerms, Decodable, LowRankCodec, TopKCodec, matrices
from p2ptrain.codec.packing import (
    code_bytes,
    pack,
    pack_twelve,
    twelve_bytes,
    unpack,
    unpack_twelve,
)
from p2ptrain.codec.shapes import matrix_at, near_square
from sim.lockstep.feedback import Feedback, compress
from sim.step_times import effective_rank


def random(elements: int, seed: int, magnitude: float = 1.0) -> Tensor:
    return magnitude * torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def decoded(each: Decodable, vector: Tensor, terms: CodecTerms) -> Tensor:
    return each.decode(each.encode(vector, terms), terms)


def error(found: Tensor, vector: Tensor) -> float:
    return float((found - vector).norm() / vector.norm())


def with_spectrum(rows: int, columns: int, spectrum: Tensor, seed: int = 0) -> Tensor:
    """Return a matrix with these singular values, [rows columns]."""
    left = torch.linalg.qr(random(rows * len(spectrum), seed).view(rows, -1)).Q
    right = torch.linalg.qr(random(columns * len(spectrum), seed + 1).view(columns, -1)).Q
    return ((left * spectrum) @ right.T).reshape(-1)


# --- packing --------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(codes=st.lists(st.integers(0, 4095), max_size=50))
def test_packing_is_undone(codes: list[int]) -> None:
    twelve = torch.tensor(codes, dtype=torch.int64)
    assert torch.equal(unpack_twelve(pack_twelve(twelve), len(codes)).long(), twelve)
    assert len(pack_twelve(twelve)) == twelve_bytes(len(codes))
    for bits in (2, 3, 4):
        few = (twelve % 2**bits).to(torch.uint8)
        assert torch.equal(unpack(pack(few, bits), bits, len(codes)), few)
        assert len(pack(few, bits)) == code_bytes(len(codes), bits)


def test_packing_is_frozen() -> None:
    """Check frozen bytes: the earlier code is in the lower bits."""
    assert pack(torch.tensor([1, 2, 3, 15], dtype=torch.uint8), 4).tolist() == [0x21, 0xF3]
    assert pack(torch.tensor([1, 2, 3, 4, 5, 6, 7, 0, 5], dtype=torch.uint8), 3).tolist() == [0xD1, 0x58, 0x1F, 0x05]
    assert pack_twelve(torch.tensor([0x123, 0xABC, 0x456])).tolist() == [0x23, 0xC1, 0xAB, 0x56, 0x04]
    assert pack(torch.tensor([0, 1, 2, 3, 1], dtype=torch.uint8), 2).tolist() == [0b11100100, 0b01]


# --- top-k ----------------------------------------------------------------------------------------------------------


def test_topk_costs_what_sparseloco_says() -> None:
    """Check 0.219 bits per element for indices and values, as SparseLoCo counts, and 0.008 for two levels per chunk."""
    terms = CodecTerms(4096 * 10)
    assert 8 * TopKCodec().encoded_size(terms) / terms.elements == 64 * (12 + 2) / 4096 + 32 / 4096


@settings(max_examples=30)
@given(elements=st.integers(1, 3000), seed=st.integers(0, 2**31))
def test_topk_keeps_the_largest_with_their_signs(elements: int, seed: int) -> None:
    each, terms = TopKCodec(kept=8, chunk_size=100), CodecTerms(elements)
    vector = random(elements, seed)
    found = decoded(each, vector, terms)
    for chunk, kept in zip(torch.split(vector, 100), torch.split(found, 100), strict=True):
        count = math.ceil(8 * len(chunk) / 100)
        largest = chunk.abs().topk(count).indices
        assert set(kept.nonzero().view(-1).tolist()) == set(largest.tolist())
        assert torch.equal(kept[largest].sign(), chunk[largest].sign())
        sizes, levels = chunk[largest].abs(), kept[largest].abs()
        assert len(levels.unique()) <= 2
        assert bool((levels <= sizes.max() * (1 + 2**-8)).all())
        assert float((sizes - levels).square().sum()) <= float((sizes - sizes.mean()).square().sum()) * 1.001 + 1e-4


def test_topk_layout_on_the_wire() -> None:
    """Check frozen bytes: levels, indices, values. Bit 0 of a value is its sign, bit 1 selects the larger level."""
    each, terms = TopKCodec(kept=4, chunk_size=8), CodecTerms(10)
    vector = torch.tensor([0.0, -1.0, 0.1, 4.0, 0.0, 1.0, 0.0, -4.0, 0.0, 0.5])
    message = each.encode(vector, terms)
    levels, indices, values = "803f8040" + "003f0000", "013000" + "057000" + "0100", "c9" + "00"
    assert message.hex() == levels + indices + values
    assert torch.equal(each.decode(message, terms)[[1, 3, 5, 7, 9]], torch.tensor([-1.0, 4.0, 1.0, -4.0, 0.5]))


def test_topk_refuses_what_no_encoder_sends() -> None:
    each, terms = TopKCodec(kept=4, chunk_size=8), CodecTerms(12)
    good = bytearray(each.encode(random(12, 0), terms))
    mine = bytes(good)

    def refused(place: int, piece: bytes, why: str) -> None:
        hostile = bytes(good[:place] + piece + good[place + len(piece) :])
        with pytest.raises(RemoteError, match=why):
            each.decode(hostile, terms)
        with pytest.raises(RemoteError, match=why):
            each.difference(mine, hostile, terms)

    for bad in (math.nan, math.inf, -1.0, 1e38):
        level = torch.tensor([bad], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
        refused(2, level, "levels")
    refused(8, pack_twelve(torch.tensor([1, 1])).numpy().tobytes(), "ascend")
    refused(8, pack_twelve(torch.tensor([3, 2])).numpy().tobytes(), "ascend")
    refused(11, pack_twelve(torch.tensor([6, 8])).numpy().tobytes(), "outside of their chunk")
    # Outside the last chunk, which is shorter.
    refused(14, pack_twelve(torch.tensor([3, 4])).numpy().tobytes(), "outside of their chunk")


def test_topk_options_no_manifest_may_carry() -> None:
    for kept, chunk_size in ((0, 4096), (6, 4096), (8, 4), (4, 8192)):
        with pytest.raises(ValueError, match="must be"):
            TopKCodec(kept, chunk_size)


# --- low rank -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_lowrank_finds_the_largest_components(rank: int) -> None:
    """Check the error: near the best possible from a cold start, within a fifth of it plus int4's noise when warm."""
    spectrum = torch.arange(1, 65).float() ** -1
    vector, terms = with_spectrum(128, 64, spectrum), CodecTerms(128 * 64, matrices=((128, 64),))
    best = float(spectrum[rank:].norm() / spectrum.norm())
    each, start = LowRankCodec(rank), None
    errors = []
    for _ in range(6):
        message, start = each.encode_from(vector, terms, start)
        errors.append(error(each.decode(message, terms), vector))
    assert errors[0] <= math.hypot(1.25 * best, 0.15)
    assert errors[-1] <= min(errors[0] + 0.01, math.hypot(1.1 * best, 0.15))
    assert each.encode(vector, terms) == each.encode(vector.clone(), terms)


def test_lowrank_costs_its_factors() -> None:
    terms = CodecTerms(1024 * 512, matrices=((1024, 512),))
    assert LowRankCodec(8).encoded_size(terms) * 8 == 8 * (1024 + 512) * 4.25
    exact = CodecTerms(64 * 3, matrices=((1, 64), (2, 64)))
    assert LowRankCodec(8).encoded_size(exact) * 8 == 64 * 3 * 4.25  # too small to gain from low rank: plain int4


def test_lowrank_goes_on_with_another_rank() -> None:
    """Check a changed rank: surplus rows of the start are dropped, missing ones start cold."""
    vector, terms = with_spectrum(64, 64, torch.arange(1, 33).float() ** -1), CodecTerms(64 * 64)
    _, start = LowRankCodec(4).encode_from(vector, terms, None)
    before = start.clone()
    for rank in (2, 8):
        message, after = LowRankCodec(rank).encode_from(vector, terms, start)
        assert error(LowRankCodec(rank).decode(message, terms), vector) < {2: 0.65, 8: 0.45}[rank]
        assert after.shape == (rank, 64)
    assert torch.equal(start, before)


def test_lowrank_of_zeros_and_of_one_component() -> None:
    terms = CodecTerms(64 * 64)
    each = LowRankCodec(4)
    message, start = each.encode_from(torch.zeros(64 * 64), terms, None)
    assert torch.equal(each.decode(message, terms), torch.zeros(64 * 64))
    vector = with_spectrum(64, 64, torch.ones(1))
    for _ in range(3):
        message, start = each.encode_from(vector, terms, start)
    assert error(each.decode(message, terms), vector) < 0.25  # twice int4's noise


def test_lowrank_refuses_what_multiplies_to_too_much() -> None:
    each, terms = LowRankCodec(2), CodecTerms(16 * 16)
    scale = torch.full((2,), 2.0**120, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    mine = each.encode(random(256, 0), terms)
    hostile = scale + b"\x77" * (len(mine) - 4)
    for read in (lambda: each.decode(hostile, terms), lambda: each.difference(mine, hostile, terms)):
        with pytest.raises(RemoteError, match="multiplies to numbers that are not finite"):
            read()


def test_effective_rank() -> None:
    """Check the effective rank: k for k equal components; for a falling spectrum between one and their number."""
    terms = CodecTerms(96 * 64, matrices=((96, 64),))
    for count in (1, 5, 64):
        assert effective_rank(with_spectrum(96, 64, torch.ones(count)), terms) == pytest.approx(count, rel=1e-2)
    falling = effective_rank(with_spectrum(96, 64, 0.5 ** torch.arange(20)), terms)
    assert 3 < falling < 5
    assert effective_rank(torch.zeros(96 * 64), terms) == 0
    joined = torch.cat([with_spectrum(96, 64, torch.ones(5)), random(10, 0), with_spectrum(96, 64, torch.ones(9))])
    both = CodecTerms(len(joined), matrices=((96, 64), (1, 10), (96, 64)))
    assert effective_rank(joined, both) == pytest.approx(7, rel=1e-2)


@settings(max_examples=100)
@given(data=st.data())
def test_matrices_cover_a_fragment_and_keep_rows_whole(data: st.DataObject) -> None:
    dimensions = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)
    shapes = data.draw(st.lists(dimensions, min_size=1, max_size=5))
    offsets, total = [], 0
    for shape in shapes:
        offsets.append(total)
        total += -(-math.prod(shape) // 16) * 16
    begin = data.draw(st.integers(0, total - 1))
    end = data.draw(st.integers(begin + 1, total))
    found = matrices(shapes, offsets, begin, end)
    assert sum(rows * columns for rows, columns in found) == end - begin
    place = begin
    for rows, columns in found:
        if rows > 1:
            parameter = max(k for k, offset in enumerate(offsets) if offset <= place)
            assert columns == math.prod(shapes[parameter][1:])
            assert (place - offsets[parameter]) % columns == 0
            assert place + rows * columns <= offsets[parameter] + math.prod(shapes[parameter])
        place += rows * columns
    whole = [(shape[0], math.prod(shape[1:])) for shape in shapes if len(shape) > 1 and shape[0] > 1]
    assert [pair for pair in matrices(shapes, offsets, 0, total) if pair[0] > 1] == whole


def test_a_fragment_of_unknown_shape_is_nearly_square() -> None:
    assert [near_square(n) for n in (1, 3, 4, 1024, 1 << 20, (1 << 20) + 1, 3 << 20)] == [
        (1, 1), (3, 1), (2, 2), (32, 32), (1024, 1024), (1025, 1024), (3072, 1024),
    ]  # fmt: skip
    assert matrix_at(torch.arange(5), 0, 3, 2).tolist() == [[0, 1], [2, 3], [4, 0]]


# --- error feedback -------------------------------------------------------------------------------------------------

STREAMS: tuple[Decodable, ...] = (
    *(codec.get_decodable(name, 64) for name in codec.GRADIENT_CODECS),
    TopKCodec(kept=8, chunk_size=100),
    LowRankCodec(rank=2),
)
each_stream = pytest.mark.parametrize("each", STREAMS, ids=str)


@each_stream
@settings(max_examples=10)
@given(elements=st.integers(1, 1500), seed=st.integers(0, 2**31))
def test_error_feedback_loses_nothing(each: Decodable, elements: int, seed: int) -> None:
    """Check for every codec that decoded part plus residual equals the input, to rounding."""
    terms, feedback = CodecTerms(elements), Feedback.empty(elements)
    put_in, arrived = torch.zeros(elements, dtype=torch.float64), torch.zeros(elements, dtype=torch.float64)
    for step in range(20):
        vector = random(elements, seed + step)
        message, feedback = compress(each, vector, feedback, terms)
        put_in += vector
        arrived += each.decode(message, terms)
    torch.testing.assert_close(arrived + feedback.residual, put_in, rtol=0, atol=1e-4)


@pytest.mark.parametrize("matrices", [(), ((48, 30), (1, 60))], ids=["one matrix", "a matrix and a vector"])
def test_error_feedback_loses_nothing_when_the_rank_changes(matrices: tuple[tuple[int, int], ...]) -> None:
    """Check that a change of rank keeps the residual, and that the power iteration continues with the existing rows."""
    terms, feedback = CodecTerms(1500, matrices=matrices), Feedback.empty(1500)
    put_in, arrived = torch.zeros(1500, dtype=torch.float64), torch.zeros(1500, dtype=torch.float64)
    for step, rank in enumerate((8, 8, 3, 1, 1, 6, 8, 2)):
        vector = random(1500, step)
        message, feedback = compress(LowRankCodec(rank), vector, feedback, terms)
        assert len(message) == LowRankCodec(rank).encoded_size(terms)
        assert feedback.start is not None
        assert len(feedback.start) == rank
        put_in += vector
        arrived += LowRankCodec(rank).decode(message, terms)
        torch.testing.assert_close(arrived + feedback.residual, put_in, rtol=0, atol=1e-4)


@each_stream
def test_what_is_put_in_steadily_arrives(each: Decodable) -> None:
    """Check that the residual stays bounded: all elements of a constant vector arrive in the long run."""
    vector, terms = random(2000, 1) + 0.5, CodecTerms(2000)
    feedback, arrived = Feedback.empty(2000), torch.zeros(2000)
    errors = []
    for step in range(1, 401):
        message, feedback = compress(each, vector, feedback, terms)
        arrived += each.decode(message, terms)
        if step in (100, 400):
            errors.append(error(arrived / step, vector))
    assert errors[1] < 0.2
    assert errors[1] < 0.35 * errors[0] or errors[1] < 1e-4


def test_decay_lets_the_past_fade() -> None:
    """Check SparseLoCo's rule by hand: e <- beta e + g, c = Q(e), e <- e - c."""
    each, terms, beta = TopKCodec(), CodecTerms(5000), 0.9
    feedback, by_hand = Feedback.empty(5000), torch.zeros(5000)
    for seed in range(3):
        gradient = random(5000, seed)
        _, feedback = compress(each, gradient, feedback, terms, decay=beta)
        by_hand = gradient + beta * by_hand
        by_hand = by_hand - each.decode(each.encode(by_hand, terms), terms)
        torch.testing.assert_close(feedback.residual, by_hand, rtol=0, atol=1e-5)


def test_feedback_carries_the_power_iteration() -> None:
    """Check that a warm start needs one iteration and is no worse, and that the codec itself keeps no state."""
    terms = CodecTerms(64 * 64)
    vector = with_spectrum(64, 64, torch.arange(1, 65).float() ** -1)
    each = LowRankCodec(4)
    first, feedback = compress(each, vector, Feedback.empty(64 * 64), terms)
    assert first == each.encode(vector, terms)
    assert feedback.start is not None
    second, _ = compress(each, vector, Feedback(torch.zeros(64 * 64), feedback.start), terms)
    assert second == each.encode_from(vector, terms, feedback.start)[0]
    assert error(each.decode(second, terms), vector) <= error(each.decode(first, terms), vector) + 0.01
    assert compress(TopKCodec(), vector, Feedback.empty(64 * 64), terms)[1].start is None
