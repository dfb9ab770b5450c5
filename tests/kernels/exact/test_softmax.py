"""log_softmax and linear_log_probs: bits, golden values, accuracy, memory, gradients, refusals."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rzero.kernels.exact.scratch as scratch
from rzero.kernels.exact import softmax
from rzero.kernels.exact.products import linear
from rzero.kernels.exact.softmax import linear_log_probs, log_softmax
from tests.kernels.bits import differing

DTYPES = [torch.float32, torch.bfloat16]


def problem(seed, rows, classes=41, size=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, size, generator=generator) * 3
    weight = torch.randn(classes, size, generator=generator)
    tokens = torch.randint(0, classes, (rows,), generator=generator)
    return hidden.to(dtype), weight.to(dtype), tokens


def test_golden_values():
    # Logits (ln 1, ln 2, ln 5): probabilities 1/8, 2/8, 5/8.
    logits = torch.tensor([0.0, math.log(2), math.log(5)])
    expected = torch.tensor([1 / 8, 2 / 8, 5 / 8]).log()
    assert torch.allclose(log_softmax(logits), expected, rtol=1e-6)
    # Logits (2, 1, 0) at temperature 1/2 are (4, 2, 0): -ln(1 + e**-2 + e**-4) = -0.142931628...
    log_probs, entropies = linear_log_probs(
        torch.eye(3)[:1],
        torch.tensor([[2.0], [1.0], [0.0]]) * torch.eye(3)[0],
        torch.tensor([0]),
        temperature=0.5,
    )
    assert abs(log_probs.item() + math.log(1 + math.exp(-2) + math.exp(-4))) < 1e-7
    p = [math.exp(x) / (math.exp(4) + math.exp(2) + 1) for x in (4, 2, 0)]
    assert abs(entropies.item() + sum(x * math.log(x) for x in p)) < 1e-6


def test_impossible_classes_and_single_classes():
    logits = torch.tensor([[0.0, -math.inf, 0.0]])
    assert log_softmax(logits)[0, 1] == -math.inf
    assert torch.allclose(log_softmax(logits)[0, [0, 2]], torch.tensor(0.5).log())
    assert log_softmax(torch.tensor([[-3e38]])).tolist() == [[0.0]]
    for bad in (math.nan, math.inf):  # as torch.log_softmax: no class of such a row has a probability
        assert log_softmax(torch.tensor([[bad, 1.0]])).isnan().all()
        hidden = torch.tensor([[bad, 1.0]])
        assert all(x.isnan().all() for x in linear_log_probs(hidden, torch.eye(2), torch.tensor([1])))


@given(st.integers(0, 10**6), st.integers(1, 257), st.integers(1, 300), st.sampled_from(DTYPES))
@settings(max_examples=30, deadline=None)
def test_a_row_has_the_same_bits_in_any_batch_and_order(seed, rows, classes, dtype):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, classes, generator=generator) * 10).to(dtype)
    whole = log_softmax(logits)
    order, across = torch.randperm(rows, generator=generator), torch.randperm(classes, generator=generator)
    assert differing(log_softmax(logits[order]), whole[order]) == 0
    assert differing(log_softmax(logits[-1:]), whole[-1:]) == 0
    assert differing(log_softmax(logits[:, across].contiguous()), whole[:, across]) == 0


@given(st.integers(0, 10**6), st.integers(1, 100), st.sampled_from(DTYPES), st.sampled_from([1.0, 0.7, 1.3]))
@settings(max_examples=30, deadline=None)
def test_selected_log_probs_have_the_bits_of_the_whole_softmax(seed, rows, dtype, temperature):
    """As an engine computes them: logits, divided by the temperature, log_softmax, gathered."""
    hidden, weight, tokens = problem(seed, rows, dtype=dtype)
    log_probs, entropies = linear_log_probs(hidden, weight, tokens, temperature=temperature)
    scores = log_softmax(linear(hidden, weight).float() / temperature)
    assert differing(log_probs, scores.gather(1, tokens[:, None])[:, 0]) == 0
    exact = torch.log_softmax(linear(hidden, weight).double() / temperature, -1)
    assert torch.allclose(entropies.double(), -(exact.exp() * exact).sum(-1), atol=2e-6)
    one = linear_log_probs(hidden[-1:], weight, tokens[-1:], temperature=temperature)
    assert differing(one[0], log_probs[-1:]) == 0 and differing(one[1], entropies[-1:]) == 0


def test_the_blocks_do_not_show(monkeypatch):
    hidden, weight, tokens = problem(1, 60)
    whole = linear_log_probs(hidden, weight, tokens)
    scores = log_softmax(hidden @ weight.t())
    monkeypatch.setattr(softmax, "CHUNK", 100)
    assert all(
        differing(a, b) == 0 for a, b in zip(linear_log_probs(hidden, weight, tokens), whole, strict=True)
    )
    assert differing(log_softmax(hidden @ weight.t()), scores) == 0


def test_accuracy_over_many_classes():
    logits = torch.randn(20, 50_000, generator=torch.Generator().manual_seed(2)) * 4
    exact = torch.log_softmax(logits.double(), -1)
    ulp = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 24)
    assert float(((log_softmax(logits) - exact).abs() / ulp).max()) < 1.0


def test_no_tensor_of_all_logits_is_made():
    """The largest allocation of forward and backward, by size, with 64 blocks of rows."""
    rows, classes = 4096, 512
    hidden, weight, tokens = problem(3, rows, classes)
    hidden.requires_grad_()
    weight.requires_grad_()
    scratch._buffers.whole.clear()  # what other tests left there may be larger
    scratch._buffers.views.clear()
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor):
                    largest.append(tensor.untyped_storage().nbytes())
            return result

    softmax_chunk, softmax.GRAD_CHUNK = softmax.GRAD_CHUNK, 1 << 15
    try:
        with Watch():
            log_probs, entropies = linear_log_probs(hidden, weight, tokens)
            (log_probs.sum() + entropies.sum()).backward()
    finally:
        softmax.GRAD_CHUNK = softmax_chunk
    assert max(largest) < rows * classes * 4 / 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_match_a_float64_reference(dtype):
    hidden, weight, tokens = problem(4, 30, dtype=dtype)
    hidden, weight = hidden.view(5, 6, 16).requires_grad_(), weight.requires_grad_()
    grads = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(5))
    outs = linear_log_probs(hidden, weight, tokens.view(5, 6), temperature=0.8)
    ours = torch.autograd.grad(outs, (hidden, weight), grads.unbind())
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    scores = torch.log_softmax(wide[0] @ wide[1].t() / 0.8, -1)
    selected = scores.gather(-1, tokens.view(5, 6, 1))[..., 0]
    expected = torch.autograd.grad(
        (selected, -(scores.exp() * scores).sum(-1)), wide, [g.double() for g in grads.unbind()]
    )
    for got, want in zip(ours, expected, strict=True):
        assert float((got.double() - want).norm() / want.norm()) < (1e-6 if dtype == torch.float32 else 3e-2)


def test_log_softmax_gradient():
    logits, grad = torch.randn(4, 9, requires_grad=True), torch.randn(4, 9)
    (got,) = torch.autograd.grad(log_softmax(logits), logits, grad)
    (want,) = torch.autograd.grad(torch.log_softmax(logits, -1), logits, grad)
    assert torch.allclose(got, want, atol=1e-6)


def test_wrong_arguments_are_refused():
    hidden, weight, tokens = problem(6, 3)
    with pytest.raises(ValueError, match=r"linear_log_probs: token_ids must have shape \[3\], got \[2\]"):
        linear_log_probs(hidden, weight, tokens[:2])
    with pytest.raises(ValueError, match=r"linear_log_probs: token_ids must lie in \[0, 41\), got -1 to 3"):
        linear_log_probs(hidden, weight, torch.tensor([-1, 0, 3]))
    with pytest.raises(ValueError, match=r"linear_log_probs: temperature must be positive, got 0"):
        linear_log_probs(hidden, weight, tokens, temperature=0.0)
    with pytest.raises(
        ValueError, match=r"log_softmax: the number of classes must lie in \[1, 1048576\], got 0"
    ):
        log_softmax(torch.zeros(2, 0))
    with pytest.raises(TypeError, match=r"log_softmax: logits must have dtype .*, got torch.float64"):
        log_softmax(torch.zeros(2, 2).double())
