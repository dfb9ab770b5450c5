"""The exact backend: plain torch on any device, invariant by arithmetic (exact.rounding has the idea)."""

from rzero.kernels.exact.causal_attention import attention, round_kv
from rzero.kernels.exact.elementary import cos, exp, log, sin
from rzero.kernels.exact.layouts import attention_paged, attention_varlen
from rzero.kernels.exact.mlp import gated_mlp, silu_mul
from rzero.kernels.exact.norm import rms_norm
from rzero.kernels.exact.products import linear, linear_joined, matmul
from rzero.kernels.exact.rotary import rope, rope_table
from rzero.kernels.exact.softmax import linear_log_probs, log_softmax
from rzero.kernels.exact.weights import forget_weights

__all__ = [
    "attention",
    "attention_paged",
    "attention_varlen",
    "cos",
    "exp",
    "forget_weights",
    "gated_mlp",
    "linear",
    "linear_joined",
    "linear_log_probs",
    "log",
    "log_softmax",
    "matmul",
    "rms_norm",
    "rope",
    "rope_table",
    "round_kv",
    "silu_mul",
    "sin",
]
