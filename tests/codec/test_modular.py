"""Modular codecs: exact within a step without wrapping, wrapped elements found and zeroed, steps that adapt."""

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
from p2ptrain.codec.base import CHUNK
from p2ptrain.codec.modular import hash_weights
from p2ptrain.codec.steps import SKETCH_BYTES, WRAPPED, largest_code, sketch, widths

CODECS = (ModularCodec(8), ModularCodec(4), ModularCodec(8, 7), ModularCodec(4, 64), ModularCodec(4, 4096))
each_codec = pytest.mark.parametrize("each", CODECS, ids=lambda each: f"{each.name}-{each.block_size}")
sizes = st.integers(1, 3000)
seeds = st.integers(0, 2**31)
LEVEL_OF_ONE = 224
"""Shape byte that means a width of 1: byte b means 2^((b - 224) / 4)."""


def random(elements: int, seed: int, magnitude: float = 1.0) -> Tensor:
    return magnitude * torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def uniform_terms(each: ModularCodec, elements: int, step: float) -> CodecTerms:
    """Return terms with one width, a power of two, for all blocks."""
    return CodecTerms(elements, bytes([LEVEL_OF_ONE]) * each.blocks(elements), 4 * int(math.log2(step)))


def swapped(each: ModularCodec, mine: Tensor, theirs: Tensor, terms: CodecTerms) -> Comparison:
    return each.compare(each.encode(mine, terms), each.encode(theirs, terms), terms)


def met(each: ModularCodec, mine: Tensor, theirs: Tensor, shape: bytes) -> tuple[CodecTerms, Comparison]:
    """Return both sides of one exchange between peers with the same shape."""
    proposals = codec.proposal_for(each, shape, mine), codec.proposal_for(each, shape, theirs)
    terms = codec.agree(each, len(mine), *proposals)
    return terms, swapped(each, mine, theirs, terms)


def integers(values: Tensor, step: float) -> Tensor:
    return torch.round(values.double() / step)


def per_block(each: ModularCodec, values: Tensor) -> Tensor:
    """Return the largest value of each block, [blocks]."""
    return torch.stack([block.max() for block in torch.split(values, each.block_size)])


# --- codes ----------------------------------------------------------------------------------------------------------


@each_codec
@settings(max_examples=30, deadline=None)
@given(elements=sizes, seed=seeds, apart=st.sampled_from([0.0, 0.01, 0.5, 1.0]))
def test_what_does_not_wrap_is_exact_within_a_step(each: ModularCodec, elements: int, seed: int, apart: float) -> None:
    step = 2.0**-6
    reach = (largest_code(each.bits) - 1) * step
    mine = random(elements, seed)
    theirs = mine + apart * reach * (2 * torch.rand(elements, generator=torch.Generator().manual_seed(seed + 1)) - 1)
    terms = uniform_terms(each, elements, step)
    found = swapped(each, mine, theirs, terms)
    assert found.wrapped == 0
    exact = integers(theirs, step) - integers(mine, step)
    assert torch.equal(found.difference.double(), exact * step)
    assert torch.equal(found.largest.double(), per_block(each, exact.abs()))
    assert bool(((found.difference - (theirs - mine)).abs() <= step * (1 + 1e-4)).all())


@each_codec
@settings(max_examples=40, deadline=None)
@given(elements=sizes, seed=seeds, apart=st.sampled_from([1.0, 3.0, 50.0, 1e4]), rare=st.booleans())
def test_wraps_are_found_and_count_as_zero(
    each: ModularCodec, elements: int, seed: int, apart: float, rare: bool
) -> None:
    step = 2.0**-6
    moved = random(elements, seed + 1, apart * largest_code(each.bits) * step)
    if rare:
        moved *= torch.rand(elements, generator=torch.Generator().manual_seed(seed + 2)) < 0.002
    mine = random(elements, seed)
    theirs = mine + moved
    terms = uniform_terms(each, elements, step)
    found = swapped(each, mine, theirs, terms)
    exact = integers(theirs, step) - integers(mine, step)
    wraps = per_block(each, exact.abs()) > largest_code(each.bits)
    assert torch.equal(found.largest == WRAPPED, wraps)
    for block, expected, wrapped in zip(
        torch.split(found.difference, each.block_size), torch.split(exact, each.block_size), wraps, strict=True
    ):
        assert torch.equal(block.double(), torch.zeros_like(expected) if wrapped else expected * step)


@each_codec
@settings(max_examples=60, deadline=None)
@given(data=st.data(), turns=st.sampled_from([(1,), (-1,), (1, 1), (1, -1), (3,)]))
def test_one_or_two_wrapped_elements_never_escape(each: ModularCodec, data: st.DataObject, turns: tuple[int]) -> None:
    """Check elements that are off by whole turns, so that the codes alone would suggest agreement."""
    elements = each.block_size
    places = data.draw(st.lists(st.integers(0, elements - 1), min_size=len(turns), max_size=len(turns), unique=True))
    mine = random(elements, 0)
    theirs = mine.double()
    for place, turn in zip(places, turns, strict=True):
        theirs[place] += turn * 2**each.bits
    assert swapped(each, mine, theirs.float(), uniform_terms(each, elements, 1.0)).wrapped == 1


