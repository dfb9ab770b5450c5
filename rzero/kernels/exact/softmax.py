"""log_softmax and linear_log_probs: log-probabilities and entropies, never with all logits in memory."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rzero.kernels.exact.elementary import LOG2_E, exp2_, log64
from rzero.kernels.exact.products import FLOATS, check_linear, exact_product
from rzero.kernels.exact.rounding import MAGIC, round_to_grid
from rzero.kernels.exact.scratch import scratch
from rzero.kernels.exact.weights import rounded_weight

__all__ = ["linear_log_probs", "log_softmax"]

SUM_BITS = 33
MAX_CLASSES = 1 << 20
CHUNK = 1 << 15  # float64 logits handled at a time
GRAD_CHUNK = 1 << 21  # native logits held at a time in the backward


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities over the last dimension, float32.

    Invariance. The maximum has no order; d = z - max in float64 and p = exp(d), owned, are elementwise. p is
    rounded to multiples of 2**-33 and is at most 1, so a sum of up to 2**20 of them is an integer below
    2**53 of these units: exact in any order. The result is float32(d - ln sum p), the logarithm owned.

    Args:
        logits: [..., V] float32, bfloat16 or float16, V <= 2**20; receives gradient. -inf is an impossible
            class.

    Returns:
        float32 [..., V].

    Raises:
        ValueError: V is 0 or more than 2**20.
        TypeError: another dtype.

    Example:
        >>> log_softmax(torch.tensor([[0.0, 0.0]])).exp()
        tensor([[0.5000, 0.5000]])
    """
    _check_classes("log_softmax", logits.shape[-1])
    if logits.dtype not in FLOATS:
        raise TypeError(
            f"log_softmax: logits must have dtype float32, bfloat16 or float16, got {logits.dtype}"
        )
    if torch.is_grad_enabled() and logits.requires_grad:
        return _LogSoftmax.apply(logits)  # type: ignore[return-value]
    return _log_softmax(logits)


