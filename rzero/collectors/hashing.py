"""Integer hashing in torch: the same bits on any device, in any order, with any number of threads."""

from __future__ import annotations

from collections.abc import Sequence

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
    mixed = _splitmix64_of_int(_splitmix64_of_int(seed) ^ stream)
    return mixed - (1 << 64) if mixed >> 63 else mixed


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

    Each element's bit pattern is hashed together with its index and the hashes are added modulo 2^64: integer
    addition is exact, so the digest is the same on every device and for every number of threads.

    Args:
        tensor: Any shape; elements of 1, 2, 4 or 8 bytes.

    Example:
        >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
        >>> tensor_digest(a) == tensor_digest(a.clone()), tensor_digest(a) == tensor_digest(b)
        (True, False)
    """
    return tensor_digests([tensor])[0]


def tensor_digests(tensors: Sequence[Tensor]) -> list[int]:
    """``tensor_digest`` of each of many tensors, small ones in a few calls together.

    Args:
        tensors: As for ``tensor_digest``, all on one device.
    """
    digests: list[int] = []
    batch: list[Tensor] = []
    for tensor in tensors:
        if batch and sum(map(len, batch)) + tensor.numel() > _DIGESTED_TOGETHER:
            digests += _digests(batch)
            batch = []
        flat = tensor.detach().contiguous().view(-1)
        batch.append(flat.view(_INTEGERS[flat.element_size()]).to(torch.int64))
    return digests + (_digests(batch) if batch else [])


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DIGESTED_TOGETHER = 1 << 20  # elements


def _digests(words: Sequence[Tensor]) -> list[int]:
    joined = words[0] if len(words) == 1 else torch.cat(list(words))
    index = torch.cat([torch.arange(len(part), device=part.device) for part in words])
    hashed = splitmix64(joined ^ splitmix64(index)).split([len(part) for part in words])
    return torch.stack([part.sum() for part in hashed]).tolist()
