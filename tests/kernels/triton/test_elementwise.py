"""rms_norm, silu_mul and rope: values, gradients, bits, refusals; and the sums they are made of."""

import pytest
import torch
import triton
import triton.language as tl

from rzero.kernels import exact
from rzero.kernels import triton as ours
from rzero.kernels.triton import language
from rzero.kernels.triton.devices import run
from tests.kernels.bits import differing, wide_rows
from tests.kernels.triton.compare import DTYPES, assert_close, random
from tests.kernels.triton.interpreter import Interpreted

EPS = 1e-5


def norm64(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 33, 64])
def test_values_and_gradients_of_rms_norm(dtype, columns):
    inputs = random(2, 3, columns, seed=1, dtype=dtype), random(columns, seed=2, dtype=dtype)
    assert_close(
        lambda x, w: ours.rms_norm(x, w, eps=EPS), lambda x, w: exact.rms_norm(x, w, eps=EPS), norm64, inputs
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_of_add_rms_norm(dtype):
    inputs = [random(5, 40, seed=n, dtype=dtype) for n in (3, 4)] + [random(40, seed=5, dtype=dtype)]
    assert_close(
        lambda x, y, w: ours.add_rms_norm(x, y, w, eps=EPS),
        lambda x, y, w: (exact.rms_norm(x + y, w, eps=EPS), x + y),
        lambda x, y, w: (norm64(x + y, w), x + y),
        tuple(inputs),
    )
    x, y, weight = inputs
    normed, total = ours.add_rms_norm(x, y, weight, eps=EPS)
    assert differing(total, x + y) == 0
    assert differing(normed, ours.rms_norm(x + y, weight, eps=EPS)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [7, 64])
def test_values_and_gradients_of_silu_mul(dtype, count):
    inputs = random(3, count, seed=6, dtype=dtype) * 4, random(3, count, seed=7, dtype=dtype)
    assert_close(ours.silu_mul, exact.silu_mul, lambda g, u: torch.nn.functional.silu(g) * u, inputs)


def test_values_and_gradients_of_gated_mlp():
    inputs = (
        random(5, 12, seed=8),
        random(20, 12, seed=9),
        random(20, 12, seed=10),
        random(12, 20, seed=11) / 4,
    )

    def mlp64(x, gate, up, down):
        return (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()

    assert_close(ours.gated_mlp, exact.gated_mlp, mlp64, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table", [(2, 5, 1), (1, 5, 1), (5, 1), (1, 1, 3), (2, 1, 3)])
def test_rope_has_the_bits_of_the_exact_backend(dtype, table):
    """Tables per token, shared by the batch, per head, and broadcast in the middle."""
    x = random(2, 5, 3, 6, seed=12, dtype=dtype)
    count = torch.Size(table).numel()
    cosines, sines = (
        t.view(*table, 6) for t in ours.rope_table(torch.tensor([1.0, 0.3, 0.01]), length=count)
    )
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [op(leaf, cosines, sines) for op, leaf in zip((ours.rope, exact.rope), leaves, strict=True)]
    for out in outputs:
        out.backward(random(2, 5, 3, 6, seed=13, dtype=dtype))
    assert differing(*outputs) == 0
    # The gradient of the exact backend rounds between, in the dtype.
    assert torch.allclose(leaves[0].grad.float(), leaves[1].grad.float(), atol=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype):
    x, y = (wide_rows(40, 33, n).clamp(-1e3, 1e3).to(dtype) for n in (1, 2))
    weight = random(33, seed=14, dtype=dtype)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    for op in (lambda x, y: ours.rms_norm(x, weight, eps=EPS), ours.silu_mul):
        whole = op(x, y)
        for rows in (order, slice(5, 6), slice(9, 30)):
            assert differing(op(x[rows], y[rows]), whole[rows]) == 0


def halves(x):
    """The tree of the source, in torch."""
    while x.shape[-1] > 1:
        middle = x.shape[-1] // 2
        x = x[..., :middle] + x[..., middle:]
    return x[..., 0]


@triton.jit
def sum_kernel(x, out, plain, R: tl.constexpr, W: tl.constexpr):
    i = tl.arange(0, R)
    tile = tl.load(x + i[:, None] * W + tl.arange(0, W)[None, :])
    tl.store(out + i, language.row_sum(tile))
    tl.store(plain + i, tl.sum(tile, axis=1))


def test_a_sum_is_the_tree_that_the_source_states():
    x, out, plain = wide_rows(8, 64, 3), torch.empty(8), torch.empty(8)
    run(Interpreted(sum_kernel.fn), (1,), x, out, plain, R=8, W=64)
    assert differing(out, halves(x)) == 0
    assert differing(plain, halves(x)) > 0  # the control: tl.sum is not it


def test_refusals():
    x, weight = torch.zeros(2, 4), torch.zeros(4)
    with pytest.raises(ValueError, match=r"rms_norm: weight must have shape \[4\] to match x"):
        ours.rms_norm(x, torch.zeros(3), eps=EPS)
    with pytest.raises(TypeError, match=r"got torch.float64 and torch.float32"):
        ours.rms_norm(x.double(), weight, eps=EPS)
    with pytest.raises(ValueError, match=r"residual must have shape \[2, 4\], got \[3, 4\]"):
        ours.add_rms_norm(x, torch.zeros(3, 4), weight, eps=EPS)
    with pytest.raises(TypeError, match=r"residual must have dtype torch.float32, got torch.bfloat16"):
        ours.add_rms_norm(x, x.bfloat16(), weight, eps=EPS)
    with pytest.raises(ValueError, match=r"up must have shape \[2, 4\] to match gate, got \[4\]"):
        ours.silu_mul(x, weight)
    with pytest.raises(ValueError, match=r"even last dimension of 4, got \[3\] and \[3\]"):
        ours.rope(x, torch.zeros(3), torch.zeros(3))
    with pytest.raises(TypeError, match=r"the tables float32, got torch.float32, torch.bfloat16"):
        ours.rope(x, torch.zeros(4).bfloat16(), torch.zeros(4).bfloat16())
