"""attention, attention_varlen and attention_paged: one kernel for training, prefill and decode."""

import torch
from einops import rearrange
from torch import Tensor

from rzero.kernels.triton import attention_ops  # noqa: F401  (registers the operators)
from rzero.kernels.triton.devices import check_device, check_dtypes

__all__ = ["attention", "attention_paged", "attention_varlen", "round_kv"]

MAX_HEAD = 256


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    rounded_kv: bool = False,
) -> Tensor:
    """Causal attention inside each of B packed sequences; the last query stands at the last key.

    Keys are taken in tiles and splits of fixed sizes from a sequence's first one on, in ascending order, so
    that an output depends on its own query and the keys that it sees, not on where a prefill was cut, on the
    number of queries or on other sequences (rzero.kernels.triton.attention_forward).

    Offsets are not read on the host: they must rise from 0 to N and M, and give no sequence more queries than
    keys.

    Args:
        query: [N, H, D] float32, bfloat16 or float16, D <= 256; receives gradient.
        key: [M, G, D], the dtype of ``query``, H a multiple of G; receives gradient.
        value: [M, G, D]; receives gradient.
        cu_seqlens_q: int [B+1], offsets of the sequences in ``query``.
        cu_seqlens_k: int [B+1], offsets in ``key`` and ``value``.
        scale: Factor of the scores.
        rounded_kv: Nothing here: this backend rounds no keys.

    Returns:
        [N, H, D], the dtype of ``query``.

    Raises:
        ValueError: Shapes do not fit, or a tensor is not on one GPU with the others.
        TypeError: Dtypes differ or are not supported.
    """
    _check("attention_varlen", query, key, value, 3)
    _check_integers("attention_varlen", "cu_seqlens_q", cu_seqlens_q, None)
    _check_integers("attention_varlen", "cu_seqlens_k", cu_seqlens_k, len(cu_seqlens_q))
    check_device("attention_varlen", query, cu_seqlens_q, cu_seqlens_k)
    rows = [_rows(x) for x in (query, key, value)]
    return torch.ops.rzero.attention(*rows, cu_seqlens_q, cu_seqlens_k, None, None, scale)[0]


