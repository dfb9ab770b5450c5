"""Every property of the contract for every op, compared as integers; each comparison is shown a fault too."""

import math
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rzero import kernels
from tests.kernels.bits import differing, wide_rows

WIDTH = 24
DTYPES = [torch.float32, torch.bfloat16]
generator = torch.Generator().manual_seed(0)
MATRICES = {n: torch.randn(n, WIDTH, generator=generator) for n in (9, 16, 37)}
DOWN = torch.randn(WIDTH, 37, generator=generator)
COSINES, SINES = kernels.rope_table(1.0 / 100.0 ** (torch.arange(0, WIDTH, 2) / WIDTH), length=7)


def heads(x):
    """[R, WIDTH] -> queries, keys and values of R requests, 2 heads and 3 positions of size 4."""
    q = x.view(-1, 2, 3, 4)
    return q, q.flip(2), q.roll(1, -1)


def log_probs(x):
    """The tokens go with the rows by the rows' own content, so that any order of rows may be asked for."""
    ids = x.float().nan_to_num(0.0, 0.0, 0.0).abs().argmax(-1)
    return torch.stack(kernels.linear_log_probs(x, MATRICES[37].to(x.dtype), ids, temperature=0.7), -1)


def packed(x):
    """Each row is one sequence of 3 tokens, packed with all others."""
    cuts = torch.arange(0, 3 * len(x) + 1, 3)
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in heads(x))
    out = kernels.attention_varlen(q, k, v, cu_seqlens_q=cuts, cu_seqlens_k=cuts, scale=0.5)
    return out.reshape(x.shape)


