"""Prints digests of the bits of every op on fixed inputs: to compare processors, settings and days.

python -m tests.kernels.probe
"""

import hashlib
import json

import torch
from torch import Tensor

from rzero import kernels
from rzero.kernels import exact

ROWS, WIDTH, CLASSES = 33, 48, 61


def numbers(*shape: int, seed: int) -> Tensor:
    """Signed float32 of several magnitudes, from integers alone: torch.randn has other bits elsewhere."""
    count = torch.Size(shape).numel()
    x = torch.arange(count, dtype=torch.int64) * 0x5851F42D4C957F2D + seed * 0x14057B7EF767814F
    x = (x ^ (x >> 29)) * 0x3F58476D1CE4E5B9
    x = x ^ (x >> 32)
    mantissa = (x & 0xFFFFFF).to(torch.float64) - 2.0**23
    exponent = ((x >> 24) & 7).to(torch.float64)
    scale = torch.ones(count, dtype=torch.float64)
    for bit in range(3):  # no power function: its bits are the host's
        scale = torch.where((exponent.to(torch.int64) >> bit & 1).bool(), scale * 2.0 ** -(2**bit), scale)
    return (mantissa * scale * 2.0**-21).to(torch.float32).view(shape)


def outputs(dtype: torch.dtype) -> dict[str, Tensor]:
    """Each op on a probe in ``dtype``, and what torch itself makes of two of them."""
    x, up = (numbers(ROWS, WIDTH, seed=s).to(dtype) for s in (1, 2))
    gate, down, head = (
        numbers(*shape, seed=s).to(dtype)
        for s, shape in ((3, (71, WIDTH)), (4, (WIDTH, 71)), (5, (CLASSES, WIDTH)))
    )
    frequencies = numbers(6, seed=6).abs()
    cosines, sines = kernels.rope_table(frequencies, length=50)
    q, k, v = (numbers(2, h, 29, 12, seed=s).to(dtype) for h, s in ((4, 7), (2, 8), (2, 9)))
    tokens = torch.arange(ROWS) * 7 % CLASSES
    log_probs, entropies = kernels.linear_log_probs(x, head, tokens, temperature=0.7)
    sweep = numbers(4001, seed=10)
    return {
        "linear": kernels.linear(x, head, head[:, 0].contiguous()),
        "matmul": kernels.matmul(x, head.t()),
        "rms_norm": kernels.rms_norm(x, up[0].contiguous(), eps=1e-6),
        "silu_mul": kernels.silu_mul(x, up),
        "gated_mlp": kernels.gated_mlp(x, gate, gate.flip(0), down),
        "rope_table": torch.cat([cosines, sines]),
        "rope": kernels.rope(q, cosines[:29], sines[:29]),
        "round_kv": kernels.round_kv(k),
        "attention": kernels.attention(q, k, v, scale=0.3),
        "log_softmax": kernels.log_softmax(kernels.linear(x, head)),
        "linear_log_probs": torch.stack([log_probs, entropies]),
        "exp": exact.exp(sweep * 20),
        "log": exact.log(sweep.abs()),
        "sin": exact.sin(sweep * 100),
        "cos": exact.cos(sweep * 100),
        "torch's own linear": torch.nn.functional.linear(x, head),
        "torch's own silu": torch.nn.functional.silu(x),
    }


def digests() -> dict[str, str]:
    """Op and dtype -> digest of its bits."""
    return {
        f"{name} {str(dtype)[6:]}": hashlib.blake2b(
            out.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8
        ).hexdigest()
        for dtype in (torch.float32, torch.bfloat16)
        for name, out in outputs(dtype).items()
    }


if __name__ == "__main__":
    print(json.dumps(digests(), indent=2))
