"""rope and its table: values, independence of length and place, gradients."""

import math

import pytest
import torch

from rzero.kernels.exact.rotary import rope, rope_table
from tests.kernels.bits import differing

FREQUENCIES = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)


def test_the_table_does_not_depend_on_its_length():
    long = rope_table(FREQUENCIES, length=3000)
    for length in (1, 2, 17, 1023):
        for table, whole in zip(rope_table(FREQUENCIES, length=length), long, strict=True):
            assert differing(table, whole[:length]) == 0


def test_the_table_is_accurate():
    cosines, sines = rope_table(FREQUENCIES, length=2000, scaling=1.25)
    angles = (
        torch.arange(2000.0)[:, None] * FREQUENCIES
    ).double()  # float32 angles, as every model rounds them
    for table, exact in (
        (cosines[:, :8], angles.cos()),
        (sines[:, 8:], angles.sin()),
        (sines[:, :8], -angles.sin()),
    ):
        assert float((table - 1.25 * exact).abs().max()) < 1.3 * 2.0**-24


def test_a_turn_by_known_angles():
    cosines, sines = rope_table(torch.tensor([math.pi / 2, 0.0]), length=2)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    # The first pair (1, 3) turns by pi/2 to (-3, 1); the second (2, 4) stays.
    assert torch.allclose(rope(x, cosines[1], sines[1]), torch.tensor([-3.0, 2.0, 1.0, 4.0]), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_place(dtype):
    cosines, sines = rope_table(FREQUENCIES, length=50)
    x = torch.randn(3, 50, 5, 16).to(dtype)
    whole = rope(x, cosines[:, None], sines[:, None])
    for t in (0, 7, 49):
        assert differing(rope(x[:, t], cosines[t], sines[t]), whole[:, t]) == 0
    strided = x.transpose(1, 2)
    assert differing(rope(strided, cosines, sines).transpose(1, 2), whole) == 0


def test_gradients_are_the_turn_back():
    cosines, sines = rope_table(FREQUENCIES, length=6)
    x = torch.randn(6, 16, requires_grad=True)
    grad = torch.randn(6, 16)
    (got,) = torch.autograd.grad(rope(x, cosines, sines), x, grad)
    wide, tables = x.detach().double().requires_grad_(), [t.double() for t in (cosines, sines)]
    (want,) = torch.autograd.grad(wide * tables[0] + wide.roll(8, -1) * tables[1], wide, grad.double())
    assert torch.allclose(got.double(), want, atol=1e-6)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"rope: cosines and sines must have an even last dimension of 3"):
        rope(torch.zeros(2, 3), torch.zeros(3), torch.zeros(3))