def attention_paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    *,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    scale: float,
    rounded_kv: bool = False,
) -> Tensor:
    """Causal attention of packed queries over keys and values in pages, for sampling: no gradient.

    The bits of ``attention_varlen``, whatever the pages' size and order. Token t of request b is in page
    page_table[b, t // S] at place t % S; the new keys and values are in the cache already; the last query
    stands at the last of the ``seqlens_k`` positions. What lies in other places, NaN included, has no effect.

    Args:
        query: [N, H, D] float32, bfloat16 or float16, D <= 256.
        key_pages: [P, S, G, D], the dtype of ``query``, any strides but the last.
        value_pages: [P, S, G, D].
        page_table: int [B, W]; entries past a request's last page may hold anything.
        cu_seqlens_q: int [B+1], offsets of the requests in ``query``.
        seqlens_k: int [B], tokens of each request in the cache, those of its queries included.
        scale: Factor of the scores.
        rounded_kv: Nothing here: this backend rounds no keys.

    Returns:
        [N, H, D], the dtype of ``query``.

    Raises:
        ValueError: Shapes do not fit, or a tensor is not on one GPU with the others.
        TypeError: Dtypes differ or are not supported.
    """
    _check("attention_paged", query, key_pages, value_pages, 4)
    _check_integers("attention_paged", "cu_seqlens_q", cu_seqlens_q, None)
    _check_integers("attention_paged", "seqlens_k", seqlens_k, len(cu_seqlens_q) - 1)
    if page_table.ndim != 2 or len(page_table) != len(seqlens_k):
        raise ValueError(
            f"attention_paged: page_table must have shape [{len(seqlens_k)}, W], got {list(page_table.shape)}"
        )
    check_device("attention_paged", query, page_table, cu_seqlens_q, seqlens_k)
    with torch.no_grad():
        return torch.ops.rzero.attention(
            _rows(query),
            _rows(key_pages),
            _rows(value_pages),
            cu_seqlens_q,
            seqlens_k,
            page_table.contiguous(),
            None,
            scale,
        )[0]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    rounded_kv: bool = False,
) -> Tensor:
    """Softmax(scale * query key^T) value over the visible keys, for padded batches.

    The bits of ``attention_varlen``. With a mask, the keys that some query of a row of the batch may see are
    first moved to its beginning, in their order, so that padding has no place in any tile, on either side.

    Args:
        query: [B, H, Tq, D] float32, bfloat16 or float16, D <= 256; receives gradient.
        key: [B, G, Tk, D], the dtype of ``query``, H a multiple of G; receives gradient.
        value: [B, G, Tk, D]; receives gradient.
        scale: Factor of the scores, usually D**-0.5.
        mask: bool, broadcastable to [B, H, Tq, Tk], True where the query may see the key. None is causal, the
            last query and the last key at one position. A query that sees nothing gives zeros.
        rounded_kv: Nothing here: this backend rounds no keys.

    Returns:
        [B, H, Tq, D], the dtype of ``query``.

    Raises:
        ValueError: Shapes do not fit, or a tensor is not on one GPU with the others.
        TypeError: Dtypes differ or are not supported.
    """
    _check("attention", query, key, value, 4, heads_first=True)
    batch, heads, queries, _ = query.shape
    keys, device = key.shape[2], query.device
    if mask is None and queries > keys:
        raise ValueError(f"attention: causal queries must be at most the {keys} keys, got {queries}")
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=device)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"attention: mask must have dtype torch.bool, got {mask.dtype}")
        check_device("attention", query, mask)
        mask = mask[(None,) * (4 - mask.ndim)].expand(batch, -1, queries, keys)
        seen = mask.flatten(1, 2).any(1)
        order = seen.logical_not().sort(stable=True).indices
        lengths = seen.sum(1, dtype=torch.int32)
        mask = mask.gather(3, order[:, None, None].expand(mask.shape)).expand(-1, heads, -1, -1)
        key, value = (x.gather(2, order[:, None, :, None].expand(x.shape)) for x in (key, value))
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=device) * queries
    out, _ = torch.ops.rzero.attention(
        _rows(rearrange(query, "b h t d -> (b t) h d")),
        _rows(rearrange(key, "b g t d -> b t g d")),
        _rows(rearrange(value, "b g t d -> b t g d")),
        offsets,
        lengths,
        None,
        mask,
        scale,
    )
    return rearrange(out, "(b t) h d -> b h t d", b=batch)


def round_kv(x: Tensor) -> Tensor:
    """``x`` as it is: this backend uses keys and values unrounded, in the dtype they are cached in."""
    return x


def _rows(x: Tensor) -> Tensor:
    """``x`` with rows that lie together."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(
    function: str, query: Tensor, key: Tensor, value: Tensor, ndim: int, *, heads_first: bool = False
) -> None:
    layouts = {3: ("[N, H, D]", "[M, G, D]"), 4: ("[N, H, D]", "[P, S, G, D]")}
    wanted = ("[B, H, Tq, D]", "[B, G, Tk, D]") if heads_first else layouts[ndim]
    axis = 1 if heads_first else -2
    fits = (
        query.ndim == (4 if heads_first else 3)
        and key.ndim == ndim
        and key.shape == value.shape
        and key.shape[-1] == query.shape[-1]
        and key.shape[axis] > 0
        and query.shape[1] % key.shape[axis] == 0
        and (not heads_first or key.shape[0] == query.shape[0])
    )
    if not fits:
        raise ValueError(
            f"{function}: query, key and value must have shapes {wanted[0]} and twice {wanted[1]} with H a "
            f"multiple of G, got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        )
    if not 0 < query.shape[-1] <= MAX_HEAD:
        raise ValueError(f"{function}: the head size must lie in [1, {MAX_HEAD}], got {query.shape[-1]}")
    check_dtypes(function, query, key, value)
    check_device(function, query, key, value)


def _check_integers(function: str, name: str, x: Tensor, length: int | None) -> None:
    if x.ndim != 1 or (len(x) < 2 if length is None else len(x) != length):
        wanted = "[B + 1], B > 0" if length is None else f"[{length}]"
        raise ValueError(f"{function}: {name} must have shape {wanted}, got {list(x.shape)}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{function}: {name} must have dtype int32 or int64, got {x.dtype}")
