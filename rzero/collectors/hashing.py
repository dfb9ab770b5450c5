"""Integer hashing in torch: the same bits on any device, in any order, with any number of threads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # int64 patterns of splitmix64's constants
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # >> on int64 copies the sign bit; a logical shift does not


def splitmix64(x: Tensor) -> Tensor:
    """The output function of splitmix64, elementwise on int64 (arithmetic wraps modulo 2^64).

    Reference: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    Example:
        The first output of the generator seeded with 0 is 0xE220A8397B1DCDAF.

        >>> splitmix64(torch.tensor([0]))
        tensor([-2152535657050944081])
    """
    x = x + _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def stream_seed(seed: int, stream: int) -> int:
    """A seed of its own for one of many streams of a run, the splitmix64 of both numbers.

    Example:
        >>> stream_seed(0, 1) == int(splitmix64(splitmix64(torch.tensor(0)) ^ 1))
        True
    """
    return _signed(_splitmix64_of_int(_splitmix64_of_int(seed) ^ stream))


def _splitmix64_of_int(x: int) -> int:
    mask = (1 << 64) - 1
    x = (x + _GOLDEN) & mask
    x = ((x ^ (x >> 30)) * _FIRST) & mask
    x = ((x ^ (x >> 27)) * _SECOND) & mask
    return x ^ (x >> 31)


def uniforms(seeds: Tensor, counters: Tensor) -> Tensor:
    """Counter-based uniform numbers in (0, 1), one for each (seed, counter) pair.

    A number depends on its own seed and counter alone, so a response's random numbers do not depend on which
    other responses are sampled beside it.

    Args:
        seeds: int64 [n].
        counters: int64 [n].

    Returns:
        float64 [n], multiples of 2^-49, never 0 or 1.
    """
    bits = _shift_right(splitmix64(splitmix64(seeds) ^ counters), 16)
    return (bits.double() + 0.5) / 2**48


def tensor_digest(tensor: Tensor) -> int:
    """A 64-bit checksum of a tensor's bytes, dtype aside, that no order of summation can change.

    See ``tensor_digests``.

    Args:
        tensor: Any shape; elements of 1, 2, 4 or 8 bytes.

    Example:
        >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
        >>> tensor_digest(a) == tensor_digest(a.clone()), tensor_digest(a) == tensor_digest(b)
        (True, False)
    """
    return tensor_digests([tensor])[0]


def tensor_digests(tensors: Sequence[Tensor]) -> list[int]:
    """``tensor_digest`` of each of many tensors, with one copy from the device for all.

    Element x at place i becomes y = (x xor a_i) * c, then (y xor (y >> 32)) * b_i, modulo 2^64, with
    pseudorandom a_i and odd b_i: each step can be undone, so a change of one element always shows. Integers
    add exactly in any order, so the sum is the same on every device and for every number of threads. Long
    tensors are summed in blocks, and the splitmix64 of each block's sum and number are summed in turn.

    Args:
        tensors: As for ``tensor_digest``, all on one device.
    """
    blocks = [_blocks(tensor) for tensor in tensors]
    sums = iter(_block_sums([block for part in blocks for block in part]))
    return [
        _signed(sum(_splitmix64_of_int(_splitmix64_of_int(k) ^ n % _MODULUS) for k, n in enumerate(part)))
        for part in ([next(sums) for _ in part] for part in blocks)
    ]


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 18  # elements
_MODULUS = 1 << 64


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(_INTEGERS[flat.element_size()]).split(_BLOCK) if len(flat) else ()


def _block_sums(blocks: Sequence[Tensor]) -> list[int]:
    if not blocks:
        return []
    keys = _keys(blocks[0].device)
    if blocks[0].device.type == "cpu":  # in NumPy: each call of torch would hand the interpreter's lock away
        before, after = (key.numpy() for key in keys)
        return [int(_block_sum(block.numpy(), before, after)) for block in blocks]
    return torch.stack([_block_sum(block, *keys) for block in blocks]).tolist()


def _block_sum(words: Any, before: Any, after: Any) -> Any:
    """The sum over one block, of tensors or of arrays."""
    mixed = words ^ before[: len(words)]
    mixed *= _FIRST
    halves = mixed.view(torch.int32 if isinstance(mixed, Tensor) else np.int32).reshape(-1, 2)
    halves[:, 0] ^= halves[:, 1]  # a logical shift to the right by 32, and the exclusive or with it
    mixed *= after[: len(words)]
    return mixed.sum()


@cache
def _keys(device: torch.device) -> tuple[Tensor, Tensor]:
    places = torch.arange(_BLOCK, device=device)
    return splitmix64(places), splitmix64(~places) | 1


def _signed(x: int) -> int:
    return (x + (1 << 63)) % _MODULUS - (1 << 63)
