"""linear and matmul: values, gradients, bits of a row whatever surrounds it and however it is launched."""

import pytest
import torch

from rzero.kernels import exact
from rzero.kernels import triton as ours
from rzero.kernels.triton import linear_ops
from rzero.kernels.triton.launch import Launch
from rzero.kernels.triton.products import launch_column_sum, launch_product
from tests.kernels.bits import differing, wide_rows
from tests.kernels.triton.compare import DTYPES, assert_close, inside_nan, random


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 1, 1), (19, 40, 65), (70, 17, 128)])
def test_values_and_gradients_of_linear(dtype, rows, columns, depth):
    inputs = (
        random(rows, depth, seed=1, dtype=dtype),
        random(columns, depth, seed=2, dtype=dtype) / depth**0.5,
        random(columns, seed=3, dtype=dtype),
    )
    assert_close(ours.linear, exact.linear, torch.nn.functional.linear, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_of_matmul(dtype):
    a, b = random(2, 1, 9, 21, seed=4, dtype=dtype), random(2, 21, 18, seed=5, dtype=dtype) / 5
    assert_close(ours.matmul, exact.matmul, torch.matmul, (a, b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(monkeypatch, dtype):
    monkeypatch.setattr(linear_ops, "segments", lambda *shape: 2)
    x, weight = (wide_rows(n, 256, n).clamp(-1e3, 1e3).to(dtype) for n in (70, 20))
    bias = random(20, seed=0, dtype=dtype)
    whole = ours.linear(x, weight, bias)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    assert differing(ours.linear(x[order], weight, bias), whole[order]) == 0
    for rows in (slice(33, 34), slice(7, 24), slice(64, 70)):
        assert differing(ours.linear(x[rows], weight, bias), whole[rows]) == 0


@pytest.mark.parametrize("count", [1, 2, 4])
def test_launch_parameters_change_no_bit(count):
    x, weight = (wide_rows(n, 256, n).clamp(-1e3, 1e3) for n in (40, 40))
    bias = random(40, seed=6)
    results = []
    tiles = [(16, 64, False), (64, 16, False), (32, 32, True), (64, 64, False), (16, 32, True)]
    for number, (block_m, block_n, split) in enumerate(tiles):
        launch = Launch(block_m=block_m, block_n=block_n, warps=1 << number % 4, stages=1 + number)
        out = torch.empty(1, 40, 40)
        launch_product(x[None], weight.mT[None], bias, out, segments=count, launch=launch, split=split)
        results.append(out)
    assert not any(differing(out, results[0]) for out in results)


def test_another_number_of_segments_is_another_sum():
    """The control of the two tests above: choosing segments by the number of rows would show."""
    x, weight = random(30, 256, seed=7), random(40, 256, seed=8)
    outs = [torch.empty(1, 30, 40) for _ in range(3)]
    for out, count in zip(outs, (1, 2, 4), strict=True):
        launch_product(x[None], weight.mT[None], None, out, segments=count)
    assert differing(outs[0], outs[1]) > 100 and differing(outs[1], outs[2]) > 100


def test_segments_chosen_by_rows_are_caught(monkeypatch):
    x, weight = random(40, 256, seed=9), random(20, 256, seed=10)

    def by_rows(a, b, bias, out, *, segments):
        launch_product(a, b, bias, out, segments=4 if a.shape[1] <= 16 else 1)

    monkeypatch.setattr(linear_ops, "launch_product", by_rows)
    assert differing(ours.linear(x, weight)[:16], ours.linear(x[:16], weight)) > 50


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_other_rows_may_hold_anything(value):
    x, weight = random(20, 130, seed=11), random(12, 130, seed=12)
    clean = ours.linear(x, weight)
    poisoned = x.clone()
    poisoned[::3] = value
    kept = [i for i in range(20) if i % 3]
    assert differing(ours.linear(poisoned, weight)[kept], clean[kept]) == 0


def test_nothing_is_written_outside_the_result():
    x, weight = random(1, 21, 70, seed=13), random(1, 70, 37, seed=14)
    for split in (False, True):
        guarded = torch.full((23, 40), 7.0)
        launch_product(
            inside_nan(x), inside_nan(weight), None, guarded[None, 1:22, 1:38], segments=2, split=split
        )
        assert torch.allclose(guarded[1:22, 1:38], x[0] @ weight[0], atol=1e-4)
        guarded[1:22, 1:38] = 7.0
        assert bool((guarded == 7.0).all())


def test_the_gradient_of_a_row_keeps_the_contract():
    x, weight = random(40, 96, seed=15), random(24, 96, seed=16)
    grad = random(40, 24, seed=17)

    def gradient(rows):
        leaf = x[rows].clone().requires_grad_()
        ours.linear(leaf, weight).backward(grad[rows])
        return leaf.grad

    assert differing(gradient(slice(5, 9)), gradient(slice(0, 40))[5:9]) == 0


def test_bits_may_depend_on_neighbours_only_in_gradients_of_weights_which_repeat():
    x, weight = random(40, 96, seed=18), random(24, 96, seed=19).requires_grad_()
    grads = [torch.autograd.grad(ours.linear(x, weight).sum(), weight)[0] for _ in range(2)]
    assert differing(*grads) == 0 and grads[0].stride() == weight.stride()


def test_sums_over_rows_in_more_than_one_segment(monkeypatch):
    monkeypatch.setattr("rzero.kernels.triton.products.ROW_SEGMENT", 64)
    x, y, scale = random(150, 70, seed=20), random(150, 70, seed=21), random(150, seed=22)
    out = torch.empty(70)
    launch_column_sum(x, out)
    assert torch.allclose(out.double(), x.double().sum(0), atol=1e-5)
    launch_column_sum(x, out, weight=(y, scale))
    assert torch.allclose(out.double(), (x.double() * y * scale[:, None]).sum(0), atol=1e-4)


def test_joined_linears_have_the_bits_they_have_alone():
    x, first, second = random(5, 40, seed=23), random(7, 40, seed=24), random(9, 40, seed=25)
    bias = random(9, seed=26)
    joined = ours.linear_joined(x, (first, second), (None, bias))
    assert differing(joined[:, :7], ours.linear(x, first)) == 0
    assert differing(joined[:, 7:], ours.linear(x, second, bias)) == 0


def test_rounding_points():
    """Integers below 2**24 multiply exactly: 256 + 1 keeps its one until the bias has come."""
    x = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    weight, bias = torch.ones(1, 2, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    assert ours.linear(x, weight, bias).item() == 258.0 and ours.linear(x, weight).item() == 256.0


def test_refusals():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"weight must have shape \[N, 3\] to match x, got \[5, 4\]"):
        ours.linear(x, torch.zeros(5, 4))
    with pytest.raises(ValueError, match=r"bias must have shape \[5\], got \[4\]"):
        ours.linear(x, torch.zeros(5, 3), torch.zeros(4))
    with pytest.raises(TypeError, match=r"all tensors must have dtype torch.float32, got torch.bfloat16"):
        ours.linear(x, torch.zeros(5, 3, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"float32, bfloat16 or float16, got torch.float64"):
        ours.linear(x.double(), torch.zeros(5, 3).double())
    with pytest.raises(ValueError, match=r"all tensors must be on cpu, got one on meta"):
        ours.linear(x, torch.zeros(5, 3, device="meta"))
    with pytest.raises(
        ValueError, match=r"shapes \[..., M, K\] and \[..., K, N\], got \[2, 3\] and \[4, 5\]"
    ):
        ours.matmul(x, torch.zeros(4, 5))


def test_a_cpu_tensor_is_refused_outside_the_interpreter(monkeypatch):
    monkeypatch.setattr("rzero.kernels.triton.devices.interpreting", lambda: False)
    with pytest.raises(ValueError, match=r"must be on a CUDA or ROCm device, got cpu; rzero.kernels.exact"):
        ours.linear(torch.zeros(2, 3), torch.zeros(5, 3))
