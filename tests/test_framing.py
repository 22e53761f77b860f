"""Framing: a header is exactly right, or it is rejected before its body is read."""

import contextlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from p2ptrain import framing
from p2ptrain.base.errors import RemoteError


@settings(max_examples=50)
@given(some.binary(max_size=300))
def test_any_bytes_are_a_header_or_a_remote_error(body):
    for decode in (framing.decode_header, framing.decode_part_end):
        with contextlib.suppress(RemoteError):
            decode(body)


@pytest.mark.parametrize(("kind", "largest"), [(1, 1 << 16), (2, 1 << 18), (3, 44), (4, 64), (5, 1 << 16)])
def test_frames_have_their_caps(kind, largest):
    assert framing.decode_header(framing.encode_header(kind, largest)) == (kind, largest)
    with pytest.raises(ValueError, match="no frame"):
        framing.encode_header(kind, largest + 1)
    with pytest.raises(RemoteError):
        framing.decode_header(struct.pack(">BBI", framing.MAGIC, kind, largest + 1))


@pytest.mark.parametrize("header", [b"", b"\xa1\x01", struct.pack(">BBI", 0xA0, 1, 1), struct.pack(">BBI", 0xA1, 0, 0)])
def test_other_headers_are_refused(header):
    with pytest.raises(RemoteError):
        framing.decode_header(header)


@pytest.mark.parametrize("magic", [0xA0, 0xA1, framing.MAGIC + 1, 0xAF])
def test_of_other_versions_manifests_are_taken_and_nothing_else(magic):
    """Check the one exception: a peer that joins by a link learns from the run's manifest which p2ptrain it needs."""
    for kind in framing.FrameKind:
        header = struct.pack(">BBI", magic, kind, 7)
        if kind in (framing.FrameKind.MANIFEST_REQUEST, framing.FrameKind.MANIFEST):
            assert framing.decode_header(header) == (kind, 7)
        else:
            with pytest.raises(RemoteError):
                framing.decode_header(header)
    for stranger in (0x00, 0x9F, 0xB6, 0xFF):
        with pytest.raises(RemoteError):
            framing.decode_header(struct.pack(">BBI", stranger, framing.FrameKind.MANIFEST, 7))


def test_the_framing_is_frozen():
    """Check frozen bytes: changing them requires a new protocol version."""
    assert framing.encode_header(2, 262144).hex() == "ac0200040000"
    assert (
        framing.encode_part_end(framing.PartEnd(1, 2, b"\7" * 32)).hex() == "00000001" + "0000000000000002" + "07" * 32
    )
