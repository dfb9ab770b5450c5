import pickle
from datetime import timedelta

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given

from rzero.collectors.transport import FRAME_BYTES, Message, decode, encode, open_channels

# Bytes of a payload whose messages end before, at and after the end of a frame, and far after it.
PAYLOADS = [*range(FRAME_BYTES - 160, FRAME_BYTES - 80), 0, 10 * FRAME_BYTES]


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


def message_of(size, number):
    x = torch.arange(size).add(number).to(torch.uint8)
    return Message("size", {"x": x}, {"number": str(number)})


def exchange(rank, store):
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    outgoing, incoming = open_channels(0, [1])[1 - rank]
    for number, size in enumerate(PAYLOADS):
        sent = message_of(size, number)
        if rank == 0:
            outgoing.send(sent)
        message = incoming.receive()
        assert (message.kind, message.text) == (sent.kind, sent.text)
        assert torch.equal(message.tensors["x"], sent.tensors["x"])
        if rank == 1:
            outgoing.send(message)


def test_messages_of_any_size_arrive_in_order(tmp_path):
    messages = [message_of(size, number) for number, size in enumerate(PAYLOADS)]
    full = FRAME_BYTES - 8  # what a frame holds beside the size
    assert {full - 1, full, full + 1} <= {len(encode(message)) for message in messages}
    mp.spawn(exchange, (str(tmp_path / "store"),), nprocs=2)
