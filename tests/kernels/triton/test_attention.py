"""Attention: values, gradients, and one value of an output in every layout, chunk and launch."""

import math

import pytest
import torch

from rzero.kernels import exact
from rzero.kernels import triton as ours
from rzero.kernels.triton import attention_ops
from rzero.kernels.triton.launch import Launch
from tests.kernels.bits import differing
from tests.kernels.triton.compare import DTYPES, assert_close, random

SCALE = 0.4


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles and splits in short sequences."""
    monkeypatch.setattr(attention_ops, "kv_tile", lambda dtype: 16)
    monkeypatch.setattr(attention_ops, "KV_SPLIT", 32)


def offsets(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def inputs(queries, keys, *, heads=6, groups=2, size=12, dtype=torch.float32):
    return (
        random(queries, heads, size, seed=1, dtype=dtype),
        random(keys, groups, size, seed=2, dtype=dtype),
        random(keys, groups, size, seed=3, dtype=dtype),
    )


def float64_varlen(cu_q, cu_k):
    def function(query, key, value):
        outs = []
        for b in range(len(cu_q) - 1):
            q, k, v = query[cu_q[b] : cu_q[b + 1]], key[cu_k[b] : cu_k[b + 1]], value[cu_k[b] : cu_k[b + 1]]
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
            position = torch.arange(len(q))[:, None] + len(k) - len(q)
            scores = scores.masked_fill(torch.arange(len(k)) > position, -math.inf)
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        return torch.cat(outs)

    return function


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "size"), [(6, 2, 12), (2, 2, 16)])
def test_values_and_gradients_of_packed_sequences(dtype, heads, groups, size):
    cu_q, cu_k = offsets(3, 0, 1, 21), offsets(37, 4, 1, 21)
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "scale": SCALE}
    # A sequence without queries has no place in the exact backend's tensors of queries, but its keys do.
    assert_close(
        lambda *qkv: ours.attention_varlen(*qkv, **options),
        lambda *qkv: exact.attention_varlen(*qkv, **options),
        float64_varlen(cu_q, cu_k),
        inputs(25, 63, heads=heads, groups=groups, size=size, dtype=dtype),
    )


@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_of_padded_batches(masked):
    query, key, value = random(2, 4, 9, 8, seed=4), random(2, 2, 40, 8, seed=5), random(2, 2, 40, 8, seed=6)
    mask = None
    if masked:
        mask = random(2, 4, 9, 40, seed=7) > 0
        mask[0, :, 3] = False  # a query that sees nothing
        mask[1, :, :, :11] = False  # padding on the left
        mask[1, :, :, 30:35] = False  # and a hole

    def float64(q, k, v):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        seen = torch.ones(9, 40, dtype=torch.bool).tril(31) if mask is None else mask
        scores = (q @ k.mT * SCALE).masked_fill(~seen, -math.inf)
        return torch.where(seen.any(-1, keepdim=True), scores.softmax(-1).nan_to_num(), 0.0) @ v

    def with_options(function):
        return lambda *qkv: function(*qkv, scale=SCALE, mask=mask)

    assert_close(with_options(ours.attention), with_options(exact.attention), float64, (query, key, value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_chunks_and_splits_equal_one_prefill(dtype):
    query, key, value = inputs(75, 75, heads=2, groups=1, dtype=dtype)
    whole = ours.attention_varlen(
        query, key, value, cu_seqlens_q=offsets(75), cu_seqlens_k=offsets(75), scale=SCALE
    )

    def piece(start, stop, split, block_m):
        launch = Launch(block_m=block_m, block_n=0, warps=4, stages=1)
        out, _ = attention_ops.launch_attention(
            query[start:stop],
            key[:stop],
            value[:stop],
            offsets(stop - start),
            offsets(stop),
            None,
            None,
            SCALE,
            launch=launch,
            split=split,
        )
        return differing(out, whole[start:stop])

    assert not any(piece(t, t + 1, bool(t % 2), 16) for t in (0, 16, 31, 32, 63, 74))
    assert not any(piece(a, b, split, m) for a, b, split, m in ((0, 75, True, 64), (10, 50, False, 32)))


def test_other_tiles_and_splits_are_other_sums(monkeypatch):
    """The control: were they launch parameters, or chosen by the number of queries, bits would change."""
    query, key, value = inputs(20, 70, heads=2, groups=1)
    options = {"cu_seqlens_q": offsets(20), "cu_seqlens_k": offsets(70), "scale": SCALE}
    before = ours.attention_varlen(query, key, value, **options)
    for name, number in (("kv_tile", lambda dtype: 32), ("KV_SPLIT", 64)):
        with monkeypatch.context() as patch:
            patch.setattr(attention_ops, name, number)
            assert differing(ours.attention_varlen(query, key, value, **options), before) > 100


def test_rounding_points():
    """Weights are rounded to the dtype before the product with values: exp(-0.69) = 0.5009 counts as 0.5."""
    query, key, value = (
        torch.tensor(rows, dtype=torch.bfloat16).view(-1, 1, 1)
        for rows in ([1.0], [0.0, -0.6914], [-0.5, 1.0])
    )
    options = {"cu_seqlens_q": offsets(1), "cu_seqlens_k": offsets(2), "scale": 1.0}
    assert ours.attention_varlen(query, key, value, **options).item() == 0.0
    unrounded = ours.attention_varlen(query.float(), key.float(), value.float(), **options).item()
    assert math.isclose(unrounded, (math.exp(-0.69140625) - 0.5) / (1 + math.exp(-0.69140625)), rel_tol=1e-3)


def test_packing_and_neighbours_do_not_show():
    query, key, value = inputs(30, 60, heads=2, groups=1)
    cu_q, cu_k = offsets(9, 1, 20), offsets(33, 7, 20)

    def attend(q, k, v, cu_q, cu_k):
        return ours.attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, scale=SCALE)

    whole = attend(query, key, value, cu_q, cu_k)
    alone = attend(query[10:], key[40:], value[40:], offsets(20), offsets(20))
    assert differing(alone, whole[10:]) == 0
    key[:40], value[:40], query[:10] = math.nan, math.inf, math.nan
    assert differing(attend(query, key, value, cu_q, cu_k)[10:], whole[10:]) == 0


@pytest.mark.parametrize("size", [1, 5])
def test_pages_equal_packed_keys(size):
    lengths, queries = (37, 3, 64), (1, 3, 6)
    query, key, value = inputs(sum(queries), sum(lengths), heads=2, groups=1)
    needed = [math.ceil(n / size) for n in lengths]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(0)).split([*needed, 3])
    pages = torch.full((2, sum(needed) + 3, size, 1, 12), math.nan)
    table = torch.full((3, max(needed) + 1), 10**6, dtype=torch.int32)
    for b, (start, stop) in enumerate(
        torch.stack([offsets(*lengths)[:-1], offsets(*lengths)[1:]], 1).tolist()
    ):
        table[b, : needed[b]] = order[b]
        t = torch.arange(stop - start)
        for side, flat in enumerate((key, value)):
            pages[side, order[b][t // size], t % size] = flat[start:stop]
    paged = ours.attention_paged(
        query,
        pages[0],
        pages[1],
        page_table=table,
        cu_seqlens_q=offsets(*queries),
        seqlens_k=torch.tensor(lengths),
        scale=SCALE,
    )
    packed = ours.attention_varlen(
        query, key, value, cu_seqlens_q=offsets(*queries), cu_seqlens_k=offsets(*lengths), scale=SCALE
    )
    assert differing(paged, packed) == 0


def test_padding_on_either_side_does_not_show():
    query, key, value = inputs(30, 30, heads=2, groups=1, size=8)
    alone = ours.attention_varlen(
        query, key, value, cu_seqlens_q=offsets(30), cu_seqlens_k=offsets(30), scale=SCALE
    )
    for left, right in ((0, 0), (7, 0), (3, 20)):
        padded = []
        for x in (query, key, value):
            rows = torch.full((1, left + 30 + right, *x.shape[1:]), 9.0)
            rows[0, left : left + 30] = x
            padded.append(rows.transpose(1, 2))
        real = torch.zeros(left + 30 + right, dtype=torch.bool)
        real[left : left + 30] = True
        seen = torch.ones(len(real), len(real), dtype=torch.bool).tril() & real
        out = ours.attention(*padded, scale=SCALE, mask=seen)[0].transpose(0, 1)
        assert differing(out[left : left + 30], alone) == 0


def test_the_backward_repeats_itself_bit_for_bit():
    leaves = [x.requires_grad_() for x in inputs(9, 40, heads=2, groups=1)]
    options = {"cu_seqlens_q": offsets(9), "cu_seqlens_k": offsets(40), "scale": SCALE}
    grads = [torch.autograd.grad(ours.attention_varlen(*leaves, **options).sum(), leaves) for _ in range(2)]
    assert not any(differing(a, b) for a, b in zip(*grads, strict=True))


def test_round_kv_leaves_keys_alone():
    x = random(3, 4, seed=8)
    assert ours.round_kv(x) is x


def test_refusals():
    query, key, value = inputs(4, 4)
    options = {"cu_seqlens_q": offsets(4), "cu_seqlens_k": offsets(4), "scale": SCALE}
    with pytest.raises(ValueError, match=r"H a multiple of G, got \[4, 5, 12\]"):
        ours.attention_varlen(query[:, :5], key, value, **options)
    with pytest.raises(ValueError, match=r"cu_seqlens_k must have shape \[2\], got \[3\]"):
        ours.attention_varlen(query, key, value, **{**options, "cu_seqlens_k": offsets(2, 2)})
    with pytest.raises(TypeError, match=r"cu_seqlens_q must have dtype int32 or int64, got torch.float32"):
        ours.attention_varlen(query, key, value, **{**options, "cu_seqlens_q": offsets(4).float()})
    with pytest.raises(TypeError, match=r"all tensors must have dtype torch.float32"):
        ours.attention_varlen(query, key.bfloat16(), value, **options)
    wide = torch.zeros(4, 1, 300)
    with pytest.raises(ValueError, match=r"head size must lie in \[1, 256\], got 300"):
        ours.attention_varlen(wide, wide, wide, **options)
    square = torch.zeros(1, 1, 3, 8)
    with pytest.raises(ValueError, match=r"causal queries must be at most the 2 keys, got 3"):
        ours.attention(square, square[:, :, :2], square[:, :, :2], scale=SCALE)
    with pytest.raises(TypeError, match=r"mask must have dtype torch.bool, got torch.float32"):
        ours.attention(square, square, square, scale=SCALE, mask=torch.zeros(3, 3))
