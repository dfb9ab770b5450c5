"""rms_norm: bits of a row whatever surrounds it, accuracy, rounding points, gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rzero.kernels.exact import norm
from rzero.kernels.exact.norm import rms_norm
from tests.kernels.bits import differing, wide_rows

DTYPES = [torch.float32, torch.bfloat16]


@given(st.integers(0, 10**6), st.integers(1, 257), st.integers(1, 200), st.sampled_from(DTYPES))
@settings(max_examples=40, deadline=None)
def test_a_row_has_the_same_bits_in_any_batch_and_order(seed, rows, columns, dtype):
    generator = torch.Generator().manual_seed(seed)
    x, weight = wide_rows(rows, columns, seed).to(dtype), torch.randn(columns, generator=generator).to(dtype)
    whole = rms_norm(x, weight, eps=1e-6)
    order, across = torch.randperm(rows, generator=generator), torch.randperm(columns, generator=generator)
    assert differing(rms_norm(x[order], weight, eps=1e-6), whole[order]) == 0
    assert differing(rms_norm(x[-1:], weight, eps=1e-6), whole[-1:]) == 0
    permuted = rms_norm(x[:, across].contiguous(), weight[across].contiguous(), eps=1e-6)
    assert differing(permuted, whole[:, across]) == 0


def test_the_blocks_and_other_rows_do_not_show(monkeypatch):
    x, weight = wide_rows(100, 30, 1), torch.ones(30)
    whole = rms_norm(x, weight, eps=1e-5)
    monkeypatch.setattr(norm, "CHUNK", 100)
    assert differing(rms_norm(x, weight, eps=1e-5), whole) == 0
    x[::2] = math.nan
    assert differing(rms_norm(x, weight, eps=1e-5)[1::2], whole[1::2]) == 0


def test_values_and_rounding_points():
    # Mean square of (3, 4) is 12.5; eps = 12.5 makes the root 5: exactly 3/5 and 4/5 times the weight.
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([10.0, 0.5])
    assert rms_norm(x, weight, eps=12.5).tolist() == [[6.0, 0.5 * float(torch.tensor(0.8))]]
    # In bfloat16 the normed value is rounded before the weight: 0.8 -> 0.80078125, times 1.5 -> 1.203125.
    low = rms_norm(x.bfloat16(), torch.tensor([1.5, 1.5], dtype=torch.bfloat16), eps=12.5)
    assert low[0, 1].item() == 1.203125


def test_accuracy():
    x, weight = torch.randn(500, 300), torch.randn(300)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    assert float(((rms_norm(x, weight, eps=1e-6) - exact) / exact).abs().max()) < 2.0**-22


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_match_a_float64_reference(dtype):
    x, weight = torch.randn(4, 5, 24).to(dtype).requires_grad_(), torch.randn(24).to(dtype).requires_grad_()
    grad = torch.randn(4, 5, 24).to(dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    reference = wide[0] * (wide[0].square().mean(-1, keepdim=True) + 1e-6).rsqrt() * wide[1]
    expected = torch.autograd.grad(reference, wide, grad.double())
    ours = torch.autograd.grad(rms_norm(x, weight, eps=1e-6), (x, weight), grad)
    for got, want in zip(ours, expected, strict=True):
        assert got.dtype == dtype
        assert float((got.double() - want).norm() / want.norm()) < (1e-6 if dtype == torch.float32 else 2e-2)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"rms_norm: weight must have shape \[3\] to match x, got \[4\]"):
        rms_norm(torch.zeros(2, 3), torch.zeros(4), eps=0.0)
    with pytest.raises(TypeError, match=r"rms_norm: x must have dtype .*, got torch.float64"):
        rms_norm(torch.zeros(2, 3).double(), torch.zeros(3), eps=0.0)
