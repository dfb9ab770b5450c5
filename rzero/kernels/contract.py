"""The contract that every backend keeps, and the fingerprint that names a backend and its constants.

**An output row depends only on that row's own inputs and the weights**, bit for bit: whatever else is in the
batch, however sequences are padded, packed, permuted, chunked, cached or split between prefill and decode,
whatever the page size, the alignment of memory and the number of threads. The backward is as fast as the
native one and the same from run to run, but not invariant.

Signatures, the same in every backend (tensors positional, all else by keyword):

    linear(x [..., K], weight [N, K], bias [N] | None) -> [..., N]
    linear_joined(x, weights, biases | None) -> [..., sum N_i]             the bits of `linear`, side by side
    matmul(a [..., M, K], b [..., K, N]) -> [..., M, N]
    rms_norm(x [..., K], weight [K], *, eps) -> [..., K]
    silu_mul(gate, up) -> the shape of gate
    gated_mlp(x [..., K], gate [I, K], up [I, K], down [N, I]) -> [..., N]  the bits of linear and silu_mul
    rope_table(inverse_frequencies [D/2], *, length, scaling=1.0) -> float32 cosines, sines [length, D]
    rope(x [..., D], cosines [..., D], sines [..., D]) -> [..., D]         (cos, cos) and (-sin, sin)
    round_kv(x [..., D]) -> [..., D]              what `attention` makes of a key or value before it uses it
    attention(query [B, H, Tq, D], key [B, G, Tk, D], value [B, G, Tk, D], *, scale, mask=None,
              rounded_kv=False) -> [B, H, Tq, D]
    attention_varlen(query [N, H, D], key [M, G, D], value [M, G, D], *, cu_seqlens_q, cu_seqlens_k, scale,
                     rounded_kv=False) -> [N, H, D]
    attention_paged(query [N, H, D], key_pages [P, S, G, D], value_pages [P, S, G, D], *, page_table,
                    cu_seqlens_q, seqlens_k, scale, rounded_kv=False) -> [N, H, D]
    log_softmax(logits [..., V]) -> float32 [..., V]
    linear_log_probs(hidden [..., K], weight [V, K], token_ids [...], *, temperature=1.0)
        -> float32 log-probs [...], entropies [...]
    forget_weights(weights) -> None               drop what is cached of them

Rounding points: a product of rows once to float32, bias added in float32, once to the dtype of the input;
rms_norm as Hugging Face casts; silu_mul, rope and attention once, at their ends; logits in the dtype of
`hidden`, then float32, then divided by the temperature. NaN stays NaN, its payload is not fixed.

Two processes may compare log-probabilities bit for bit only if their fingerprints are equal.
"""

import hashlib
import json

import torch

from rzero.kernels.exact.attention_forward import DENOMINATOR_BITS, KEY_BITS, VALUE_BITS, WEIGHT_BITS
from rzero.kernels.exact.elementary import EXP2_POLY, HALF_PI_PARTS, LOG2_E
from rzero.kernels.exact.rounding import LOG2_NORM, NORM_DROP, THRESHOLD
from rzero.kernels.exact.softmax import SUM_BITS

__all__ = ["kernel_fingerprint", "numeric_contract"]

# Digest of the bits of all ops on a fixed probe (tests/kernels/test_hosts.py): whatever changes a bit, also
# what no constant below tells, changes the fingerprint.
BITS = "05951562b22dda63"


def numeric_contract(device: torch.device | str = "cpu") -> dict[str, object]:
    """All that decides the bits of the backend of ``device``: what it computes with, nothing of the launch.

    Example:
        >>> numeric_contract()["backend"]
        'exact'
    """
    device = torch.device(device)
    if device.type == "cuda":
        from rzero.kernels.triton import contract as of_triton

        return of_triton.numeric_contract(device)
    return {
        "backend": "exact",
        "bits": BITS,
        "linear": {"norm_bits": LOG2_NORM, "threshold": THRESHOLD, "rounding": "float32, bias, dtype"},
        "rms_norm": {"norm_bits": 52 - NORM_DROP, "rounding": "float32, dtype, weight"},
        "silu_mul": {"rounding": "float32, dtype"},
        "rope": {"layout": "halves", "half_pi": HALF_PI_PARTS, "rounding": "float32, dtype"},
        "attention": {
            "key_bits": KEY_BITS,
            "value_bits": VALUE_BITS,
            "query_bits": "floor(28.5 - log2(D) / 2)",
            "weight_bits": WEIGHT_BITS,
            "denominator_bits": DENOMINATOR_BITS,
            "rounding": "float32, dtype",
        },
        "log_softmax": {"sum_bits": SUM_BITS, "rounding": "float32"},
        "exp2": {"poly": EXP2_POLY, "log2_e": LOG2_E},
    }


def kernel_fingerprint(device: torch.device | str = "cpu") -> str:
    """The backend's name and a digest of its contract, for ``SamplingContext.kernel_fingerprint``.

    Example:
        >>> kernel_fingerprint().split("-")[0]
        'exact'
    """
    contract = numeric_contract(device)
    digest = hashlib.sha256(json.dumps(contract, sort_keys=True).encode()).hexdigest()
    return f"{contract['backend']}-{digest[:16]}"
