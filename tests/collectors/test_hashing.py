import hypothesis.strategies as st
import torch
from hypothesis import given

from rzero.collectors import hashing
from rzero.collectors.hashing import splitmix64, tensor_digest, tensor_digests, uniforms

MASK = (1 << 64) - 1


def python_splitmix64(x: int) -> int:
    """The generator as its authors print it, in Python's unbounded integers."""
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@given(st.integers(0, MASK))
def test_splitmix64_in_unbounded_integers(x):
    signed = x - (1 << 64) if x >= 1 << 63 else x
    assert int(splitmix64(torch.tensor(signed))) & MASK == python_splitmix64(x)


def test_uniforms_are_uniform_and_independent_of_their_neighbours():
    seeds = torch.arange(50_000)
    u = uniforms(seeds, torch.zeros_like(seeds))
    # The mean of 50,000 uniforms has a standard error of 0.0013, their 20 bins of 2,500 one of 49.
    assert abs(u.mean() - 0.5) < 0.006
    assert ((u * 20).long().bincount() - 2500).abs().max() < 250
    assert torch.equal(uniforms(seeds[7:9], torch.zeros(2, dtype=torch.long)), u[7:9])
    next_u = uniforms(seeds, torch.ones_like(seeds))
    assert abs(torch.corrcoef(torch.stack([u, next_u]))[0, 1]) < 0.02


def test_uniforms_never_reach_the_ends():
    u = uniforms(torch.arange(100_000), torch.full((100_000,), 3))
    assert u.min() > 0
    assert u.max() < 1
    assert float((torch.tensor((1 << 48) - 1).double() + 0.5) / 2**48) < 1


def test_a_digest_sees_every_bit_and_every_place():
    tensor = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    digest = tensor_digest(tensor)
    for index in range(tensor.numel()):
        for bit in range(32):
            flipped = tensor.clone()
            flipped.view(torch.int32).view(-1)[index] ^= (1 << bit) if bit < 31 else -(1 << 31)
            assert tensor_digest(flipped) != digest
    assert tensor_digest(tensor[torch.randperm(7, generator=torch.Generator().manual_seed(1))]) != digest
    assert tensor_digest(tensor.t().contiguous().t()) == digest  # the memory's layout does not matter


def test_a_digest_takes_other_dtypes_and_empty_tensors():
    for dtype in (torch.bfloat16, torch.float64, torch.int8):
        values = torch.arange(6).to(dtype)
        assert tensor_digest(values) != tensor_digest(values + 1)
    assert tensor_digest(torch.empty(0)) == 0


def by_the_formula(words, *, block=1 << 18):
    """The digest as its docstring states it, in Python's integers."""
    mask = (1 << 64) - 1

    def mix(x):
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    total = 0
    for number in range(0, len(words), block):
        part = 0
        for place, word in enumerate(words[number : number + block]):
            y = ((word & mask) ^ mix(place)) * 0xBF58476D1CE4E5B9 & mask
            part += (y ^ (y >> 32)) * (mix(place ^ mask) | 1)
        total += mix(mix(number // block) ^ (part & mask))
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def test_a_digest_is_the_stated_sum():
    words = torch.randint(-(1 << 31), 1 << 31, (1000,), generator=torch.Generator().manual_seed(2))
    assert tensor_digest(words.to(torch.int32)) == by_the_formula(words.tolist())
    assert tensor_digests([words[:3], words[:0], words]) == [
        by_the_formula(words[:3].tolist()),
        0,
        by_the_formula(words.tolist()),
    ]


def test_tensors_and_arrays_are_summed_alike():
    words = torch.randint(-(1 << 31), 1 << 31, (999,), generator=torch.Generator().manual_seed(4)).int()
    keys = hashing._keys(words.device)
    assert int(hashing._block_sum(words, *keys)) == int(
        hashing._block_sum(words.numpy(), *(key.numpy() for key in keys))
    )


def test_a_digest_of_several_blocks_is_the_stated_sum():
    words = torch.arange((1 << 18) + 5)
    assert tensor_digest(words) == by_the_formula(words.tolist())
    swapped = torch.cat([words[1 << 18 :], words[: 1 << 18]])
    assert tensor_digest(swapped) != tensor_digest(words)


def test_changes_of_signs_do_not_cancel():
    values = torch.randn(500, generator=torch.Generator().manual_seed(3))
    digests = {tensor_digest(values)}
    for first in range(0, 500, 20):
        for second in range(first + 1, 500, 20):
            changed = values.clone()
            changed[[first, second]] *= -1
            digests.add(tensor_digest(changed))
    assert len(digests) == 1 + 325
