"""A byte that changes in the store is found and named, and costs its own group alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rzero.buffers import PackedBatch, ProvenanceError, pack
from rzero.buffers.digest import PROVENANCE_FIELDS
from tests.buffers.responses import assert_balanced, fields, finish_preparing, group, make_buffer

CHUNK = 100
EXTRA = {"log_probs": torch.float32, "turn": torch.int16}
COLUMNS = {"token_ids": 4, "behavior_log_probs": 4, "policy_version": 4, "log_probs": 4, "turn": 2}


def with_extras(responses):
    records = [dict(response.items()) for response in responses]
    for record in records:
        size = len(record["token_ids"])
        record["extras"] = {"log_probs": torch.ones(size), "turn": torch.ones(size, dtype=torch.int16)}
    return records


@settings(max_examples=60, deadline=None)
@given(
    column=st.sampled_from(sorted(COLUMNS)),
    row=st.integers(0, 7),
    token=st.integers(0, 4),
    bit=st.integers(0, 15),
)
def test_every_flipped_bit_of_a_chunk_file_is_found_and_named(tmp_path_factory, column, row, token, bit):
    folder = tmp_path_factory.mktemp("store")
    buffer = make_buffer(path=folder, chunk_tokens=CHUNK, extra_fields=EXTRA)
    buffer.extend(with_extras(group(0) + group(1)))
    assert buffer.storage.verify() == []
    place = sum(size * CHUNK for name, size in COLUMNS.items() if sorted_before(name, column))
    path = folder / "chunk-00000000.bin"
    place += (row * 5 + token) * COLUMNS[column] + bit // 8
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit % 8]))
    (fault,) = buffer.storage.verify()
    assert (fault.uid, fault.group_id, fault.chunk, fault.file) == (row, row // 4, 0, path)
    assert (fault.start, fault.stop) == (row * 5, row * 5 + 5)
    assert column in fault.fields
    assert fault.fields == (tuple(PROVENANCE_FIELDS) if column in PROVENANCE_FIELDS else tuple(EXTRA))
    assert buffer.storage.verify([row]) == [fault]
    assert buffer.storage.verify([(row + 1) % 8]) == []
    buffer.shutdown()


def sorted_before(name, column):
    """Whether a column lies before another in a chunk file."""
    order = list(COLUMNS)
    return order.index(name) < order.index(column)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_changed_byte_stops_the_sample_and_costs_its_group_alone(tmp_path, prefetch):
    buffer = make_buffer(path=tmp_path, chunk_tokens=CHUNK)
    buffer.extend(group(0) + group(1))
    buffer.extend(group(2) + group(3))
    buffer.shutdown()
    path = tmp_path / "chunk-00000000.bin"
    content = bytearray(path.read_bytes())
    content[4 * CHUNK + 4 * (5 * 5 + 3)] ^= 4  # the behaviour log-prob of token 3 of uid 5, in group 1
    path.write_bytes(content)

    buffer = make_buffer(path=tmp_path, chunk_tokens=CHUNK, prefetch=prefetch)
    finish_preparing(buffer)
    buffer.state_dict()  # also while a batch that was prepared has failed and waits to say so
    with pytest.raises(ProvenanceError, match=r"got another at uids \[5\], which were evicted") as error:
        buffer.sample(timeout=0)
    assert str(path) in str(error.value)
    (eviction,) = buffer.take_evicted()
    assert (eviction.group_id, eviction.reason) == (1, "corrupt")
    sampled = buffer.sample(timeout=0).group_id.tolist() + buffer.sample(4, timeout=0).group_id.tolist()
    assert sorted(sampled) == [0] * 4 + [2] * 4 + [3] * 4
    assert assert_balanced(buffer)["evicted/corrupt"] == 4
    buffer.shutdown()


def test_memory_is_checked_like_files():
    buffer = make_buffer()
    buffer.extend(group(0) + group(1))
    column = buffer.storage.store.content.log.columns(0)["policy_version"]
    column[5 * 2 + 3] += 1
    (fault,) = buffer.storage.verify()
    assert (fault.uid, fault.file) == (2, None)
    with pytest.raises(ProvenanceError, match=r"uids \[2\]"):
        buffer.sample(timeout=0)


def test_digests_need_not_be_checked_at_sampling():
    buffer = make_buffer(check_digests=False)
    buffer.extend(group(0) + group(1))
    buffer.storage.store.content.log.columns(0)["token_ids"][3] += 1
    assert buffer.sample(timeout=0).num_responses == 8


def test_a_digest_must_be_taken_where_the_tokens_were_drawn():
    # The faults that a digest at the source catches, and one that is recomputed later would bless.
    shifted = fields(0)
    shifted["behavior_log_probs"][2:] = shifted["behavior_log_probs"][2:].roll(1)
    buffer = make_buffer()
    with pytest.raises(ValueError, match="digest must be the provenance_digest"):
        buffer.extend([shifted])
    recomputed = dict(pack(group(0)).items())
    recomputed["behavior_log_probs"] = recomputed["behavior_log_probs"] * 1.0001
    with pytest.raises(ValueError, match="digest must be the provenance_digest"):
        buffer.extend(PackedBatch(**recomputed))
