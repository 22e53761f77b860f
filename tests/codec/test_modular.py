"""Modular codecs: errors relative to the difference, unbiased, exact negatives on any machine, wraps that are found."""

import math
import random as random_module
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2ptrain import codec
from p2ptrain.base.errors import RemoteError
from p2ptrain.codec import LARGEST_MAGNITUDE, CodecTerms, Comparison, ModularCodec
from p2ptrain.codec.base import CHUNK, blocks_of
from p2ptrain.codec.modular import centred, residues
from p2ptrain.codec.packing import unpack
from p2ptrain.codec.rotation import rotated, signs_and_dither
from p2ptrain.codec.steps import FIRST_RISE, REACH, SKETCH_BYTES, WRAPPED, sketch, widths

BITS = (2, 3, 4, 8)
CODECS = (*map(ModularCodec, BITS), ModularCodec(8, 16), ModularCodec(4, 64), ModularCodec(3, 8), ModularCodec(2, 512))
each_codec = pytest.mark.parametrize("each", CODECS, ids=lambda each: f"{each.name}-{each.block_size}")
each_width = pytest.mark.parametrize("bits", BITS)
sizes = st.integers(1, 3000)
seeds = st.integers(0, 2**31)
WHOLE = 224
"""Shape byte of a norm of 1: byte b means 2^((b - 224) / 4)."""
LEFT = {2: 0.85, 3: 0.35, 4: 0.12, 8: 0.002}
"""Share of the squared difference that an exchange with settled widths leaves at most, by bits."""


def random(elements: int, seed: int, magnitude: float = 1.0) -> Tensor:
    return magnitude * torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def uniform_terms(each: ModularCodec, elements: int, step: float, seed: int = 0) -> CodecTerms:
    """Return terms with one width, a power of two, for all blocks."""
    level = 4 * int(math.log2(step)) - REACH[each.bits]
    return CodecTerms(elements, bytes([WHOLE]) * each.blocks(elements), level, struct.pack("<I", seed))


def swapped(each: ModularCodec, mine: Tensor, theirs: Tensor, terms: CodecTerms) -> Comparison:
    return each.compare(each.encode(mine, terms), each.encode(theirs, terms), terms)


def met(each: ModularCodec, mine: Tensor, theirs: Tensor, shape: bytes) -> tuple[CodecTerms, Comparison]:
    """Return both sides of one exchange between peers with the same shape."""
    proposals = codec.proposal_for(each, shape, mine), codec.proposal_for(each, shape, theirs)
    terms = codec.agree(each, len(mine), *proposals)
    return terms, swapped(each, mine, theirs, terms)


def left(found: Tensor, apart: Tensor) -> float:
    """Return the share of the squared difference that remains."""
    return float((found - apart).square().sum() / apart.square().sum())


def in_steps(each: ModularCodec, values: Tensor, terms: CodecTerms, step: float) -> Tensor:
    """Return the rotated values in steps, [blocks, B] fp64."""
    signs, _ = signs_and_dither(terms.seed, each.block_size)
    return rotated(blocks_of(values, each.block_size) * signs).double() / step


# --- codes ----------------------------------------------------------------------------------------------------------


@each_codec
@settings(max_examples=30)
@given(elements=sizes, seed=seeds, apart=st.sampled_from([0.0, 0.01, 0.5, 1.0]))
def test_no_coordinate_is_off_by_more_than_a_step(each: ModularCodec, elements: int, seed: int, apart: float) -> None:
    """Check whole blocks whose rotated difference has at most 2^(bits-1) - 2 steps, or less than one with two bits."""
    elements = each.blocks(elements) * each.block_size
    step, reach = 2.0**-4, max(0.9, 2 ** (each.bits - 1) - 2)
    terms = uniform_terms(each, elements, step, seed)
    signs, _ = signs_and_dither(terms.seed, each.block_size)
    moved = apart * reach * step * (2 * torch.rand(elements, generator=torch.Generator().manual_seed(seed)) - 1)
    mine = random(elements, seed)
    theirs = mine + (rotated(moved.view(-1, each.block_size)) * signs).view(-1) / each.block_size
    found = swapped(each, mine, theirs, terms)
    kept = found.fill != WRAPPED
    steps = in_steps(each, found.difference, terms, step)
    exact = in_steps(each, theirs - mine, terms, step)
    assert bool(((steps - exact)[kept].abs() <= 1 + 1e-3).all())
    assert apart > 0.5 or bool(kept.all())


