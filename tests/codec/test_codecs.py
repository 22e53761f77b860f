"""Properties of every codec: size, determinism, bounds, antisymmetry, and the rejection of hostile bytes."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2ptrain import codec
from p2ptrain.base.errors import RemoteError
from p2ptrain.codec import LARGEST_MAGNITUDE, BlockwiseCodec, CodecTerms, Decodable, LowRankCodec, TopKCodec
from p2ptrain.codec.base import CHUNK
from p2ptrain.codec.dense import DenseCodec
from p2ptrain.codec.lowrank import LARGEST_ELEMENT

CODECS: tuple[Decodable, ...] = (
    *map(codec.get_decodable, codec.GRADIENT_CODECS),
    codec.get_decodable("int8", block_size=64),
    codec.get_decodable("int8", block_size=7),
    codec.get_decodable("int4", block_size=64),
    codec.get_decodable("int4", block_size=14),
    TopKCodec(kept=8, chunk_size=100),
    LowRankCodec(rank=1),
)
"""Codecs whose messages can be decoded alone; ``test_modular.py`` tests the others."""

each_codec = pytest.mark.parametrize("each", CODECS, ids=lambda each: f"{each.name}-{getattr(each, 'block_size', '')}")
sizes = st.integers(1, 3000)
seeds = st.integers(0, 2**31)
magnitudes = st.sampled_from([0.0, 1e-44, 1e-38, 1e-30, 1e-3, 1.0, 1e6, 1e30])


def largest_of(each: Decodable) -> float:
    """Return the largest magnitude that the codec accepts."""
    if isinstance(each, LowRankCodec):
        return LARGEST_ELEMENT
    return each.largest if isinstance(each, DenseCodec) else LARGEST_MAGNITUDE


def sample(each: Decodable, elements: int, seed: int, magnitude: float) -> Tensor:
    """Return random elements that the codec accepts."""
    return random(elements, seed, magnitude).clamp_(-largest_of(each), largest_of(each))


def random(elements: int, seed: int, magnitude: float = 1.0) -> Tensor:
    return magnitude * torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def decoded(each: Decodable, snapshot: Tensor) -> Tensor:
    terms = CodecTerms(len(snapshot))
    return each.decode(each.encode(snapshot, terms), terms)


def error_bound(each: Decodable, snapshot: Tensor) -> Tensor:
    """Return the largest error that each element of a decoded message may have, [n]."""
    if isinstance(each, DenseCodec):
        relative, absolute = {"fp32": (0.0, 0.0), "bf16": (2**-8, 1e-40), "fp16": (2**-11, 2**-25)}[each.name]
        return snapshot.abs() * relative + absolute
    if isinstance(each, BlockwiseCodec):
        blocks = torch.split(snapshot.abs(), each.block_size)
        codes = 2 ** (each.bits - 1) - 1
        step = torch.cat([block.max().expand(len(block)) / codes for block in blocks]) * (1 + 2**-7)
        return step * (0.5 + 1e-4) + 2e-36 * 127 / codes
    if isinstance(each, TopKCodec):
        return snapshot.abs().max().expand(len(snapshot)) * (1 + 2**-8)
    return torch.linalg.vector_norm(snapshot.double()).float().expand(len(snapshot)) * 1.5 + 1e-24


@each_codec
@settings(max_examples=30)
@given(elements=sizes, seed=seeds, magnitude=magnitudes)
def test_exact_size_determinism_and_error_bound(each: Decodable, elements: int, seed: int, magnitude: float) -> None:
    snapshot, terms = sample(each, elements, seed, magnitude), CodecTerms(elements)
    message = each.encode(snapshot, terms)
    assert isinstance(message, bytes)
    assert len(message) == each.encoded_size(terms)
    assert each.encode(snapshot.clone(), terms) == message
    assert bool(((decoded(each, snapshot) - snapshot).abs() <= error_bound(each, snapshot)).all())


@each_codec
@settings(max_examples=30)
@given(elements=sizes, seed=seeds, magnitude=magnitudes, ratio=st.sampled_from([1.0, 1.37, 1e-4, 1e5]))
def test_antisymmetric_to_the_bit(each: Decodable, elements: int, seed: int, magnitude: float, ratio: float) -> None:
    terms = CodecTerms(elements)
    mine = each.encode(sample(each, elements, seed, magnitude), terms)
    theirs = each.encode(sample(each, elements, seed + 1, magnitude * ratio), terms)
    here, there = each.difference(mine, theirs, terms), each.difference(theirs, mine, terms)
    assert torch.equal(here, -there)
    assert torch.equal(here, each.decode(theirs, terms) - each.decode(mine, terms))
    assert torch.equal(each.difference(mine, mine, terms), torch.zeros(elements))


@each_codec
@settings(max_examples=50)
@given(data=st.data(), elements=st.integers(1, 200))
def test_any_bytes_are_refused_or_yield_finite_numbers(each: Decodable, data: st.DataObject, elements: int) -> None:
    terms = CodecTerms(elements)
    mine = each.encode(sample(each, elements, 0, 1e30), terms)
    size = len(mine)
    theirs = data.draw(st.one_of(st.binary(max_size=size + 8), st.binary(min_size=size, max_size=size)))
    try:
        difference = each.difference(mine, theirs, terms)
    except RemoteError:
        with pytest.raises(RemoteError):
            each.decode(theirs, terms)
        return
    assert bool(each.decode(theirs, terms).isfinite().all())
    assert difference.shape == (elements,)
    assert difference.dtype == torch.float32
    assert bool(difference.isfinite().all())


@each_codec
def test_wrong_length_is_their_fault_or_our_bug(each: Decodable) -> None:
    terms = CodecTerms(10)
    message = each.encode(random(10, 0), terms)
    for wrong in (b"", message[:-1], message + b"\0"):
        with pytest.raises(RemoteError, match=f"{len(wrong)} bytes instead of {len(message)}"):
            each.difference(message, wrong, terms)
        with pytest.raises(RemoteError, match=f"{len(wrong)} bytes instead of {len(message)}"):
            each.decode(wrong, terms)
        with pytest.raises(ValueError, match="our own message"):
            each.difference(wrong, message, terms)


@each_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("position", [0, 2500, CHUNK + 1])
def test_a_broken_snapshot_is_our_bug(each: Decodable, bad: float, position: int) -> None:
    snapshot = random(CHUNK + 5, 0)
    snapshot[position] = bad
    with pytest.raises(ValueError, match="not finite or beyond"):
        each.encode(snapshot, CodecTerms(len(snapshot)))


def test_every_nan_is_noticed() -> None:
    """Check NaNs of every bit pattern, also those that would wrap around when a scale is rounded up."""
    for bits in (0x7FFFFFFF, -1, 0x7F800001):
        snapshot = torch.tensor([bits, 0], dtype=torch.int32).view(torch.float32)
        for each in CODECS:
            with pytest.raises(ValueError, match="not finite"):
                each.encode(snapshot, CodecTerms(2))


@each_codec
def test_a_snapshot_that_is_not_as_agreed_is_our_bug(each: Decodable) -> None:
    for snapshot in (torch.zeros(9), torch.zeros(10).double(), torch.zeros(2, 5), torch.zeros(10, device="meta")):
        with pytest.raises(ValueError, match=r"fp32 \[10\] on the host"):
            each.encode(snapshot, CodecTerms(10))


@each_codec
def test_largest_legal_values_do_not_overflow(each: Decodable) -> None:
    terms = CodecTerms(3)
    high = each.encode(torch.full((3,), largest_of(each)), terms)
    low = each.encode(torch.full((3,), -largest_of(each)), terms)
    assert bool(each.difference(low, high, terms).isfinite().all())


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e38])
def test_dense_refuses_numbers_no_encoder_sends(name: str, bad: float) -> None:
    each, terms = codec.get(name), CodecTerms(3)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    hostile = torch.tensor([0.0, bad, 0.0], dtype=dtype).view(torch.uint8).numpy().tobytes()
    with pytest.raises(RemoteError, match="not finite or beyond"):
        each.difference(each.encode(torch.zeros(3), terms), hostile, terms)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 1e38])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_blockwise_refuses_scales_no_encoder_sends(name: str, bad: float) -> None:
    each, terms = codec.get(name, block_size=2), CodecTerms(3)
    codes = {"int8": b"\x80\x7f\x01", "int4": b"\x88\x01"}[name]
    hostile = torch.tensor([1.0, bad], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes() + codes
    with pytest.raises(RemoteError, match="scales"):
        each.difference(each.encode(torch.zeros(3), terms), hostile, terms)


def test_int8_layout_on_the_wire() -> None:
    """Check frozen bytes: changing them requires a new protocol version."""
    each, terms = codec.get("int8", block_size=2), CodecTerms(5)
    message = each.encode(torch.tensor([127.0, -64.0, 0.0, 0.0, -254.0]), terms)
    assert message.hex() == "803f" + "0000" + "0040" + "7f" + "c0" + "00" + "00" + "81"


def test_int4_layout_on_the_wire() -> None:
    """Check frozen bytes, the earlier code in the lower half: changing them requires a new protocol version."""
    each, terms = codec.get("int4", block_size=2), CodecTerms(5)
    message = each.encode(torch.tensor([7.0, -4.0, 0.0, 0.0, -14.0]), terms)
    assert message.hex() == "803f" + "0000" + "0040" + "c7" + "00" + "09"


def test_fp16_refuses_what_it_cannot_hold() -> None:
    each, terms = codec.get("fp16"), CodecTerms(2)
    assert torch.equal(
        decoded(codec.get_decodable("fp16"), torch.tensor([65504.0, -1.0])), torch.tensor([65504.0, -1.0])
    )
    for beyond in (65505.0, 65520.0, -1e6):
        with pytest.raises(ValueError, match=r"beyond 6\.55e\+04"):
            each.encode(torch.tensor([0.0, beyond]), terms)


def test_int8_products_are_exact() -> None:
    """Check that code times scale needs no rounding: antisymmetry across hardware depends on it."""
    snapshot = random(4096, 5)
    terms, each = CodecTerms(4096), codec.get_decodable("int8", block_size=64)
    message = each.encode(snapshot, terms)
    scales = torch.frombuffer(bytearray(message[:128]), dtype=torch.bfloat16)
    codes = torch.frombuffer(bytearray(message[128:]), dtype=torch.int8)
    exact = codes.double().view(64, 64) * scales.double()[:, None]
    assert torch.equal(exact.float().double(), exact)
    assert torch.equal(each.decode(message, terms).view(64, 64).double(), exact)


def test_a_block_of_zeros_beside_others() -> None:
    snapshot = torch.cat([torch.zeros(1024), random(1024, 1), torch.zeros(10)])
    seen = decoded(codec.get_decodable("int8"), snapshot)
    assert int(seen[:1024].count_nonzero()) == int(seen[2048:].count_nonzero()) == 0
    assert int(seen[1024:2048].count_nonzero()) > 1000


@pytest.mark.parametrize("each", [each for each in CODECS if not isinstance(each, LowRankCodec)], ids=str)
def test_many_chunks_equal_one_block_at_a_time(each: Decodable) -> None:
    """Check that chunking does not change the result: a long snapshot decodes as its pieces do."""
    block = getattr(each, "block_size", getattr(each, "chunk_size", 1))
    cut = CHUNK // block * block
    snapshot = random(2 * cut + 3, 9)
    pieces = [decoded(each, piece) for piece in torch.split(snapshot, cut)]
    assert torch.equal(decoded(each, snapshot), torch.cat(pieces))


@each_codec
def test_any_buffer_is_taken_silently(each: Decodable) -> None:
    """Check read-only, writable and unaligned buffers: equal results, no warning, unchanged input."""
    terms = CodecTerms(1500)
    mine, theirs = each.encode(random(1500, 0), terms), each.encode(random(1500, 1), terms)
    frame = memoryview(b"head!" + theirs)[5:]
    expected = each.difference(mine, theirs, terms)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for form in (bytearray(theirs), memoryview(theirs), frame):
            assert torch.equal(each.difference(memoryview(mine), form, terms), expected)
            assert bytes(form) == theirs


@each_codec
def test_a_codec_that_leaves_elements_out_asks_for_error_feedback(each: Decodable) -> None:
    snapshot = random(8192, 3)
    error = float((decoded(each, snapshot) - snapshot).norm() / snapshot.norm())
    assert each.needs_feedback == (error > 0.5)


def test_get_knows_the_names_a_manifest_may_carry() -> None:
    for name in codec.CODECS:
        assert codec.get(name, 256, rank=3).name == name
    for name in codec.GRADIENT_CODECS:
        assert codec.get_decodable(name) == codec.get(name)
    with pytest.raises(ValueError, match=r"unknown codec 'int3'; codecs: fp32, .*, modular2, topk, lowrank$"):
        codec.get("int3")
    with pytest.raises(ValueError, match="codec modular4 carries weights"):
        codec.get_decodable("modular4")
    for name in ("int8", "int4", "modular8", "modular2"):
        with pytest.raises(ValueError, match="block size"):
            codec.get(name, block_size=0)
    with pytest.raises(ValueError, match="even"):
        codec.get("int4", block_size=7)
    for size in (4, 24):
        with pytest.raises(ValueError, match="a power of two"):
            codec.get("modular3", block_size=size)
    with pytest.raises(ValueError, match="block size"):
        codec.get("modular8", block_size=2048)
    with pytest.raises(ValueError, match="rank"):
        codec.get("lowrank", rank=0)
    with pytest.raises(ValueError, match="4 or 8 bits"):
        BlockwiseCodec(bits=3)
    with pytest.raises(ValueError, match="at least one element"):
        CodecTerms(0)
    with pytest.raises(ValueError, match="do not have 10 elements"):
        CodecTerms(10, matrices=((2, 4), (1, 1)))


def test_a_block_too_small_for_a_normal_scale_is_sent_as_zeros() -> None:
    """Check blocks whose scale would be subnormal: its reciprocal, and with it the codes, would overflow."""
    tiny = torch.tensor([6e-37, -6e-37, 1e-38, 1e-45])
    assert torch.equal(decoded(codec.get_decodable("int8"), tiny), torch.zeros(4))
    assert bool((decoded(codec.get_decodable("int8"), tiny * 1e4)[:2] != 0).all())
