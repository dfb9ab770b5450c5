"""Kernels whose output row depends only on that row's own inputs and the weights, bit for bit.

``linear``, ``attention`` and the other ops are functions of tensors; ``align`` puts them under a Hugging
Face model; ``kernel_fingerprint`` names what they compute with. rzero.kernels.contract states the contract
and all signatures, rzero.kernels.exact keeps it by arithmetic on any device. Importing this needs torch and
einops alone.
"""

from rzero.kernels.align import Alignment, align
from rzero.kernels.contract import kernel_fingerprint, numeric_contract
from rzero.kernels.dispatch import (
    attention,
    attention_paged,
    attention_varlen,
    forget_weights,
    gated_mlp,
    linear,
    linear_joined,
    linear_log_probs,
    log_softmax,
    matmul,
    rms_norm,
    rope,
    rope_table,
    round_kv,
    silu_mul,
)

__all__ = [
    "Alignment",
    "align",
    "attention",
    "attention_paged",
    "attention_varlen",
    "forget_weights",
    "gated_mlp",
    "kernel_fingerprint",
    "linear",
    "linear_joined",
    "linear_log_probs",
    "log_softmax",
    "matmul",
    "numeric_contract",
    "rms_norm",
    "rope",
    "rope_table",
    "round_kv",
    "silu_mul",
]