@each_width
@pytest.mark.parametrize("weights", ["zero", "spread"])
def test_the_codes_are_unbiased_whatever_the_weights(bits: int, weights: str) -> None:
    """Check the mean over dithers and rotations; without dither, weights of zero hide differences below a step."""
    each, repetitions = ModularCodec(bits, 64), 500
    mine = random(64, 1, {"zero": 0.0, "spread": 10.0}[weights])
    moved = random(64, 2)
    step = 8 * float(moved.norm()) / (2 ** (bits - 1) - 1)  # no rotated coordinate wraps
    step = 2.0 ** math.ceil(math.log2(step))
    total, squares = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    for seed in range(repetitions):
        terms = uniform_terms(each, 64, step, seed)
        found = swapped(each, mine, mine + moved, terms).difference.double()
        total += found
        squares += found.square()
    mean = total / repetitions
    deviations = (mean - moved) / ((squares / repetitions - mean.square()) / repetitions).sqrt()
    assert float(deviations.abs().max()) < 4.5
    assert 0.6 < float(deviations.square().mean()) < 1.5


@each_width
@pytest.mark.parametrize("apart", [0.05, 0.5, 1.0])
def test_equal_dithers_leave_f_times_one_minus_f(bits: int, apart: float) -> None:
    """Check the mean square error of a code for a constant rotated difference: with independent dithers it is 1/6."""
    signs, dither = signs_and_dither(b"dither", 1024)
    zeros, step = torch.zeros(100, 1024), torch.ones(100)
    moved = torch.zeros(100, 1024)
    moved[:, 0] = apart  # rotated: apart everywhere, with one sign a block
    start = random(100 * 1024, 1).view(100, 1024)
    for mine in (zeros, start):
        codes, _ = centred(
            residues(mine, step, bits, signs, dither), residues(mine + moved, step, bits, signs, dither), bits
        )
        error = float((codes - rotated(moved * signs)).square().mean())
        assert error == pytest.approx(apart * (1 - apart), abs=0.02)


@each_width
def test_every_difference_is_spread_evenly(bits: int) -> None:
    """Check that one element that moved is transmitted as well as all that moved."""
    each = ModularCodec(bits)
    mine = random(16 * 1024, 1)
    moved = torch.zeros(16 * 1024)
    moved[5::1024] = random(16, 2)
    level = round(4 * math.log2(float(moved.norm()))) - FIRST_RISE
    found = swapped(each, mine, mine + moved, CodecTerms(len(mine), codec.first_shape(each, moved), level, b"seed"))
    assert found.wrapped == 0
    assert left(found.difference, moved) < LEFT[bits]


@each_width
@settings(max_examples=20)
@given(seed=seeds, apart=st.sampled_from([8.0, 50.0, 1e4]))
def test_blocks_whose_widths_are_far_too_narrow_count_as_zero(bits: int, seed: int, apart: float) -> None:
    each, step = ModularCodec(bits), 2.0**-6
    mine = random(4096, seed)
    theirs = mine + random(4096, seed + 1, apart * 2 ** (bits - 1) * step / 32) * (torch.arange(4096) < 2048)
    found = swapped(each, mine, theirs, uniform_terms(each, 4096, step))
    assert found.fill.tolist() == [WRAPPED, WRAPPED, 0, 0]
    assert not found.difference.any()


@each_width
def test_bytes_that_are_no_weights_wrap(bits: int) -> None:
    each = ModularCodec(bits)
    terms = uniform_terms(each, 64 * 1024, 1.0)
    message = random_module.Random(1).randbytes(each.encoded_size(terms))
    assert each.compare(each.encode(random(64 * 1024, 1), terms), message, terms).wrapped == 1