def test_hash_weights_are_frozen() -> None:
    """Check hash weights that are odd, distinct and equal on every machine: they are part of the protocol."""
    weights = hash_weights(4096)
    assert weights[:4].tolist() == [13563, 15725, 6541, 325]
    assert len(set(weights.tolist())) == 4096
    assert bool((weights % 2 == 1).all())
    assert int(weights.max()) < 2**14


@each_codec
@settings(max_examples=30, deadline=None)
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
    assert torch.equal(here.largest, there.largest)
    assert here.wrapped == there.wrapped
    message = each.encode(mine, terms)
    assert isinstance(message, bytes)
    assert each.encode(mine.clone(), terms) == message
    assert len(message) == each.encoded_size(terms) == 2 * each.blocks(elements) + -(-elements * each.bits // 8)
    assert torch.equal(each.difference(message, message, terms), torch.zeros(elements))
    assert torch.equal(each.difference(message, each.encode(theirs, terms), terms), here.difference)


@each_codec
@settings(max_examples=50, deadline=None)
@given(data=st.data(), elements=st.integers(1, 200))
def test_any_bytes_are_refused_or_yield_finite_numbers(each: ModularCodec, data: st.DataObject, elements: int) -> None:
    shape = data.draw(st.binary(min_size=each.blocks(elements), max_size=each.blocks(elements)))
    terms = CodecTerms(elements, shape, data.draw(st.integers(-400, 400)))
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
    cut = CHUNK // each.block_size * each.block_size
    mine, theirs = random(2 * cut + 3, 1), random(2 * cut + 3, 2)
    whole = swapped(each, mine, theirs, uniform_terms(each, len(mine), 0.5))
    parts = [
        swapped(each, a, b, uniform_terms(each, len(a), 0.5))
        for a, b in zip(torch.split(mine, cut), torch.split(theirs, cut), strict=True)
    ]
    assert torch.equal(whole.difference, torch.cat([part.difference for part in parts]))
    assert torch.equal(whole.largest, torch.cat([part.largest for part in parts]))


def test_layout_on_the_wire() -> None:
    """Check frozen bytes, hashes of the quotients, then residues: changing them requires a new protocol version."""
    each = ModularCodec(4, 2)
    terms = uniform_terms(each, 3, 1.0)
    first, second = hash_weights(2).tolist()
    cut_off = (2 * first - 1 * second) % 2**16
    message = each.encode(torch.tensor([35.0, -1.0, 5.4]), terms)
    assert message == struct.pack("<HH", cut_off, 0) + bytes([0xF3, 0x05])
    assert ModularCodec(8, 2).encode(torch.tensor([258.0, -1.0, 5.6]), terms)[4:] == bytes([0x02, 0xFF, 0x06])


def test_values_that_no_step_resolves_count_as_equal() -> None:
    """Check that both sides clamp at 2^30 steps instead of overflowing."""
    each = ModularCodec(4, 2)
    found = swapped(each, torch.tensor([1e30, 1.0]), torch.tensor([1.5e30, 3.0]), uniform_terms(each, 2, 1.0))
    assert found.difference.tolist() == [0.0, 2.0]


# --- steps ----------------------------------------------------------------------------------------------------------


def test_widths_are_quarter_octaves_exact_in_bf16() -> None:
    every = widths(bytes(range(256)), 0)
    assert torch.equal(every.bfloat16().float(), every)
    exact = 2.0 ** ((torch.arange(256).double() - LEVEL_OF_ONE) / 4)
    assert bool(((every / exact - 1).abs() < 2**-8).all())
    for level in (-(10**6), 10**6):
        assert bool(widths(bytes(range(256)), level).isfinite().all())


@settings(max_examples=30, deadline=None)
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
    assert codec.agree(each, 1000, *proposals) == codec.agree(each, 1000, *reversed(proposals))


@settings(max_examples=60, deadline=None)
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


@pytest.mark.parametrize("bits", [4, 8])
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
    error = float((found.difference - (theirs - mine)).norm() / (theirs - mine).norm())
    if reference == "movement":
        assert found.wrapped == 0
        assert error < {4: 0.7, 8: 0.1}[bits]
    else:
        assert found.wrapped < {4: 0.5, 8: 0.1}[bits]


@pytest.mark.parametrize("bits", [4, 8])
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
        error = float((found.difference - apart)[quiet].norm() / apart[quiet].norm())
        history.append((bool(found.largest[0] == WRAPPED), error))
        shape = codec.next_shape(each, shape, terms, found)
    assert history[0][0] is True
    assert history[-1][0] is False
    assert history[-1][1] < {4: 0.6, 8: 0.1}[bits] < history[0][1]
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


@pytest.mark.parametrize("bits", [4, 8])
def test_gossip_reaches_agreement_and_keeps_the_mean(bits: int) -> None:
    """Check six peers whose disagreement shrinks a thousandfold: the steps follow, so there is no floor."""
    each = ModularCodec(bits, 256)
    choice = random_module.Random(1)
    common = random(2000, 0)
    peers = [common + random(2000, seed, 0.1) for seed in range(1, 7)]
    shapes = [codec.first_shape(each, peer - common) for peer in peers]
    mean = torch.stack(peers).double().mean(0)
    before = float((torch.stack(peers) - mean).norm(dim=1).mean())
    for _ in range(100):
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
    assert float((found.difference - far)[kept].norm() / far[kept].norm()) < 0.6


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
