"""attention: decode, chunks, masks, co-tenants and garbage change no bit; accuracy; gradients; refusals."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rzero.kernels.exact import attention_backward, attention_forward
from rzero.kernels.exact.causal_attention import attention, round_kv
from tests.kernels.bits import differing, wide_rows

DTYPES = [torch.float32, torch.bfloat16]
SCALE = 0.3


def problem(seed, batch, heads, groups, length, size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, length, size, generator=generator) * 2
    key = torch.randn(batch, groups, length, size, generator=generator)
    value = wide_rows(batch * groups * length, size, seed).clamp(-1e3, 1e3).view(batch, groups, length, size)
    return tuple(x.to(dtype) for x in (query, key, value))


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


shapes = st.tuples(
    st.integers(1, 5),
    st.sampled_from([(1, 1), (4, 4), (6, 2), (3, 1)]),
    st.integers(1, 90),
    st.integers(1, 40),
)


@given(st.integers(0, 10**6), shapes, st.sampled_from(DTYPES))
@settings(max_examples=30, deadline=None)
def test_decode_equals_prefill_at_every_position(seed, shape, dtype):
    batch, (heads, groups), length, size = shape
    query, key, value = problem(seed, batch, heads, groups, length, size, dtype)
    whole = attention(query, key, value, scale=SCALE)
    stored_key, stored_value = round_kv(key), round_kv(value)
    for t in range(length):
        seen = slice(0, t + 1)
        one = attention(query[:, :, t : t + 1], key[:, :, seen], value[:, :, seen], scale=SCALE)
        assert differing(one[:, :, 0], whole[:, :, t]) == 0
        cached = attention(
            query[:, :, t : t + 1],
            stored_key[:, :, seen],
            stored_value[:, :, seen],
            scale=SCALE,
            rounded_kv=True,
        )
        assert differing(cached[:, :, 0], whole[:, :, t]) == 0


@given(st.integers(0, 10**6), st.integers(2, 140), st.data())
@settings(max_examples=25, deadline=None)
def test_chunks_of_a_prefill_change_nothing(seed, length, data):
    query, key, value = problem(seed, 2, 4, 2, length, 16)
    whole = attention(query, key, value, scale=SCALE)
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(1, length - 1), max_size=4))})
    for start, stop in pairwise(cuts):
        part = attention(query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], scale=SCALE)
        assert differing(part, whole[:, :, start:stop]) == 0


@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(0, 70), st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_masks_and_padding_of_any_content_equal_the_plain_sequence(seed, length, right, left):
    query, key, value = problem(seed, 3, 4, 2, length, 8)
    whole = attention(query, key, value, scale=SCALE)
    garbage = [math.nan, math.inf, -3e38, 1e38]

    def padded(x, fill):
        return torch.nn.functional.pad(x, (0, 0, left, right), value=fill)

    mask = torch.zeros(1, 1, left + length + right, left + length + right, dtype=torch.bool)
    mask[..., left : left + length, left : left + length] = causal(length)
    for fill in garbage:
        out = attention(padded(query, 0.0), padded(key, fill), padded(value, -fill), scale=SCALE, mask=mask)
        assert differing(out[:, :, left : left + length], whole) == 0
        assert not bool(out[:, :, left + length :].any())


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_a_request_does_not_depend_on_its_neighbours(seed, batch, length):
    query, key, value = problem(seed, batch, 4, 2, length, 8)
    whole = attention(query, key, value, scale=SCALE)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
    assert differing(attention(query[order], key[order], value[order], scale=SCALE), whole[order]) == 0
    alone = attention(query[-1:], key[-1:], value[-1:], scale=SCALE)
    assert differing(alone, whole[-1:]) == 0
    poisoned = [x.clone() for x in (query, key, value)]
    for x in poisoned:
        x[:-1] = math.nan
    assert differing(attention(*poisoned, scale=SCALE)[-1:], alone) == 0


def test_gaps_between_visible_keys_do_not_matter():
    query, key, value = problem(3, 1, 2, 2, 20, 8)
    kept = torch.tensor([0, 3, 4, 9, 15, 19])
    mask = torch.zeros(1, 1, 1, 20, dtype=torch.bool)
    mask[..., kept] = True
    spread = attention(query[:, :, :1], key, value, scale=SCALE, mask=mask)
    order = torch.tensor([15, 0, 19, 4, 3, 9])
    dense = attention(
        query[:, :, :1], key[:, :, order], value[:, :, order], scale=SCALE, mask=mask[..., order]
    )
    assert differing(spread, dense) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["key", "value"])
def test_nan_reaches_exactly_the_queries_that_may_see_it(bad, which):
    query, key, value = problem(4, 2, 4, 2, 30, 8)
    clean = attention(query, key, value, scale=SCALE)
    (key if which == "key" else value)[1, 1, 11, 3] = bad
    for rounded in (False, True):
        k, v = (round_kv(key), round_kv(value)) if rounded else (key, value)
        dirty = attention(query, k, v, scale=SCALE, rounded_kv=rounded)
        assert bool(dirty[1, 2:, 11:].isnan().all())
        assert differing(dirty[:, :, :11], clean[:, :, :11]) == 0
        assert differing(dirty[0], clean[0]) == 0 and differing(dirty[1, :2], clean[1, :2]) == 0
        one = attention(query[:, :, 11:12], k[:, :, :12], v[:, :, :12], scale=SCALE, rounded_kv=rounded)
        assert differing(one[:, :, 0], dirty[:, :, 11]) == 0


def test_one_and_two_threads_agree():
    query, key, value = problem(5, 6, 8, 2, 70, 16)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(attention(query, key, value, scale=SCALE))
    finally:
        torch.set_num_threads(threads)
    assert differing(*results) == 0


def test_the_blocks_do_not_show(monkeypatch):
    query, key, value = problem(6, 7, 4, 2, 50, 8)
    mask = causal(50).repeat(7, 1, 1, 1)
    mask[3, :, 40:, :] = False
    whole = attention(query, key, value, scale=SCALE, mask=mask)
    heads_apart = attention(query, key, value, scale=SCALE, mask=mask.expand(7, 4, 50, 50).contiguous())
    assert differing(heads_apart, whole) == 0
    for name in ("SCORES", "KEYS", "DECODE_KEYS"):
        monkeypatch.setattr(attention_forward, name, 1)
    assert differing(attention(query, key, value, scale=SCALE, mask=mask), whole) == 0


def test_a_query_that_sees_nothing_gives_zeros_and_a_finite_gradient():
    query, key, value = (x.requires_grad_() for x in problem(7, 1, 2, 2, 4, 8))
    mask = causal(4).clone()
    mask[..., 2, :] = False
    out = attention(query, key, value, scale=SCALE, mask=mask)
    assert not bool(out[:, :, 2].any())
    grads = torch.autograd.grad(out.square().sum(), (query, key, value))
    assert all(bool(g.isfinite().all()) for g in grads) and not bool(grads[0][:, :, 2].any())


@pytest.mark.parametrize(("length", "size", "spread"), [(5, 4, 1), (200, 64, 1), (300, 16, 8)])
def test_accuracy(length, size, spread):
    generator = torch.Generator().manual_seed(length)
    query, key, value = torch.randn(3, 2, 2, length, size, generator=generator).unbind()
    query = query * spread
    exact = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=True
    )
    native = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    error = (attention(query, key, value, scale=size**-0.5) - exact).square().mean().sqrt()
    assert float(error) < float((native - exact).square().mean().sqrt())
    assert float(error) < spread * 2.0**-24


def test_huge_values_with_tiny_weights_keep_the_others_accurate():
    """A visible key of 2**40 times the value but a weight of 2**-60 must not coarsen the rest."""
    query = torch.tensor([[[[1.0, 0.0]]]])
    key = torch.tensor([[[[0.0, 0.0], [-60.0 * math.log(2), 0.0]]]])
    value = torch.tensor([[[[1.0 / 3, 0.2], [2.0**40, 2.0**40]]]])
    out = attention(query, key, value, scale=1.0)
    expected = (value[0, 0, 0].double() + 2.0**-60 * value[0, 0, 1].double()) / (1 + 2.0**-60)
    assert torch.allclose(out[0, 0, 0].double(), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("queries", [1, 30, 70])
def test_gradients_match_a_float64_reference(dtype, masked, queries):
    query, key, value = problem(8, 3, 4, 2, 70, 8, dtype)
    value = value.clamp(-4, 4)
    query = query[:, :, 70 - queries :]
    mask = causal(70)[:, :, 70 - queries :].repeat(3, 1, 1, 1)
    if masked:
        mask[1, :, :, 33:] = False
        mask[2, :, :, 50:60] = False
        mask[..., 0] = True
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    grad = torch.randn(query.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = attention(*inputs, scale=SCALE, mask=mask if masked else None)
    ours = torch.autograd.grad(out, inputs, grad)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    reference = torch.nn.functional.scaled_dot_product_attention(
        *wide, attn_mask=mask, scale=SCALE, enable_gqa=True
    )
    expected = torch.autograd.grad(reference, wide, grad.double())
    for got, want in zip(ours, expected, strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        assert float((got.double() - want).norm() / want.norm()) < (2e-6 if dtype == torch.float32 else 1e-2)


def test_gradients_do_not_depend_on_the_blocks_beyond_rounding(monkeypatch):
    inputs = [x.requires_grad_() for x in problem(9, 4, 2, 2, 40, 8)]
    runs = []
    for scores in (1 << 16, 1 << 16, 1):
        monkeypatch.setattr(attention_backward, "SCORES", scores)
        runs.append(torch.autograd.grad(attention(*inputs, scale=SCALE).square().sum(), inputs))
    assert all(differing(a, b) == 0 for a, b in zip(runs[0], runs[1], strict=True))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-4) for a, b in zip(runs[0], runs[2], strict=True))


def test_round_kv_passes_the_gradient_and_stays_close():
    x = wide_rows(100, 16, 10).requires_grad_()
    rounded = round_kv(x)
    assert bool(((rounded - x).abs() <= 2.0**-24 * x.abs().amax(-1, keepdim=True)).all())
    rounded.backward(torch.ones_like(x))
    assert bool((x.grad == 1).all())


def test_torch_itself_would_fail_these_tests():
    """The negative control: decode against prefill with torch's own attention."""
    query, key, value = problem(11, 2, 4, 4, 64, 16)
    native = torch.nn.functional.scaled_dot_product_attention
    whole = native(query, key, value, is_causal=True)
    one = native(query[:, :, -1:], key, value)
    assert differing(one[:, :, 0], whole[:, :, -1]) > 10


def test_wrong_arguments_are_refused():
    q = torch.zeros(1, 4, 3, 8)
    with pytest.raises(ValueError, match=r"attention: query, key and value must have shapes"):
        attention(q, torch.zeros(1, 3, 3, 8), torch.zeros(1, 3, 3, 8), scale=1.0)
    with pytest.raises(ValueError, match=r"attention: causal queries must be at most the 2 keys, got 3"):
        attention(q, q[:, :, :2], q[:, :, :2], scale=1.0)
    with pytest.raises(TypeError, match=r"attention: mask must have dtype torch.bool, got torch.float32"):
        attention(q, q, q, scale=1.0, mask=torch.zeros(1, 1, 3, 3))
    with pytest.raises(TypeError, match=r"attention: query, key and value must have one dtype"):
        attention(q, q.bfloat16(), q, scale=1.0)
