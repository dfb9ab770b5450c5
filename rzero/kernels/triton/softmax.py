"""log_softmax and linear_log_probs as torch operators; the second never holds [N, V] logits."""

import torch
import triton
from torch import Tensor

from rzero.kernels.triton.contract import VOCAB_CHUNK, VOCAB_SPLIT, VOCAB_TILE, chain_k, segments
from rzero.kernels.triton.devices import FLOATS, architecture, check_device, check_dtypes, family, run
from rzero.kernels.triton.launch import Launch, options, vocabulary_launch
from rzero.kernels.triton.products import launch_product
from rzero.kernels.triton.vocabulary import (
    linear_split_kernel,
    log_softmax_backward_kernel,
    log_softmax_kernel,
    logit_gradient_kernel,
    logits_split_kernel,
    merge_kernel,
)

__all__ = ["linear_log_probs", "log_softmax"]


def _merge(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[3, rows, splits] -> maximum, log sum and entropy, float32 [rows] each."""
    _, rows, splits = parts.shape
    highest, log_sum, entropy = (parts.new_empty(rows) for _ in range(3))
    block = triton.next_power_of_2(splits)
    run(merge_kernel, (rows,), *parts, highest, log_sum, entropy, splits, BLOCK=block, num_warps=1)
    return highest, log_sum, entropy


@torch.library.custom_op("rzero::log_softmax", mutates_args=())
def log_probs_of(logits: Tensor) -> Tensor:
    """[R, V] contiguous -> float32 [R, V]."""
    rows, columns = logits.shape
    out = logits.new_empty(rows, columns, dtype=torch.float32)
    if not rows:
        return out
    splits, height = triton.cdiv(columns, VOCAB_SPLIT), 8
    tiles = triton.cdiv(rows, height)
    parts = out.new_empty(3, rows, splits)
    # Two warps: eight elements a thread on either vendor, which are loads of 16 bytes.
    sizes = {"BLOCK_M": height, "TILE": VOCAB_TILE, "SPLIT": VOCAB_SPLIT}
    run(logits_split_kernel, (tiles, splits), logits, *parts, rows, columns, splits, num_warps=2, **sizes)
    highest, log_sum, _ = _merge(parts)
    grid = (tiles, triton.cdiv(columns, 512))
    run(log_softmax_kernel, grid, logits, highest, log_sum, out, rows, columns, BLOCK_M=height, BLOCK_N=512)
    return out


@log_probs_of.register_fake
def _(logits):
    return torch.empty_like(logits, dtype=torch.float32)


@torch.library.custom_op("rzero::log_softmax_backward", mutates_args=())
def log_probs_backward(grad: Tensor, log_probs: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous [R, V] each."""
    out = torch.empty_like(log_probs, dtype=dtype)
    if out.numel():
        run(log_softmax_backward_kernel, (out.shape[0],), grad, log_probs, out, out.shape[1], BLOCK=1024)
    return out


@log_probs_backward.register_fake
def _(grad, log_probs, dtype):
    return torch.empty_like(log_probs, dtype=dtype)


def _save_log_probs(ctx, inputs, output):
    ctx.save_for_backward(output)
    ctx.dtype = inputs[0].dtype


log_probs_of.register_autograd(
    lambda ctx, grad: torch.ops.rzero.log_softmax_backward(grad.contiguous(), *ctx.saved_tensors, ctx.dtype),
    setup_context=_save_log_probs,
)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities over the last dimension, float32; rzero.kernels.triton.vocabulary has the order.

    Args:
        logits: [..., V] float32, bfloat16 or float16; receives gradient. -inf is an impossible class.

    Returns:
        float32 [..., V].

    Raises:
        ValueError: V is 0, or the tensor is not on a GPU.
        TypeError: Another dtype.
    """
    if logits.ndim < 1 or not logits.shape[-1]:
        raise ValueError(f"log_softmax: logits must have shape [..., V], V > 0, got {list(logits.shape)}")
    check_dtypes("log_softmax", logits)
    check_device("log_softmax", logits)
    flat = logits.reshape(-1, logits.shape[-1]).contiguous()
    return torch.ops.rzero.log_softmax(flat).view(logits.shape)


def _common(
    hidden: Tensor, weight: Tensor, temperature: float, launch: Launch | None = None
) -> tuple[Launch, tuple[float, ...], dict[str, object]]:
    """Launch parameters, sizes and constants that the forward and the backward kernel share."""
    (rows, depth), columns = hidden.shape, weight.shape[0]
    chips = family(architecture(hidden.device))
    launch = launch or vocabulary_launch(rows, hidden.dtype, chips)
    count, block_k = segments(columns, depth, hidden.dtype, chips), chain_k(hidden.dtype)
    constants = {
        "SEGMENTS": count,
        "DIVIDE": temperature != 1.0,
        "WHOLE": depth % (block_k * count) == 0,
        "BLOCK_M": launch.block_m,
        "BLOCK_K": block_k,
        **options(launch, chips),
    }
    return launch, (rows, columns, depth, hidden.stride(0), weight.stride(0), temperature), constants


def launch_linear_log_probs(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: float, *, launch: Launch | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability, entropy, maximum and log sum of each row, float32 [R]."""
    launch, sizes, constants = _common(hidden, weight, temperature, launch)
    rows, splits = len(hidden), triton.cdiv(len(weight), VOCAB_SPLIT)
    parts = hidden.new_empty(3, rows, splits, dtype=torch.float32)
    # A token outside the vocabulary is in no split: its log-probability is NaN, never a neighbour's.
    selected = hidden.new_full((rows,), float("nan"), dtype=torch.float32)
    grid = (triton.cdiv(rows, launch.block_m) * splits,)
    inputs, outputs = (hidden, weight, token_ids), (*parts, selected, splits)
    run(linear_split_kernel, grid, *inputs, *outputs, *sizes, TILE=VOCAB_TILE, SPLIT=VOCAB_SPLIT, **constants)
    highest, log_sum, entropies = _merge(parts)
    return (selected - highest) - log_sum, entropies, highest, log_sum


@torch.library.custom_op("rzero::linear_log_probs", mutates_args=())
def scores(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[R, K], [V, K], int64 [R] -> log-probability, entropy, maximum and log sum, float32 [R] each."""
    if not hidden.shape[0]:
        return tuple(hidden.new_empty(0, dtype=torch.float32) for _ in range(4))  # type: ignore[return-value]
    return launch_linear_log_probs(hidden, weight, token_ids, temperature)


@scores.register_fake
def _(hidden, weight, token_ids, temperature):
    return tuple(hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(4))


@torch.library.custom_op("rzero::linear_log_probs_backward", mutates_args=())
def scores_backward(
    grad_log_probs: Tensor,
    grad_entropies: Tensor,
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    entropies: Tensor,
    row_max: Tensor,
    row_log_sum: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden and weight, by ascending chunks of the vocabulary."""
    rows, (columns, depth) = hidden.shape[0], weight.shape
    grad_weight = torch.zeros_like(weight)
    grad_hidden = hidden.new_zeros(1, rows, depth, dtype=torch.float32)
    if not rows:
        return torch.empty_like(hidden), grad_weight
    launch, sizes, constants = _common(hidden, weight, temperature)
    inputs = (hidden, weight, token_ids, row_max, row_log_sum, entropies, grad_log_probs, grad_entropies)
    buffer = hidden.new_empty(rows * min(VOCAB_CHUNK, columns))
    for first in range(0, columns, VOCAB_CHUNK):
        width = min(VOCAB_CHUNK, columns - first)
        grad_logits = buffer[: rows * width].view(1, rows, width)
        grid = (triton.cdiv(rows, launch.block_m) * triton.cdiv(width, launch.block_n),)
        outputs = (grad_logits, first, width)
        run(logit_gradient_kernel, grid, *inputs, *outputs, *sizes, BLOCK_N=launch.block_n, **constants)
        chunk = slice(first, first + width)
        launch_product(grad_logits, weight[chunk].unsqueeze(0), None, grad_hidden, segments=1, add=True)
        launch_product(grad_logits.mT, hidden.unsqueeze(0), None, grad_weight[chunk].unsqueeze(0), segments=1)
    return grad_hidden[0].to(hidden.dtype), grad_weight


@scores_backward.register_fake
def _(grad_log_probs, grad_entropies, hidden, weight, *rest):
    return torch.empty_like(hidden), torch.empty_like(weight)


def _save_scores(ctx, inputs, output):
    hidden, weight, token_ids, ctx.temperature = inputs
    _, entropies, highest, log_sum = output
    ctx.save_for_backward(hidden, weight, token_ids, entropies, highest, log_sum)
    ctx.mark_non_differentiable(highest, log_sum)


def _scores_backward(ctx, grad_log_probs, grad_entropies, *_):
    grads = torch.ops.rzero.linear_log_probs_backward(
        grad_log_probs.contiguous(), grad_entropies.contiguous(), *ctx.saved_tensors, ctx.temperature
    )
    return *grads, None, None


scores.register_autograd(_scores_backward, setup_context=_save_scores)


def linear_log_probs(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability of a token and entropy of softmax(hidden W^T / temperature), logits never in memory.

    ``log_softmax(linear(hidden, weight).float() / temperature)`` gathered at ``token_ids`` has the same bits,
    with an IEEE division. Memory: 12 bytes a token and 1,024 logits; in the backward the gradients of 4,096
    logits a token at a time. The gradient of ``hidden`` sums chunks of the vocabulary in ascending order,
    that of ``weight`` tokens in ascending order; no atomics.

    Token ids are not checked against V, which would stop the host until the GPU has answered: one outside
    [0, V) gets NaN.

    Args:
        hidden: [..., K] float32, bfloat16 or float16; receives gradient.
        weight: [V, K], the dtype of ``hidden``; receives gradient.
        token_ids: int [...], each in [0, V).
        temperature: > 0; logits are divided by it.

    Returns:
        Log-probabilities in nats and entropies in nats, float32 [...] each, both differentiable.

    Raises:
        ValueError: Shapes do not fit, the temperature is not positive, or a tensor is not on one GPU with the
            others.
        TypeError: Dtypes differ or are not supported.
    """
    if weight.ndim != 2 or hidden.ndim < 1 or weight.shape[1] != hidden.shape[-1] or not weight.numel():
        raise ValueError(
            "linear_log_probs: hidden and weight must have shapes [..., K] and [V, K], "
            f"got {list(hidden.shape)} and {list(weight.shape)}"
        )
    if token_ids.shape != hidden.shape[:-1]:
        raise ValueError(
            f"linear_log_probs: token_ids must have shape {list(hidden.shape[:-1])}, "
            f"got {list(token_ids.shape)}"
        )
    if token_ids.dtype in FLOATS or token_ids.dtype == torch.bool:
        raise TypeError(f"linear_log_probs: token_ids must be integers, got {token_ids.dtype}")
    if not temperature > 0:
        raise ValueError(f"linear_log_probs: temperature must be positive, got {temperature}")
    check_dtypes("linear_log_probs", hidden, weight)
    check_device("linear_log_probs", hidden, weight, token_ids)
    log_probs, entropies, _, _ = torch.ops.rzero.linear_log_probs(
        hidden.reshape(-1, hidden.shape[-1]).contiguous(),
        weight.contiguous(),
        token_ids.reshape(-1).long().contiguous(),
        float(temperature),
    )
    return log_probs.view(token_ids.shape), entropies.view(token_ids.shape)
