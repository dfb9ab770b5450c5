"""Packed and paged attention have the bits of the padded one."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rzero.kernels.exact import layouts
from rzero.kernels.exact.causal_attention import attention, round_kv
from rzero.kernels.exact.layouts import attention_paged, attention_varlen
from tests.kernels.bits import differing

SCALE = 0.4
lengths_of_sequences = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


@given(st.integers(0, 10**6), lengths_of_sequences)
@settings(max_examples=30, deadline=None)
def test_packing_equals_each_sequence_alone(seed, lengths):
    generator = torch.Generator().manual_seed(seed)
    cuts = offsets(lengths)
    query = torch.randn(sum(lengths), 4, 8, generator=generator)
    key, value = torch.randn(2, sum(lengths), 2, 8, generator=generator).unbind()
    packed = attention_varlen(query, key, value, cu_seqlens_q=cuts, cu_seqlens_k=cuts, scale=SCALE)
    for start, stop in pairwise(cuts):
        q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (query, key, value))
        alone = attention(q, k, v, scale=SCALE)[0].transpose(0, 1)
        assert differing(packed[start:stop], alone) == 0


def paged(seed, lengths, size, queries):
    """A cache of shuffled pages with garbage everywhere else, and the new queries of each request."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-n // size) for n in lengths]
    count = sum(needed) + 3
    order = torch.randperm(count, generator=generator)
    keys, values = torch.randn(2, sum(lengths), 2, 8, generator=generator).unbind()
    keys, values = round_kv(keys), round_kv(values)
    pages = torch.full((2, count, size, 2, 8), math.nan)
    table = torch.full((len(lengths), max(needed) + 1), -7, dtype=torch.int32)
    cuts, first = offsets(lengths), 0
    for b, n in enumerate(lengths):
        own = order[first : first + needed[b]]
        table[b, : needed[b]] = own
        for side, flat in enumerate((keys, values)):
            for t in range(n):
                pages[side, own[t // size], t % size] = flat[cuts[b] + t]
        first += needed[b]
    query = torch.randn(sum(queries), 4, 8, generator=generator)
    return query, keys, values, pages, table


@given(st.integers(0, 10**6), lengths_of_sequences, st.sampled_from([1, 4, 16]), st.data())
@settings(max_examples=30, deadline=None)
def test_pages_of_any_size_and_order_equal_a_contiguous_cache(seed, lengths, size, data):
    queries = [data.draw(st.integers(1, n)) for n in lengths]
    query, keys, values, pages, table = paged(seed, lengths, size, queries)
    out = attention_paged(
        query,
        pages[0],
        pages[1],
        page_table=table,
        cu_seqlens_q=offsets(queries),
        seqlens_k=torch.tensor(lengths),
        scale=SCALE,
        rounded_kv=True,
    )
    contiguous = attention_varlen(
        query, keys, values, cu_seqlens_q=offsets(queries), cu_seqlens_k=offsets(lengths), scale=SCALE
    )
    assert differing(out, contiguous) == 0


@given(st.integers(0, 10**6), st.integers(1, 20), st.lists(st.integers(0, 12), min_size=2, max_size=5))
@settings(max_examples=20, deadline=None)
def test_pages_of_a_shared_prefix_equal_copies_of_it(seed, prefix, tails):
    """A hit of the prefix cache: the tables begin with the same pages; a miss: with copies of them."""
    size, generator = 4, torch.Generator().manual_seed(seed)
    begin = prefix // size  # whole pages can be shared
    keys, values = (round_kv(x) for x in torch.randn(2, 20 + 12, 2, 8, generator=generator).unbind())
    width = -(-(prefix + max(tails)) // size)
    pages = torch.full((2, width * (len(tails) + 1), size, 2, 8), math.nan)
    own = torch.arange(width * len(tails)).view(len(tails), width) + width
    shared = torch.cat([torch.arange(begin).expand(len(tails), -1), own[:, begin:]], 1)
    for table in (own, shared):
        for row, tail in zip(table, tails, strict=True):
            for t in range(prefix + tail):
                pages[0, row[t // size], t % size] = keys[t] + (0 if t < prefix else tail)
                pages[1, row[t // size], t % size] = values[t]
    query = torch.randn(len(tails), 4, 8, generator=generator)
    hit, miss = (
        attention_paged(
            query,
            pages[0],
            pages[1],
            page_table=table,
            cu_seqlens_q=torch.arange(len(tails) + 1),
            seqlens_k=torch.tensor([prefix + tail for tail in tails]),
            scale=SCALE,
            rounded_kv=True,
        )
        for table in (shared, own)
    )
    assert differing(hit, miss) == 0 and bool(hit.isfinite().all())


def torchs_own(query, fetch, mask, *, scale, groups, keys, rounded_kv, log_sums=None):
    key, value = (x.nan_to_num(0.0) for x in fetch(slice(None)))
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
    )


def test_torchs_own_attention_would_fail_these_tests(monkeypatch):
    """The negative control: pages and packing over torch's kernel, against each request alone."""
    monkeypatch.setattr(layouts, "attend", torchs_own)
    lengths = [37, 12, 40]
    query, keys, values, pages, table = paged(0, lengths, 16, [1, 1, 1])
    cuts, wrong = offsets(lengths), 0
    out = attention_paged(
        query,
        pages[0],
        pages[1],
        page_table=table,
        cu_seqlens_q=torch.arange(4),
        seqlens_k=torch.tensor(lengths),
        scale=SCALE,
    )
    for b, (start, stop) in enumerate(pairwise(cuts)):
        q, k, v = (
            query[b : b + 1].transpose(0, 1)[None],
            *(x[start:stop].transpose(0, 1)[None] for x in (keys, values)),
        )
        alone = torchs_own(
            q, lambda _, k=k, v=v: (k, v), None, scale=SCALE, groups=2, keys=0, rounded_kv=True
        )
        assert torch.allclose(alone[0, :, 0], out[b], atol=1e-5)
        wrong += differing(alone[0, :, 0], out[b])
    assert wrong > 0


def test_gradients_of_packed_sequences_are_those_of_each():
    lengths = [3, 9, 1]
    cuts = offsets(lengths)
    inputs = [torch.randn(13, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    grad = torch.randn(13, 4, 8)
    packed = attention_varlen(*inputs, cu_seqlens_q=cuts, cu_seqlens_k=cuts, scale=SCALE)
    ours = torch.autograd.grad(packed, inputs, grad)
    for start, stop in pairwise(cuts):
        alone = attention(*(x[start:stop].transpose(0, 1)[None] for x in inputs), scale=SCALE)
        expected = torch.autograd.grad(alone[0].transpose(0, 1), inputs, grad[start:stop])
        for got, want in zip(ours, expected, strict=True):
            assert torch.allclose(got[start:stop], want[start:stop], atol=1e-6)


def test_wrong_arguments_are_refused():
    q, k = torch.zeros(5, 4, 8), torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=r"attention: cu_seqlens_q must rise from 0 to 5, got \[0, 4\]"):
        attention_varlen(
            q, k, k, cu_seqlens_q=torch.tensor([0, 4]), cu_seqlens_k=torch.tensor([0, 4]), scale=1.0
        )
    with pytest.raises(ValueError, match=r"attention_varlen: each sequence must have at least as many keys"):
        attention_varlen(
            q, k, k, cu_seqlens_q=torch.tensor([0, 5]), cu_seqlens_k=torch.tensor([0, 4]), scale=1.0
        )
    pages = torch.zeros(3, 2, 2, 8)
    with pytest.raises(
        ValueError, match=r"attention_paged: page_table must have shape \[1, 3 or more\], got \[1, 2\]"
    ):
        attention_paged(
            q,
            pages,
            pages,
            page_table=torch.zeros(1, 2, dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, 5]),
            seqlens_k=torch.tensor([6]),
            scale=1.0,
        )