def paged(x):
    """Each row is one request with 3 tokens in 2 pages; the pages of all rows stand in reverse."""
    q, k, v = (t.transpose(1, 2) for t in heads(x))  # [R, 3, 2, 4]
    pages = torch.full((2, 2 * len(x), 2, 2, 4), math.nan, dtype=x.dtype)
    table = torch.arange(2 * len(x)).flip(0).view(-1, 2)
    for side, tokens in zip(pages, (k, v), strict=True):
        for t in range(3):
            side[table[:, t // 2], t % 2] = tokens[:, t]
    out = kernels.attention_paged(
        q[:, 2],
        pages[0],
        pages[1],
        page_table=table,
        cu_seqlens_q=torch.arange(len(x) + 1),
        seqlens_k=torch.full((len(x),), 3),
        scale=0.5,
    )
    return out.flatten(1)


# Each op as a function of rows [R, WIDTH].
OPS = {
    "linear": lambda x: kernels.linear(x, MATRICES[9].to(x.dtype), MATRICES[9][:, 0].to(x.dtype)),
    "linear_joined": lambda x: kernels.linear_joined(x, (MATRICES[9].to(x.dtype), MATRICES[16].to(x.dtype))),
    "matmul": lambda x: kernels.matmul(x, MATRICES[16].to(x.dtype).t()),
    "rms_norm": lambda x: kernels.rms_norm(x, MATRICES[9][0].to(x.dtype), eps=1e-6),
    "silu_mul": lambda x: kernels.silu_mul(x, x.roll(1, -1)),
    "gated_mlp": lambda x: kernels.gated_mlp(
        x, MATRICES[37].to(x.dtype), MATRICES[37].flip(0).to(x.dtype), DOWN.to(x.dtype)
    ),
    "rope": lambda x: kernels.rope(x, COSINES[5], SINES[5]),
    "round_kv": kernels.round_kv,
    "attention": lambda x: kernels.attention(*heads(x), scale=0.5).flatten(1),
    "attention_varlen": packed,
    "attention_paged": paged,
    "log_softmax": kernels.log_softmax,
    "linear_log_probs": log_probs,
}


def in_any_batch(op, x, seed):
    """A row alone, and the rows in two parts."""
    cut = seed % len(x)
    whole = op(x)
    return (op(x[cut : cut + 1]), whole[cut : cut + 1]), (op(x[: cut + 1]), whole[: cut + 1])


def in_any_order(op, x, seed):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return ((op(x[order]), op(x)[order]),)


def beside_anything(op, x, seed):
    """Every other row replaced by huge values, infinities, NaN, denormals or zeros."""
    kept = (torch.arange(len(x)) + seed) % 2 == 0
    garbage = [3e38, -3e38, math.inf, -math.inf, math.nan, 2.0**-149, -0.0]
    others = torch.tensor(garbage)[(torch.arange(len(x)) + seed) % len(garbage), None].to(x.dtype)
    return ((op(torch.where(kept[:, None], x, others))[kept], op(x)[kept]),)


def at_any_address(op, x, seed):
    """Memory that is not aligned, and rows that are not next to each other."""
    offset = 1 + seed % 31
    moved = torch.zeros(offset + x.numel(), dtype=x.dtype)[offset:].view_as(x).copy_(x)
    spread = torch.zeros(len(x), 2, WIDTH, dtype=x.dtype)
    spread[:, 1] = x
    return (op(moved), op(x)), (op(spread[:, 1]), op(x))


def with_any_threads(op, x, seed):
    with threads(1):
        one = op(x)
    with threads(2):
        return ((op(x), one),)


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


PROPERTIES = [in_any_batch, in_any_order, beside_anything, at_any_address, with_any_threads]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("property_", PROPERTIES, ids=lambda f: f.__name__)
@given(st.integers(0, 10**6), st.integers(1, 257), st.sampled_from(DTYPES))
@settings(max_examples=6, deadline=None)
def test_rows_have_the_same_bits(property_, name, seed, rows, dtype):
    x = wide_rows(rows, WIDTH, seed).clamp(-1e4, 1e4).to(dtype)
    for got, want in property_(OPS[name], x, seed):
        assert differing(got, want) == 0 and bool(want.isfinite().all())


@pytest.mark.parametrize("offset", [1, 3, 6, 11])
def test_the_alignment_of_weights_does_not_matter(offset):
    def moved(x):
        return torch.zeros(offset + x.numel(), dtype=x.dtype)[offset:].view_as(x).copy_(x)

    x, (gate, down) = wide_rows(40, WIDTH, 3).clamp(-1e4, 1e4), (MATRICES[37], DOWN)
    ids = torch.arange(40) % 37
    for op in (
        lambda at: kernels.linear(x, at(gate), at(gate[:, 0])),
        lambda at: kernels.linear_joined(x, (at(gate), at(MATRICES[16]))),
        lambda at: kernels.matmul(x, at(gate.t())),
        lambda at: kernels.rms_norm(x, at(gate[0]), eps=1e-6),
        lambda at: kernels.gated_mlp(x, at(gate), at(gate.flip(0)), at(down)),
        lambda at: kernels.rope(x, at(COSINES[5]), at(SINES[5])),
        lambda at: torch.stack(kernels.linear_log_probs(x, at(gate), ids)),
    ):
        assert differing(op(moved), op(lambda weight: weight.contiguous())) == 0


def cut_by_threads(x):
    """Partial sums, one for each thread."""
    return sum(part.sum(-1, keepdim=True) for part in x.chunk(torch.get_num_threads(), -1))


# For each property an op with the fault it is there to find.
FAULTS = {
    in_any_batch: lambda x: torch.nn.functional.linear(x, MATRICES[37]),  # other kernels for few rows
    in_any_order: lambda x: x * (1 + torch.arange(len(x))[:, None] * 2.0**-23),  # the place in a tile shows
    beside_anything: lambda x: x + (x * 0).sum(0),  # a masked row is multiplied by 0
    at_any_address: lambda x: x + x.data_ptr() % 64 * 2.0**-10,  # a loop's head for unaligned elements
    with_any_threads: cut_by_threads,
}


@pytest.mark.parametrize("property_", PROPERTIES, ids=lambda f: f.__name__)
def test_the_property_finds_the_fault_it_is_there_for(property_):
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    assert sum(differing(a, b) for a, b in property_(FAULTS[property_], x, seed=7)) > 0


@given(st.integers(0, 10**6), st.integers(2, 300), st.integers(1, 257))
@settings(max_examples=15, deadline=None)
def test_the_order_of_the_terms_does_not_matter(seed, columns, rows):
    x, weight = wide_rows(rows, columns, seed), wide_rows(2, columns, seed + 1)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
    y, z = x[:, order].contiguous(), weight[:, order].contiguous()
    assert differing(kernels.linear(y, z), kernels.linear(x, weight)) == 0
    assert differing(kernels.matmul(y, z.t()), kernels.matmul(x, weight.t())) == 0
    normed = kernels.rms_norm(x, weight[0], eps=1e-6)
    assert differing(kernels.rms_norm(y, z[0], eps=1e-6), normed[:, order]) == 0
    assert differing(kernels.log_softmax(y), kernels.log_softmax(x)[:, order]) == 0
    head = torch.stack(kernels.linear_log_probs(x, weight, torch.ones(rows, dtype=torch.int64)))
    turned = kernels.linear_log_probs(y, z.flip(0), torch.zeros(rows, dtype=torch.int64))
    assert differing(torch.stack(turned), head) == 0


def test_torchs_own_sums_do_depend_on_the_order_of_the_terms():
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(64, 300, generator=generator), torch.randn(2, 300, generator=generator)
    order = torch.randperm(300, generator=generator)
    native = torch.nn.functional
    assert differing(native.linear(x[:, order], weight[:, order]), native.linear(x, weight)) > 0
    assert differing(native.rms_norm(x[:, order], (300,)), native.rms_norm(x, (300,))[:, order]) > 0
    assert differing(native.log_softmax(x[:, order], -1), native.log_softmax(x, -1)[:, order]) > 0
