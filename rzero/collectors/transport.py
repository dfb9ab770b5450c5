"""Messages of tensors between two ranks over torch.distributed: no pickled object ever crosses the network.

A message is a kind, a flat dictionary of tensors and a dictionary of strings, consolidated into one byte
tensor in the safetensors format, so that reading one cannot execute anything. It travels in a frame of fixed
size, for which the receiver waits already; only what does not fit into that has to wait for the receiver.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from rzero.collectors.engine import EngineLost


class ConnectionLost(EngineLost):
    """The rank at the other end is gone."""


_HEADER_BYTES = 8  # safetensors: a little-endian uint64, the length of the JSON header that follows
_SIZE_BYTES = 8  # of a frame: an int64, the length of the message
FRAME_BYTES = 1 << 16


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        kind: What it is about.
        tensors: CPU tensors by name.
        text: Strings by name.
    """

    kind: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    text: Mapping[str, str] = field(default_factory=dict)


def encode(message: Message) -> Tensor:
    """The message as a uint8 tensor.

    Example:
        >>> sent = Message("greeting", {"x": torch.arange(3)}, {"to": "world"})
        >>> got = decode(encode(sent))
        >>> got.kind, got.tensors["x"].tolist(), got.text["to"]
        ('greeting', [0, 1, 2], 'world')
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in message.tensors.items()}
    data = safetensors.torch.save(tensors, metadata={"kind": message.kind, **message.text})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode(data: Tensor) -> Message:
    """The message in a uint8 tensor.

    Raises:
        ValueError: If the bytes are not a message.
    """
    raw = data.numpy().tobytes()
    try:
        length = int.from_bytes(raw[:_HEADER_BYTES], "little")
        text = json.loads(raw[_HEADER_BYTES : _HEADER_BYTES + length])["__metadata__"]
        tensors = safetensors.torch.load(raw)
        kind = text.pop("kind")
    except Exception as error:
        raise ValueError(
            f"decode: data must be a message of this module, got {len(raw)} other bytes"
        ) from error
    return Message(kind, tensors, text)


class Channel:
    """One direction of messages between two ranks, over a process group of its own.

    Only one thread may send and only one may receive. A receiver learns at once that its peer has died,
    because the connection closes.

    Args:
        peer: Global rank at the other end.
        group: A gloo group that holds both ranks and nothing else talks over.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup) -> None:
        self.peer = peer
        self._group = group

    def send(self, message: Message) -> None:
        """Send and return when the bytes are on their way.

        Raises:
            ConnectionLost: If the peer is gone.
        """
        data = encode(message)
        frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        head, rest = data[: FRAME_BYTES - _SIZE_BYTES], data[FRAME_BYTES - _SIZE_BYTES :]
        frame[:_SIZE_BYTES] = torch.tensor([len(data)]).view(torch.uint8)
        frame[_SIZE_BYTES : _SIZE_BYTES + len(head)] = head
        with self._connected():
            dist.send(frame, self.peer, group=self._group)
            if len(rest):
                dist.send(rest, self.peer, group=self._group)

    def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            ConnectionLost: If the peer is gone.
        """
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        with self._connected():
            dist.recv(frame, self.peer, group=self._group)
            size = int(frame[:_SIZE_BYTES].view(torch.int64))
            data = frame[_SIZE_BYTES : _SIZE_BYTES + size]
            if len(data) < size:
                rest = torch.empty(size - len(data), dtype=torch.uint8)
                dist.recv(rest, self.peer, group=self._group)
                data = torch.cat([data, rest])
        return decode(data)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ConnectionLost(f"the connection to rank {self.peer} was lost: {error}") from error


def _new_group(ranks: list[int]) -> dist.ProcessGroup:
    # A channel may be idle for as long as a warm-up lasts; that a peer died is noticed without a timeout.
    group = dist.new_group(ranks, backend="gloo", timeout=timedelta(days=7))
    return cast(dist.ProcessGroup, group)


def open_channels(learner: int, samplers: list[int]) -> dict[int, tuple[Channel, Channel]]:
    """Connect the learner with each sampler, one channel each way; every rank must call this.

    Args:
        learner: The rank that learns.
        samplers: The ranks that sample.

    Returns:
        On the learner: by sampler rank, (to it, from it). On a sampler: by the learner's rank, (to it, from
        it). On any other rank: nothing.
    """
    channels: dict[int, tuple[Channel, Channel]] = {}
    rank = dist.get_rank()
    for sampler in samplers:
        pair = [learner, sampler]
        commands, results = (_new_group(pair) for _ in range(2))
        if rank == learner:
            channels[sampler] = (Channel(sampler, commands), Channel(sampler, results))
        elif rank == sampler:
            channels[learner] = (Channel(learner, results), Channel(learner, commands))
    return channels
