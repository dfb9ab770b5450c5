"""silu_mul and gated_mlp: bits, composition, accuracy, gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rzero.kernels.exact import mlp, products
from rzero.kernels.exact.mlp import gated_mlp, silu_mul
from rzero.kernels.exact.products import linear
from tests.kernels.bits import differing, wide_rows

DTYPES = [torch.float32, torch.bfloat16]


def block(seed, dtype=torch.float32, width=24, inner=37):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((inner, width), (inner, width), (width, inner))
    return [(torch.randn(*s, generator=generator) / 4).to(dtype) for s in shapes]


@given(st.integers(0, 10**6), st.integers(1, 90), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_an_element_does_not_depend_on_its_place(seed, rows, columns):
    gate, up = wide_rows(rows, columns, seed), wide_rows(rows, columns, seed + 1)
    whole = silu_mul(gate, up)
    assert differing(silu_mul(gate.t().contiguous(), up.t().contiguous()).t(), whole) == 0
    assert differing(silu_mul(gate[-1:, -1:], up[-1:, -1:]), whole[-1:, -1:]) == 0
    assert differing(silu_mul(gate.flatten(), up.flatten()), whole.flatten()) == 0


def test_values():
    gate = torch.tensor([0.0, 1.0, -1.0, 20.0, -200.0, 200.0])
    # silu(1) = 1 / (1 + 1/e) = 0.7310585786..., silu(-1) = silu(1) - 1, silu(20) = 20 - 4e-8 rounds to 20.
    expected = torch.tensor([0.0, 0.7310585786, -0.2689414214, 20.0, 0.0, 200.0])
    assert torch.allclose(silu_mul(gate, torch.ones(6)), expected, rtol=1e-7, atol=1e-30)
    wide = torch.linspace(-90, 90, 100001)
    exact = torch.nn.functional.silu(wide.double())
    assert float(((silu_mul(wide, torch.ones_like(wide)) - exact) / exact)[wide != 0].abs().max()) < 2.0**-23


@given(st.integers(0, 10**6), st.integers(1, 257), st.sampled_from(DTYPES))
@settings(max_examples=25, deadline=None)
def test_the_block_has_the_bits_of_its_parts_row_by_row(seed, rows, dtype):
    x, (gate, up, down) = wide_rows(rows, 24, seed).clamp(-1e3, 1e3).to(dtype), block(seed, dtype)
    whole = gated_mlp(x, gate, up, down)
    assert differing(whole, linear(silu_mul(linear(x, gate), linear(x, up)), down)) == 0
    assert differing(gated_mlp(x[-1:], gate, up, down), whole[-1:]) == 0
    with torch.no_grad():
        assert differing(gated_mlp(x, gate, up, down), whole) == 0


def test_the_blocks_do_not_show(monkeypatch):
    x, weights = torch.randn(300, 24), block(0)
    whole = gated_mlp(x, *weights)
    monkeypatch.setattr(products, "ROWS", 16)
    monkeypatch.setattr(products, "CHUNK", 1 << 9)
    monkeypatch.setattr(mlp, "BLOCK", 100)
    assert differing(gated_mlp(x, *weights), whole) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_match_a_float64_reference(dtype):
    x = torch.randn(3, 7, 24).to(dtype).requires_grad_()
    weights = [w.requires_grad_() for w in block(1, dtype)]
    grad = torch.randn(3, 7, 24).to(dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, *weights)]
    hidden = torch.nn.functional.silu(wide[0] @ wide[1].t()) * (wide[0] @ wide[2].t())
    expected = torch.autograd.grad(hidden @ wide[3].t(), wide, grad.double())
    fused = torch.autograd.grad(gated_mlp(x, *weights), (x, *weights), grad)
    gate, up, down = weights
    composed = torch.autograd.grad(
        linear(silu_mul(linear(x, gate), linear(x, up)), down), (x, *weights), grad
    )
    for got, parts, want in zip(fused, composed, expected, strict=True):
        for tensor in (got, parts):
            assert float((tensor.double() - want).norm() / want.norm()) < (
                1e-6 if dtype == torch.float32 else 2e-2
            )


def test_wrong_arguments_are_refused():
    x, (gate, up, down) = torch.zeros(2, 24), block(2)
    with pytest.raises(ValueError, match=r"gated_mlp: gate, up and down must have shapes"):
        gated_mlp(x, gate, up, down[:, :5])
    with pytest.raises(ValueError, match=r"linear: weight must have shape \[N, 24\]"):
        gated_mlp(x, gate[:, :5], up, down)
    with pytest.raises(ValueError, match=r"silu_mul: up must have shape \[2\] to match gate, got \[3\]"):
        silu_mul(torch.zeros(2), torch.zeros(3))
    with pytest.raises(TypeError, match=r"silu_mul: gate and up must have one dtype"):
        silu_mul(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
