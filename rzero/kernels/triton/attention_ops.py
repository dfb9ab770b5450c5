"""Attention as torch operators: launches, fakes and gradient.

Keys are packed, [M, G, D] with ``lengths`` the offsets [B + 1]; or padded, [B, T, G, D] with ``lengths`` [B];
or in pages, [P, S, G, D] with ``page_table`` [B, W] and ``lengths`` [B].
"""

import torch
import triton
from torch import Tensor

from rzero.kernels.triton.attention_backward import (
    attention_delta_kernel,
    attention_key_gradient_kernel,
    attention_query_gradient_kernel,
)
from rzero.kernels.triton.attention_forward import attention_kernel, attention_merge_kernel
from rzero.kernels.triton.contract import KV_SPLIT, kv_tile
from rzero.kernels.triton.devices import architecture, family, run
from rzero.kernels.triton.launch import Launch, attention_launch, options

PROGRAMS = 256  # fewer than so many, and splits of keys get programs of their own


def _key_strides(key: Tensor) -> list[int]:
    """Of pages or rows of the batch, of tokens and of heads."""
    return [0] * (4 - key.ndim) + list(key.stride()[:-1])


def _table_sizes(key: Tensor, page_table: Tensor | None) -> tuple[int, int]:
    """Table width and page size."""
    return (0, 0) if page_table is None else (page_table.shape[1], key.shape[1])


def _mask_strides(mask: Tensor | None) -> list[int]:
    return [0, 0, 0, 0] if mask is None else list(mask.stride())


def _constants(
    query: Tensor, key: Tensor, page_table: Tensor | None, mask: Tensor | None
) -> dict[str, object]:
    return {
        "GROUP": query.shape[1] // key.shape[-2],
        "PAGED": page_table is not None,
        "PADDED": page_table is None and key.ndim == 4,
        "MASK": mask is not None,
        "BLOCK_D": max(16, triton.next_power_of_2(query.shape[2])),
        "KV_TILE": kv_tile(query.dtype),
    }


def launch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    mask: Tensor | None,
    scale: float,
    *,
    launch: Launch | None = None,
    split: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [N, H, D] and logarithms of the denominators, float32 [N, H].

    Args:
        query: [N, H, D], its last stride 1.
        key: [M, G, D], [B, T, G, D] or [P, S, G, D], its last stride 1.
        value: The shape of ``key``, its last stride 1.
        offsets: int [B + 1], of the sequences in ``query``.
        lengths: int [B + 1] or [B].
        page_table: int [B, W], or None.
        mask: bool [B, H, Tq, Tk], any strides, or None for causal.
        scale: Factor of the scores.
        launch: Parameters; the table's by default.
        split: Splits of keys as programs of their own; by default where there would be few programs.
    """
    (tokens, heads, size), groups, count = query.shape, key.shape[-2], len(offsets) - 1
    chips = family(architecture(query.device))
    launch = launch or attention_launch(size, query.dtype, chips)
    constants = _constants(query, key, page_table, mask)
    width, page_size = _table_sizes(key, page_table)
    most = width * page_size if page_table is not None else key.shape[-3]
    splits = triton.cdiv(most, KV_SPLIT)
    tiles = tokens * (heads // groups) // launch.block_m + count
    if split is None:
        # A mask takes registers that the state of merged splits has not left.
        split = mask is not None or (splits > 1 and tiles * groups < PROGRAMS)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    log_sums = query.new_empty(tokens, heads, dtype=torch.float32)
    parts = query.new_empty((splits, tokens, heads, size) if split else 0, dtype=torch.float32)
    states = query.new_empty((splits, tokens, heads, 2) if split else 0, dtype=torch.float32)
    run(
        attention_kernel,
        (tiles, groups, splits if split else 1),
        query,
        key,
        value,
        offsets,
        lengths,
        page_table,
        mask,
        out,
        log_sums,
        parts,
        states,
        scale,
        count,
        tokens,
        heads,
        size,
        width,
        page_size,
        *query.stride()[:2],
        *_key_strides(key),
        *_key_strides(value),
        *_mask_strides(mask),
        SPLIT=split,
        BLOCK_M=launch.block_m,
        KV_SPLIT=KV_SPLIT,
        **constants,
        **options(launch, chips),
    )
    if split:
        settings = {name: constants[name] for name in ("PAGED", "PADDED", "MASK", "BLOCK_D")}
        run(
            attention_merge_kernel,
            (tokens, heads),
            offsets,
            lengths,
            out,
            log_sums,
            parts,
            states,
            count,
            tokens,
            heads,
            size,
            KV_SPLIT=KV_SPLIT,
            num_warps=1,
            **settings,
        )
    return out, log_sums


@torch.library.custom_op("rzero::attention", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``launch_attention`` with what the tables say."""
    if not query.numel():
        return torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
    return launch_attention(query, key, value, offsets, lengths, page_table, mask, scale)


@attend.register_fake
def _(query, key, value, offsets, lengths, page_table, mask, scale):
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return out, query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("rzero::attention_backward", mutates_args=())
def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    mask: Tensor | None,
    out: Tensor,
    log_sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, packed or padded; ``grad`` is contiguous."""
    (tokens, heads, size), groups, count = query.shape, key.shape[-2], len(offsets) - 1
    grad_query = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    grad_key = torch.zeros(key.shape, dtype=key.dtype, device=key.device)
    grad_value = torch.zeros_like(grad_key)
    if not query.numel():
        return grad_query, grad_key, grad_value
    chips = family(architecture(query.device))
    launch = attention_launch(size, query.dtype, chips, backward=True)
    constants = _constants(query, key, page_table, mask)
    settings = {"BLOCK_M": launch.block_m, **constants, **options(launch, chips)}
    width, page_size = _table_sizes(key, page_table)
    delta = torch.empty_like(log_sums)
    rows = tokens * heads
    run(
        attention_delta_kernel,
        (triton.cdiv(rows, 16),),
        grad,
        out,
        delta,
        rows,
        size,
        ROWS=16,
        BLOCK_D=constants["BLOCK_D"],
    )
    inputs = (query, key, value, grad, log_sums, delta, offsets, lengths, page_table, mask)
    strides = (*query.stride()[:2], *_key_strides(key), *_key_strides(value))
    tiles = tokens * (heads // groups) // launch.block_m + count
    run(
        attention_query_gradient_kernel,
        (tiles, groups),
        *inputs,
        grad_query,
        scale,
        count,
        heads,
        size,
        width,
        page_size,
        *strides,
        *_mask_strides(mask),
        **settings,
    )
    tile = kv_tile(query.dtype)
    key_tiles = triton.cdiv(key.shape[-3], tile)
    grid = key_tiles * count if key.ndim == 4 else key.shape[0] // tile + count
    run(
        attention_key_gradient_kernel,
        (grid, groups),
        *inputs,
        grad_key,
        grad_value,
        scale,
        count,
        heads,
        size,
        width,
        page_size,
        key_tiles,
        *strides,
        *_key_strides(grad_key),
        *_mask_strides(mask),
        **settings,
    )
    return grad_query, grad_key, grad_value


@attend_backward.register_fake
def _(grad, query, key, value, *rest):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))


def _save(ctx, inputs, output):
    query, key, value, offsets, lengths, page_table, mask, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, offsets, lengths, page_table, mask, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):
    grads = torch.ops.rzero.attention_backward(grad.contiguous(), *ctx.saved_tensors, ctx.scale)
    return *grads, None, None, None, None, None


attend.register_autograd(_backward, setup_context=_save)
