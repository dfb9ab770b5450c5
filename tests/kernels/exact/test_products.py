"""linear and matmul: bits of a row whatever surrounds it, accuracy, gradients, refusals."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rzero.kernels.exact import products
from rzero.kernels.exact.products import linear, linear_joined, matmul
from tests.kernels.bits import differing, wide_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
seeds = st.integers(0, 10**6)


def problem(seed, rows, columns, outputs, dtype=torch.float32):
    weight = wide_rows(outputs, columns, seed + 1).clamp(-1e4, 1e4).to(dtype)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return wide_rows(rows, columns, seed).clamp(-1e4, 1e4).to(dtype), weight, bias


@given(seeds, st.integers(1, 257), st.integers(1, 150), st.integers(1, 40), st.sampled_from(DTYPES))
@settings(max_examples=40, deadline=None)
def test_a_row_has_the_same_bits_in_any_batch(seed, rows, columns, outputs, dtype):
    x, weight, bias = problem(seed, rows, columns, outputs, dtype)
    generator = torch.Generator().manual_seed(seed)
    whole = linear(x, weight, bias)
    order = torch.randperm(rows, generator=generator)
    assert differing(linear(x[order], weight, bias), whole[order]) == 0
    cut = int(torch.randint(0, rows, (1,), generator=generator))
    assert differing(linear(x[cut : cut + 1], weight, bias), whole[cut : cut + 1]) == 0
    assert differing(torch.cat([linear(x[:cut], weight, bias), linear(x[cut:], weight, bias)]), whole) == 0


@given(seeds, st.integers(1, 300))
@settings(max_examples=30, deadline=None)
def test_the_order_of_the_terms_does_not_matter(seed, columns):
    x, weight, _ = problem(seed, 9, columns, 7)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
    assert differing(linear(x[:, order], weight[:, order].contiguous()), linear(x, weight)) == 0
    assert differing(matmul(x[:, order], weight.t()[order]), linear(x, weight)) == 0


@given(seeds, st.sampled_from([math.inf, -math.inf, math.nan, 3e38, -3e38, 2.0**-149]))
@settings(max_examples=20, deadline=None)
def test_other_rows_may_hold_anything(seed, value):
    x, weight, bias = problem(seed, 12, 33, 9)
    clean = linear(x, weight, bias)
    poisoned = x.clone()
    poisoned[::3] = value
    kept = [i for i in range(12) if i % 3]
    assert differing(linear(poisoned, weight, bias)[kept], clean[kept]) == 0


@pytest.mark.parametrize("offset", range(0, 16, 3))
def test_the_alignment_of_memory_does_not_matter(offset):
    x, weight, bias = problem(0, 5, 61, 19)
    storage = torch.zeros(offset + weight.numel())
    moved = storage[offset:].view_as(weight).copy_(weight)
    source = torch.zeros(offset + x.numel())[offset:].view_as(x).copy_(x)
    assert differing(linear(source, moved, bias), linear(x, weight, bias)) == 0


def test_one_and_two_threads_agree():
    x, weight, bias = problem(1, 300, 200, 170)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(linear(x, weight, bias))
    finally:
        torch.set_num_threads(threads)
    assert differing(*results) == 0


@pytest.mark.parametrize(("rows", "product"), [(1, 512), (200, 64), (513, 4096), (300, 1)])
def test_the_blocks_do_not_show(monkeypatch, rows, product):
    x, weight, bias = problem(2, rows, 40, 300)
    whole = linear(x, weight, bias)
    for name, value in (("ROWS", 32), ("CHUNK", 1 << 10), ("PRODUCT", product)):
        monkeypatch.setattr(products, name, value)
    assert differing(linear(x, weight, bias), whole) == 0
    first, second = linear_joined(x, (weight, weight[:7].contiguous()), (bias, None)).split([300, 7], 1)
    assert differing(first, whole) == 0
    assert differing(second, linear(x, weight[:7].contiguous())) == 0


def test_the_sign_of_zero_does_not_depend_on_the_product(monkeypatch):
    """A zero row against negative weights: all products are -0, which one kernel adds to +0, another not."""
    weight = -torch.ones(3, 4)
    for name in ("mm", "matmul"):
        product = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, product=product, **kw: product(*args, **kw).mul_(-1))
    for rows in (1, 2, 5, 64):
        assert differing(linear(torch.zeros(rows, 4), weight), torch.zeros(rows, 3)) == 0
        assert differing(matmul(torch.zeros(rows, 1), torch.ones(1, 3)), torch.zeros(rows, 3)) == 0


@pytest.mark.parametrize("columns", [64, 576, 4096])
def test_float32_accuracy_also_with_outliers(columns):
    generator = torch.Generator().manual_seed(columns)
    x, weight = torch.randn(200, columns, generator=generator), torch.randn(50, columns, generator=generator)
    x[::2, 3] = 60.0
    exact = x.double() @ weight.double().t()
    scale = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    error = ((linear(x, weight).double() - exact) / scale).abs()
    # Each term is off by at most 2**-27 of the norm on either side, and the result is rounded once.
    assert float(error.square().mean().sqrt()) < 2.0**-25
    assert float(error.max()) < 2.0**-22


def test_rounding_points():
    """Integers below 2**24 multiply exactly, so each rounding shows: to float32, the bias, to the dtype."""
    x = torch.tensor([[4097.0, 1.0]])
    assert linear(x, torch.tensor([[4097.0, 0.0]])).item() == float(
        torch.tensor(4097.0**2, dtype=torch.float64).float()
    )
    low = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    weight, bias = torch.ones(1, 2, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    # 257 rounds to 256 in bfloat16 (8 bits); with the bias added before the rounding, 258 is kept.
    assert linear(low, weight).item() == 256.0 and linear(low, weight, bias).item() == 258.0


def test_torch_itself_would_fail_these_tests():
    """The negative control: this very comparison with torch's own product."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 512, generator=generator), torch.randn(64, 512, generator=generator)
    order = torch.randperm(512, generator=generator)
    native = torch.nn.functional.linear(x, weight)
    assert differing(torch.nn.functional.linear(x[:, order], weight[:, order].contiguous()), native) > 1000
    assert differing(linear(x[:, order], weight[:, order].contiguous()), linear(x, weight)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_match_a_float64_reference(dtype):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(3, 5, 20, generator=generator).to(dtype).requires_grad_()
    weights = [torch.randn(n, 20, generator=generator).to(dtype).requires_grad_() for n in (7, 4)]
    bias = torch.randn(7, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(3, 5, 11, generator=generator).to(dtype)
    ours = torch.autograd.grad(linear_joined(x, tuple(weights), (bias, None)), (x, *weights, bias), grad)
    wide = [t.detach().double().requires_grad_() for t in (x, *weights, bias)]
    reference = torch.cat([wide[0] @ wide[1].t() + wide[3], wide[0] @ wide[2].t()], -1)
    expected = torch.autograd.grad(reference, wide, grad.double())
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for got, want in zip(ours, expected, strict=True):
        assert got.dtype == dtype
        assert float((got.double() - want).norm() / want.norm()) < tolerance


def test_matmul_gradients_match_a_float64_reference():
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(2, 3, 4, 6, generator=generator, requires_grad=True)
    b = torch.randn(3, 6, 5, generator=generator, requires_grad=True)
    grad = torch.randn(2, 3, 4, 5, generator=generator)
    wide = [t.detach().double().requires_grad_() for t in (a, b)]
    expected = torch.autograd.grad(wide[0] @ wide[1], wide, grad.double())
    for got, want in zip(torch.autograd.grad(matmul(a, b), (a, b), grad), expected, strict=True):
        assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-6)
    assert torch.allclose(matmul(a, b), a @ b, atol=1e-5)


def test_gradients_are_the_same_from_run_to_run():
    x, weight, bias = (t.requires_grad_() for t in problem(6, 100, 60, 50))
    runs = [torch.autograd.grad(linear(x, weight, bias).sin().sum(), (x, weight, bias)) for _ in range(3)]
    assert all(differing(a, b) == 0 for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_only_needed_gradients_are_made():
    x, weight, bias = problem(7, 4, 6, 5)
    linear(x, weight.requires_grad_(), bias).sum().backward()
    assert weight.grad is not None and x.grad is None and bias.grad is None


def test_wrong_arguments_are_refused():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"linear: weight must have shape \[N, 3\] to match x, got \[4, 2\]"):
        linear(x, torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"linear: bias must have shape \[4\], got \[3\]"):
        linear(x, torch.zeros(4, 3), torch.zeros(3))
    with pytest.raises(
        TypeError, match=r"linear: all tensors must have dtype torch.float32, got torch.bfloat16"
    ):
        linear(x, torch.zeros(4, 3, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"linear: input must have dtype .*, got torch.float64"):
        linear(x.double(), torch.zeros(4, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"matmul: a and b must have shapes .*, got \[2, 3\] and \[4, 2\]"):
        matmul(x, torch.zeros(4, 2))


def test_empty_batches_pass():
    assert linear(torch.zeros(0, 3), torch.zeros(4, 3)).shape == (0, 4)
