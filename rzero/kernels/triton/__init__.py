"""The Triton backend: CUDA and ROCm, invariant by construction (triton.contract, docs/kernels.md)."""

from rzero.kernels.exact.rotary import rope_table
from rzero.kernels.triton.causal_attention import attention, attention_paged, attention_varlen, round_kv
from rzero.kernels.triton.linear_ops import linear, linear_joined, matmul
from rzero.kernels.triton.mlp import gated_mlp, silu_mul
from rzero.kernels.triton.norm import add_rms_norm, rms_norm
from rzero.kernels.triton.rotary import rope
from rzero.kernels.triton.softmax import linear_log_probs, log_softmax
from rzero.kernels.triton.vendor import certify, withdraw_certificates

__all__ = [
    "add_rms_norm",
    "attention",
    "attention_paged",
    "attention_varlen",
    "certify",
    "gated_mlp",
    "linear",
    "linear_joined",
    "linear_log_probs",
    "log_softmax",
    "matmul",
    "rms_norm",
    "rope",
    "rope_table",
    "round_kv",
    "silu_mul",
    "withdraw_certificates",
]