@each_codec
@settings(max_examples=30)
@given(
    elements=sizes,
    seed=seeds,
    magnitude=st.sampled_from([0.0, 1e-44, 1e-30, 1e-3, 1.0, 1e6, 1e30]),
    ratio=st.sampled_from([0.0, 1e-6, 0.01, 1.0, 1e5]),
)
def test_antisymmetric_deterministic_and_of_exact_size(
    each: ModularCodec, elements: int, seed: int, magnitude: float, ratio: float
) -> None:
    mine = random(elements, seed, magnitude)
    theirs = mine + random(elements, seed + 1, magnitude * ratio)
    shape = codec.first_shape(each, mine)
    terms, here = met(each, mine, theirs, shape)
    there = swapped(each, theirs, mine, terms)
    assert torch.equal(here.difference, -there.difference)
    assert torch.equal(here.fill, there.fill)
    message = each.encode(mine, terms)
    assert isinstance(message, bytes)
    assert each.encode(mine.clone(), terms) == message
    assert len(message) == each.encoded_size(terms) == each.blocks(elements) * each.block_size * each.bits // 8
    assert torch.equal(each.difference(message, message, terms), torch.zeros(elements))
    assert torch.equal(each.difference(message, each.encode(theirs, terms), terms), here.difference)


@each_codec
@settings(max_examples=20)
@given(elements=sizes, shape=st.integers(0, 255), level=st.integers(-400, 400), seed=seeds)
def test_differences_are_equal_on_every_machine(
    each: ModularCodec, elements: int, shape: int, level: int, seed: int
) -> None:
    """Check the result against integer sums and one rounding: no order of summation can change it."""
    terms = CodecTerms(elements, bytes([shape]) * each.blocks(elements), level, struct.pack("<I", seed))
    bytes_of = random_module.Random(seed).randbytes
    messages = bytes_of(each.encoded_size(terms)), bytes_of(each.encoded_size(terms))
    found = each.compare(*messages, terms)
    mine, theirs = (
        (unpack(raw, each.bits, 8 * len(raw) // each.bits) if each.bits < 8 else raw).long().view(-1, each.block_size)
        for raw in (torch.frombuffer(bytearray(message), dtype=torch.uint8) for message in messages)
    )
    half = 2 ** (each.bits - 1)
    codes = (theirs - mine + half) % (2 * half) - half
    codes[codes == -half] = 0
    matrix = rotated(torch.eye(each.block_size)).long()
    signs, _ = signs_and_dither(terms.seed, each.block_size)
    sums = (codes @ matrix * signs.long()).double()
    scale = widths(terms.shape, level, each.bits).double() / each.block_size
    expected = torch.where((found.fill == WRAPPED)[:, None], 0.0, sums * scale[:, None])
    assert torch.equal(found.difference, expected.view(-1)[:elements].float())


@each_codec
@settings(max_examples=50)
@given(data=st.data(), elements=st.integers(1, 200))
def test_any_bytes_are_refused_or_yield_finite_numbers(each: ModularCodec, data: st.DataObject, elements: int) -> None:
    shape = data.draw(st.binary(min_size=each.blocks(elements), max_size=each.blocks(elements)))
    terms = CodecTerms(elements, shape, data.draw(st.integers(-400, 400)), data.draw(st.binary(max_size=4)))
    mine = each.encode(random(elements, 0, 1e30), terms)
    size = len(mine)
    theirs = data.draw(st.one_of(st.binary(max_size=size + 8), st.binary(min_size=size, max_size=size)))
    if len(theirs) != size:
        with pytest.raises(RemoteError, match=f"{len(theirs)} bytes instead of {size}"):
            each.compare(mine, theirs, terms)
        return
    found = each.compare(mine, theirs, terms)
    assert found.difference.shape == (elements,)
    assert found.difference.dtype == torch.float32
    assert bool(found.difference.isfinite().all())
    assert torch.equal(each.compare(theirs, mine, terms).difference, -found.difference)


@each_codec
def test_our_own_faults_are_told_apart(each: ModularCodec) -> None:
    terms = uniform_terms(each, 10, 1.0)
    message = each.encode(torch.zeros(10), terms)
    with pytest.raises(ValueError, match="our own message"):
        each.compare(message[:-1], message, terms)
    with pytest.raises(ValueError, match="step widths are agreed"):
        each.encode(torch.zeros(10), CodecTerms(10))
    for bad in (math.nan, math.inf, -math.inf, 1e38):
        with pytest.raises(ValueError, match="not finite or beyond"):
            each.encode(torch.tensor([0.0] * 9 + [bad]), terms)
    with pytest.raises(ValueError, match=r"fp32 \[10\] on the host"):
        each.encode(torch.zeros(9), terms)


@each_codec
def test_many_chunks_equal_one_block_at_a_time(each: ModularCodec) -> None:
    """Check that chunking does not change the result."""
    mine, theirs = random(2 * CHUNK + 3, 1), random(2 * CHUNK + 3, 2)
    whole = swapped(each, mine, theirs, uniform_terms(each, len(mine), 64.0))
    parts = [
        swapped(each, a, b, uniform_terms(each, len(a), 64.0))
        for a, b in zip(torch.split(mine, CHUNK), torch.split(theirs, CHUNK), strict=True)
    ]
    assert torch.equal(whole.difference, torch.cat([part.difference for part in parts]))
    assert torch.equal(whole.fill, torch.cat([part.fill for part in parts]))


@each_width
def test_layout_on_the_wire(bits: int) -> None:
    """Check frozen bytes: changing them requires a new protocol version."""
    each = ModularCodec(bits, 8)
    terms = CodecTerms(9, bytes([WHOLE, WHOLE - 12]), 8 - REACH[bits], b"layout")
    message = each.encode(torch.tensor([1.0, 2.0, 3.0, 4.0, -5.0, 6.0, -7.0, 8.0, 0.7]), terms)
    assert (
        message.hex()
        == {
            2: "409defbf",
            3: "24d357bfffdf",
            4: "441cfda5fffeffef",
            8: "0404fc01fdff05fafffffefffffffffe",
        }[bits]
    )


def test_values_that_no_step_resolves_count_as_equal() -> None:
    """Check that both sides clamp instead of overflowing."""
    each = ModularCodec(4, 8)
    terms = uniform_terms(each, 16, 2.0)
    mine, theirs = torch.zeros(16), torch.zeros(16)
    mine[0], theirs[0] = 1e30, 1.5e30
    theirs[8] = 4.0
    found = swapped(each, mine, theirs, terms)
    assert not found.difference[:8].any()
    assert float(found.difference[8]) == 4.0


# --- steps ----------------------------------------------------------------------------------------------------------


def test_widths_are_quarter_octaves_exact_in_bf16() -> None:
    every = widths(bytes(range(256)), -REACH[3], 3)
    assert torch.equal(every.bfloat16().float(), every)
    exact = 2.0 ** ((torch.arange(256).double() - WHOLE) / 4)
    assert bool(((every / exact - 1).abs() < 2**-8).all())
    for level in (-(10**6), 10**6):
        assert bool(widths(bytes(range(256)), level, 8).isfinite().all())


@settings(max_examples=30)
@given(elements=st.integers(1, 3 * CHUNK), seed=seeds, ratio=st.sampled_from([1.0, 1e-2, 1e-4]))
def test_sketches_measure_the_distance(elements: int, seed: int, ratio: float) -> None:
    """Check the estimate to five standard errors, which is far below the size of the vector itself."""
    mine = random(elements, seed)
    moved = random(elements, seed + 1, ratio)
    sums = struct.Struct("<64f")
    measured = math.dist(sums.unpack(sketch(mine)), sums.unpack(sketch(mine + moved)))
    error = 1.0 if elements < 64 else 5 / math.sqrt(2 * 64)
    assert abs(measured / float(moved.norm()) - 1) <= error + 1e-3
    assert sketch(mine) == sketch(mine.clone())


def test_both_sides_agree_on_the_same_steps() -> None:
    each = ModularCodec(4, 64)
    mine, theirs = random(1000, 1), random(1000, 2)
    proposals = (
        codec.proposal_for(each, codec.first_shape(each, mine), mine),
        codec.proposal_for(each, codec.first_shape(each, random(1000, 3, 1e-3)), theirs),
    )
    assert len(proposals[0]) == codec.proposal_size(each, 1000) == 16 + SKETCH_BYTES
    terms = codec.agree(each, 1000, *proposals)
    assert terms == codec.agree(each, 1000, *reversed(proposals))
    assert terms.seed != codec.agree(each, 1000, proposals[0], proposals[0]).seed


@settings(max_examples=60)
@given(theirs=st.one_of(st.binary(max_size=300), st.binary(min_size=4 + SKETCH_BYTES, max_size=4 + SKETCH_BYTES)))
def test_any_wish_is_refused_or_yields_steps(theirs: bytes) -> None:
    each = ModularCodec(4, 64)
    mine = random(250, 1)
    proposal = codec.proposal_for(each, codec.first_shape(each, mine), mine)
    try:
        terms = codec.agree(each, 250, proposal, theirs)
    except RemoteError:
        return
    assert bool(swapped(each, mine, -mine, terms).difference.isfinite().all())


def test_wishes_that_are_none() -> None:
    each = ModularCodec(4, 64)
    proposal = codec.proposal_for(each, bytes(4), torch.zeros(250))
    with pytest.raises(RemoteError, match="has 5 bytes instead of 260"):
        codec.agree(each, 250, proposal, b"hello")
    with pytest.raises(RemoteError, match="sketch of its weights is not finite"):
        codec.agree(each, 250, proposal, proposal[:-4] + struct.pack("<f", math.nan))
    with pytest.raises(RemoteError, match="which codec int8 does not use"):
        codec.agree(codec.get("int8"), 250, b"", proposal)


@pytest.mark.parametrize("name", codec.GRADIENT_CODECS)
def test_other_codecs_wish_for_nothing(name: str) -> None:
    each, snapshot = codec.get(name), random(100, 1)
    assert codec.first_shape(each, snapshot) == codec.proposal_for(each, b"", snapshot) == b""
    assert codec.proposal_size(each, 100) == 0
    terms = codec.agree(each, 100, b"", b"")
    assert terms == CodecTerms(100)
    message, other = each.encode(snapshot, terms), each.encode(-snapshot, terms)
    found = codec.compare(each, message, other, terms)
    assert torch.equal(found.difference, each.difference(message, other, terms))
    assert found.wrapped == 0
    assert codec.next_shape(each, b"", terms, found) == b""


@each_width
@pytest.mark.parametrize("reference", ["movement", "snapshot"])
def test_first_contact(bits: int, reference: str) -> None:
    """Check two peers without measurements: nearly all blocks arrive, with an error below the disagreement."""
    each = ModularCodec(bits, 256)
    scale = torch.exp(random(64, 1)).repeat_interleave(256) * 0.01
    start = random(len(scale), 2)
    moved = [scale * random(len(scale), seed) for seed in (3, 4)]
    mine, theirs = start + moved[0], start + moved[1]
    shapes = [codec.first_shape(each, moved[k] if reference == "movement" else (mine, theirs)[k]) for k in range(2)]
    proposals = codec.proposal_for(each, shapes[0], mine), codec.proposal_for(each, shapes[1], theirs)
    found = swapped(each, mine, theirs, codec.agree(each, len(mine), *proposals))
    if reference == "movement":
        assert found.wrapped == 0
        assert left(found.difference, theirs - mine) < {2: 1.6, 3: 0.9, 4: 0.25, 8: 0.01}[bits]
    else:
        assert found.wrapped < 0.5


@each_width
def test_shapes_follow_what_was_measured(bits: int) -> None:
    """Check blocks that move more or less than assumed: wrapped or imprecise at first, right after some exchanges."""
    each = ModularCodec(bits, 256)
    base, scale = random(256 * 256, 1), torch.ones(256 * 256)
    scale[:256], scale[256:512] = 64.0, 2.0**-4
    shape = codec.first_shape(each, base)  # assumes that all blocks move alike
    history = []
    for seed in range(10):
        apart = 1e-3 * scale * random(len(base), seed + 10)
        terms, found = met(each, base, base + apart, shape)
        quiet = slice(256, 512)
        history.append((bool(found.fill[0] == WRAPPED), left(found.difference[quiet], apart[quiet])))
        shape = codec.next_shape(each, shape, terms, found)
    assert history[0][0] is True
    assert history[-1][0] is False
    assert history[-1][1] < LEFT[bits] < history[0][1]
    assert found.wrapped == 0


def test_a_block_that_stood_still_is_found_again() -> None:
    """Check that the step of a block without differences shrinks only to a limit."""
    each = ModularCodec(4, 256)
    base = random(16 * 256, 1)
    shape = codec.first_shape(each, base)
    for seed in range(100):
        apart = 1e-3 * random(len(base), seed)
        apart[:256] = 0
        terms, found = met(each, base, base + apart, shape)
        shape = codec.next_shape(each, shape, terms, found)
    exchanges = 0
    while found.wrapped > 0 or exchanges == 0:
        terms, found = met(each, base, base + 1e-3 * random(len(base), exchanges), shape)
        shape = codec.next_shape(each, shape, terms, found)
        exchanges += 1
    assert 1 < exchanges <= 14


@each_width
def test_gossip_reaches_agreement_and_keeps_the_mean(bits: int) -> None:
    """Check six peers whose disagreement shrinks a thousandfold: the steps follow, so there is no floor."""
    each = ModularCodec(bits, 256)
    choice = random_module.Random(1)
    common = random(2000, 0)
    peers = [common + random(2000, seed, 0.1) for seed in range(1, 7)]
    shapes = [codec.first_shape(each, peer - common) for peer in peers]
    mean = torch.stack(peers).double().mean(0)
    before = float((torch.stack(peers) - mean).norm(dim=1).mean())
    for _ in range(300 if bits == 2 else 100):
        i, j = choice.sample(range(6), 2)
        proposals = codec.proposal_for(each, shapes[i], peers[i]), codec.proposal_for(each, shapes[j], peers[j])
        terms = codec.agree(each, 2000, *proposals)
        found = swapped(each, peers[i], peers[j], terms)
        peers[i], peers[j] = peers[i] + found.difference / 2, peers[j] - found.difference / 2
        shapes[i], shapes[j] = (codec.next_shape(each, shapes[k], terms, found) for k in (i, j))
    after = float((torch.stack(peers) - mean).norm(dim=1).mean())
    assert after < 1e-3 * before
    torch.testing.assert_close(torch.stack(peers).double().mean(0), mean, rtol=0, atol=1e-6)


def test_a_far_peer_is_reached_at_the_first_meeting() -> None:
    """Check a peer a thousand times farther away than any before: the level is measured, so no history is needed."""
    each = ModularCodec(4, 256)
    base = random(16 * 256, 1)
    shape = codec.first_shape(each, base)
    for seed in range(5):
        terms, found = met(each, base, base + random(len(base), seed, 1e-3), shape)
        shape = codec.next_shape(each, shape, terms, found)
    far = random(len(base), 99)
    _, found = met(each, base, base + far, shape)
    assert found.wrapped < 0.2
    kept = found.difference != 0
    assert left(found.difference[kept], far[kept]) < LEFT[4]


def test_references_and_snapshots_that_are_broken_are_our_bug() -> None:
    each = ModularCodec(4, 256)
    for bad in (math.nan, math.inf, 1e38):
        broken = torch.tensor([1.0, bad])
        with pytest.raises(ValueError, match="not finite or beyond"):
            codec.first_shape(each, broken)
        with pytest.raises(ValueError, match="not finite or beyond"):
            codec.proposal_for(each, bytes(1), broken)
    high = torch.full((10,), LARGEST_MAGNITUDE)
    assert bool(met(each, high, -high, codec.first_shape(each, high))[1].difference.isfinite().all())