def linear_log_probs(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability of a token and entropy of softmax(hidden W^T / temperature), in blocks of rows.

    ``log_softmax(linear(hidden, weight).float() / temperature)`` gathered at ``token_ids`` has the same bits.

    Invariance. Logits are those of ``linear`` in the dtype of ``hidden``, as in an engine that materialises
    them, then float32, then divided by the temperature; log-probabilities are the expression of
    ``log_softmax``. The entropy is ln sum p - (sum p d) / sum p, with p d, at most 1/e in magnitude, on the
    grid 2**-33 too: sums exact in any order. Blocks of rows do not show. The gradient recomputes native
    logits, by blocks of rows as well.

    Args:
        hidden: [..., K] float32, bfloat16 or float16; receives gradient.
        weight: [V, K], the dtype of ``hidden``; receives gradient.
        token_ids: int [...], each in [0, V).
        temperature: > 0; logits are divided by it.

    Returns:
        Log-probabilities in nats and entropies in nats, float32 [...] each, both differentiable.

    Raises:
        ValueError: shapes do not fit, a token is out of range, or the temperature is not positive.
        TypeError: dtypes differ or are not supported.

    Example:
        >>> hidden, weight = torch.zeros(3, 4), torch.randn(5, 4)
        >>> log_probs, entropies = linear_log_probs(hidden, weight, torch.tensor([0, 4, 2]))
        >>> torch.allclose(entropies, -log_probs)
        True
    """
    check_linear(hidden, (weight,), (None,))
    _check_classes("linear_log_probs", weight.shape[0])
    if token_ids.shape != hidden.shape[:-1]:
        raise ValueError(
            f"linear_log_probs: token_ids must have shape {list(hidden.shape[:-1])}, "
            f"got {list(token_ids.shape)}"
        )
    if token_ids.numel() and not (int(token_ids.min()) >= 0 and int(token_ids.max()) < weight.shape[0]):
        raise ValueError(
            f"linear_log_probs: token_ids must lie in [0, {weight.shape[0]}), "
            f"got {int(token_ids.min())} to {int(token_ids.max())}"
        )
    if not temperature > 0:
        raise ValueError(f"linear_log_probs: temperature must be positive, got {temperature}")
    return _LinearLogProbs.apply(hidden, weight, token_ids, temperature)  # type: ignore[return-value]


def _shifted(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[R, V] -> d = z - max and p = exp(d), float64 [R, V] in scratch, and the exact sum of rounded p."""
    shifted, t, p, spare = (scratch(i, logits.shape, logits.device) for i in range(4))
    shifted.copy_(logits)
    shifted.sub_(shifted.amax(-1, keepdim=True))
    exp2_(torch.mul(shifted, LOG2_E, out=t), p, spare)
    rounded = torch.add(p, MAGIC * 2.0**-SUM_BITS, out=t).sub_(MAGIC * 2.0**-SUM_BITS)
    return shifted, p, rounded.sum(-1, keepdim=True)


def _log_softmax(logits: Tensor) -> Tensor:
    flat = logits.reshape(-1, logits.shape[-1])
    out = torch.empty(flat.shape, dtype=torch.float32, device=flat.device)
    block = max(1, CHUNK // flat.shape[1])
    for start in range(0, flat.shape[0], block):
        shifted, _, total = _shifted(flat[start : start + block])
        out[start : start + block] = shifted.sub_(log64(total))
    return out.view(logits.shape)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        y = _log_softmax(logits)
        ctx.save_for_backward(y)
        ctx.dtype = logits.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return (grad - y.exp() * grad.sum(-1, keepdim=True)).to(ctx.dtype)


def _tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divide by a tensor: dividing by a Python number is multiplying by its reciprocal on some devices."""
    return logits.to(torch.float32).div(temperature)


def _block_log_probs(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 logits [R, V] -> log-probs and entropies, float64 [R, 1] each."""
    shifted, p, total = _shifted(logits)
    log_total = log64(total)
    log_probs = shifted.gather(1, token_ids) - log_total
    products = p.mul_(shifted.clamp_(min=-1e300))  # an impossible class adds 0, not 0 * -inf
    mean = round_to_grid(products, MAGIC * 2.0**-SUM_BITS).sum(-1, keepdim=True).div_(total)
    return log_probs, log_total - mean


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, token_ids, temperature):
        flat, tokens = hidden.reshape(-1, hidden.shape[-1]), token_ids.reshape(-1, 1).long()
        rounded = rounded_weight(weight, rows=flat.shape[0])
        divisor = torch.tensor([temperature], dtype=torch.float32, device=hidden.device)
        results = tuple(flat.new_empty(flat.shape[0], 1, dtype=torch.float32) for _ in range(2))
        block = max(1, CHUNK // weight.shape[0])
        logits = flat.new_empty(min(block, flat.shape[0]), weight.shape[0])
        for start in range(0, flat.shape[0], block):
            part = slice(start, start + block)
            part_logits = logits[: flat[part].shape[0]]
            exact_product(flat[part], rounded, part_logits)
            values = _block_log_probs(_tempered(part_logits, divisor), tokens[part])
            for result, value in zip(results, values, strict=True):
                result[part] = value
        log_probs, entropies = results
        ctx.save_for_backward(flat, weight, tokens, entropies)
        ctx.temperature, ctx.shape = temperature, hidden.shape
        return log_probs.view(token_ids.shape), entropies.view(token_ids.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropies):
        """By blocks of rows, dz = (g_p (1[t] - p) - g_H p (log p + H)) / T with native logits."""
        flat, weight, tokens, entropies = ctx.saved_tensors
        grad_log_probs, grad_entropies = (g.reshape(-1, 1) for g in (grad_log_probs, grad_entropies))
        grad_hidden = torch.empty_like(flat) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        block = max(1, GRAD_CHUNK // weight.shape[0])
        for start in range(0, flat.shape[0], block):
            part = slice(start, start + block)
            log_p = torch.log_softmax((flat[part] @ weight.t()).float().div_(ctx.temperature), -1)
            p = log_p.exp()
            factor = log_p.add_(entropies[part]).mul_(grad_entropies[part]).add_(grad_log_probs[part])
            grad = p.mul_(factor).neg_().scatter_add_(1, tokens[part], grad_log_probs[part])
            grad = grad.div_(ctx.temperature).to(flat.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), flat[part])
        return None if grad_hidden is None else grad_hidden.view(ctx.shape), grad_weight, None, None


def _check_classes(function: str, classes: int) -> None:
    if not 0 < classes <= MAX_CLASSES:
        raise ValueError(f"{function}: the number of classes must lie in [1, {MAX_CLASSES}], got {classes}")
