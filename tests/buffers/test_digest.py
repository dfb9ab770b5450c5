"""The digest is a plain hash of plain bytes, and everything that evidence can suffer changes it."""

import struct

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rzero.buffers import provenance_digest

NAN = float("nan")


def columns(tokens=(5, 7, 9), log_probs=(NAN, -0.5, -1.25), versions=(-1, 3, 4)):
    return (
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(log_probs, dtype=torch.float32),
        torch.tensor(versions, dtype=torch.int32),
    )


def test_it_is_xxh3_of_the_little_endian_bytes():
    # Packed by the struct module, which shares no code with torch; NaN is the quiet NaN 0x7fc00000.
    raw = struct.pack("<3i", 5, 7, 9) + b"\x00\x00\xc0\x7f" + struct.pack("<2f", -0.5, -1.25)
    raw += struct.pack("<3i", -1, 3, 4)
    words = struct.unpack("<2q", xxhash.xxh3_128_digest(raw))
    digest = provenance_digest(*columns())
    assert digest.dtype == torch.int64
    assert tuple(digest.tolist()) == words
    # Stores and checkpoints outlive a release of the library; the second value is the specification's own.
    assert words == (-9088753075641533346, 6482847841210896185)
    assert xxhash.xxh3_128_hexdigest(b"") == "99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize(
    "changed",
    [
        columns(tokens=(5, 7, 8)),
        columns(log_probs=(NAN, -0.5, -1.2500001)),
        columns(versions=(-1, 3, 3)),
        columns(log_probs=(NAN, -1.25, -0.5)),  # shifted by one
        columns(log_probs=(0.0, -0.5, -1.25)),  # a missing log-prob "repaired" to probability 1
        columns(tokens=(5, 7, 9, 0), log_probs=(NAN, -0.5, -1.25, 0.0), versions=(-1, 3, 4, -1)),  # padded
        columns(tokens=(5, 16), log_probs=(NAN, -0.5), versions=(-1, 3)),  # re-tokenised
    ],
)
def test_every_fault_of_the_field_changes_it(changed):
    assert not torch.equal(provenance_digest(*changed), provenance_digest(*columns()))


@given(field=st.integers(0, 2), place=st.integers(0, 2), bit=st.integers(0, 31))
def test_every_single_bit_counts(field, place, bit):
    flipped = columns()
    words = flipped[field].view(torch.int32)
    words[place] ^= torch.tensor(1 << bit).to(torch.int32) if bit < 31 else torch.iinfo(torch.int32).min
    assert not torch.equal(provenance_digest(*flipped), provenance_digest(*columns()))


def test_memory_layout_does_not_count():
    strided = [torch.stack((column, column), dim=1)[:, 0] for column in columns()]
    assert not any(column.is_contiguous() for column in strided)
    assert torch.equal(provenance_digest(*strided), provenance_digest(*columns()))


def test_nothing_is_cast():
    tokens, log_probs, versions = columns()
    with pytest.raises(TypeError, match=r"token_ids must have dtype torch.int32, got torch.int64"):
        provenance_digest(tokens.long(), log_probs, versions)
    with pytest.raises(
        TypeError, match=r"behavior_log_probs must have dtype torch.float32, got torch.float64"
    ):
        provenance_digest(tokens, log_probs.double(), versions)
    with pytest.raises(TypeError, match=r"policy_version must have dtype"):
        provenance_digest(tokens, log_probs, versions.long())


def test_lengths_must_agree():
    tokens, log_probs, versions = columns()
    with pytest.raises(ValueError, match=r"behavior_log_probs must have shape .* got \(2,\) beside \(3,\)"):
        provenance_digest(tokens, log_probs[1:], versions)
    with pytest.raises(ValueError, match=r"token_ids must have shape"):
        provenance_digest(*(column[None] for column in columns()))
