import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rzero.collectors.transport import Message, decode, encode


@given(
    st.dictionaries(st.text("abcxyz_.", min_size=1), st.lists(st.integers(-(2**63), 2**63 - 1)), max_size=4),
    st.dictionaries(st.text("abcxyz", min_size=1), st.text(), max_size=4),
)
def test_a_message_survives_the_wire(lists, text):
    tensors = {name: torch.tensor(values, dtype=torch.int64) for name, values in lists.items()}
    got = decode(encode(Message("kind", tensors, text)))
    assert got.kind == "kind"
    assert got.text == text
    assert got.tensors.keys() == tensors.keys()
    assert all(torch.equal(got.tensors[name], tensor) for name, tensor in tensors.items())


def test_bits_survive_the_wire():
    nan = torch.tensor([0x7FC00001, -0x00400000], dtype=torch.int32).view(
        torch.float32
    )  # two NaNs with payloads
    tensors = {
        "nan": nan,
        "half": torch.tensor([1.5]).bfloat16(),
        "empty": torch.empty(0),
        "t": torch.eye(3)[:, 1],
    }
    got = decode(encode(Message("kind", tensors))).tensors
    assert torch.equal(got["nan"].view(torch.int32), nan.view(torch.int32))
    assert got["half"].dtype == torch.bfloat16
    assert got["empty"].shape == (0,)
    assert got["t"].tolist() == [0, 1, 0]


def test_other_bytes_are_refused():
    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("something was executed",))

    for raw in (b"", b"\0" * 40, pickle.dumps(Evil())):
        data = (
            torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        )
        with pytest.raises(
            ValueError, match=f"decode: data must be a message of this module, got {len(raw)} other"
        ):
            decode(data)
