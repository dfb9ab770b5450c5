"""What is encoded is decoded: dtypes, shapes, bytes and the note."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rzero.buffers.codec import decode, encode
from rzero.buffers.row_table import ROW_DTYPE

arrays = hnp.arrays(
    st.sampled_from([np.int8, np.int32, np.int64, np.float32, np.uint8, np.bool_]),
    hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=5),
)
notes = st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(), st.none()), max_size=3)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=6), arrays, max_size=4), notes)
def test_decode_undoes_encode(content, note):
    found, again = decode(b"".join(encode(content, note)))
    assert again == note
    assert found.keys() == content.keys()
    for name, array in content.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def test_rows_keep_their_fields():
    rows = np.zeros(3, ROW_DTYPE)
    rows["uid"], rows["digest"] = [1, 2, 3], 7
    found, _ = decode(b"".join(encode({"rows": rows}, {})))
    assert found["rows"].dtype == ROW_DTYPE
    assert found["rows"].tobytes() == rows.tobytes()


def test_pieces_are_joined():
    pieces = [np.arange(3), np.arange(0), np.arange(5)]
    found, _ = decode(b"".join(encode({"a": pieces, "b": np.ones(1, np.int8)}, {})))
    assert found["a"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert found["b"].tolist() == [1]


@pytest.mark.parametrize(
    "garbage", [b"", b"\x01", b"\xff" * 40, b"\x02\x00\x00\x00{}", b"\x04\x00\x00\x00null"]
)
def test_garbage_is_refused(garbage):
    with pytest.raises(ValueError, match="decode: buffer must be a message of encode"):
        decode(garbage)


def test_a_message_that_was_cut_is_refused():
    message = b"".join(encode({"a": np.arange(100)}, {}))
    with pytest.raises(ValueError):
        decode(message[:-50])
