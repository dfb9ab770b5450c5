"""What decides the bits of the Triton backend, op by op; launch parameters are not in it.

A reduction order is a function of (N, K, dtype, architecture) alone. Numbers here are contract: two processes
that compare log-probabilities must have the same ones, which the fingerprint states.
"""

from dataclasses import asdict, dataclass

import torch
import triton

from rzero.kernels.triton.devices import architecture, family
from rzero.kernels.triton.vendor import certified_shapes

__all__ = [
    "KV_SPLIT",
    "ROW_BLOCK",
    "ROW_SEGMENT",
    "SEGMENTS",
    "VOCAB_CHUNK",
    "VOCAB_SPLIT",
    "VOCAB_TILE",
    "NumericContract",
    "chain_k",
    "kv_tile",
    "numeric_contract",
    "segments",
]

KV_SPLIT = 1024  # keys whose partial result is merged as one, in ascending order
VOCAB_TILE = 128  # logits of one step of a softmax over a vocabulary
VOCAB_SPLIT = 1024  # logits whose partial result is merged as one, by a tree
VOCAB_CHUNK = 4096  # logits whose gradient is held at a time
ROW_SEGMENT = 1024  # rows whose sum is one, in gradients of weights [K] and biases
ROW_BLOCK = 64  # rows summed as one by a tree there; blocks ascend

# (N, K, dtype, family) -> number of segments of K, where measurements favour another than ``segments`` takes.
SEGMENTS: dict[tuple[int, int, torch.dtype, str], int] = {}


@dataclass(frozen=True, kw_only=True)
class NumericContract:
    """The contract of one op on one architecture.

    Attributes:
        op: Its name.
        order: The reduction, in words.
        rounding: The points where results are rounded, in order.
        constants: Numbers that the order depends on.
    """

    op: str
    order: str
    rounding: str
    constants: tuple[tuple[str, object], ...] = ()


def chain_k(dtype: torch.dtype) -> int:
    """Terms of K that one step of a product takes; steps ascend."""
    return 32 if dtype == torch.float32 else 64


def kv_tile(dtype: torch.dtype) -> int:
    """Keys of one step of attention, from position 0 of a sequence on."""
    return 32 if dtype == torch.float32 else 64


def segments(columns: int, depth: int, dtype: torch.dtype, family: str) -> int:
    """Into how many equal segments K is cut: 1, 2 or 4, whatever the number of rows.

    Listed shapes have their own. Otherwise: as many as bring tiles of 64 columns times segments to 128
    programs, for a long reduction of few columns would leave most of a chip idle while it decodes; but no
    segment is shorter than 512 terms, or no whole number of steps.
    """
    listed = SEGMENTS.get((columns, depth, dtype, family))
    if listed is not None:
        return listed
    count = 1
    step = chain_k(dtype)
    while (
        count < 4 and columns * count < 128 * 64 and depth >= 1024 * count and not depth % (2 * count * step)
    ):
        count *= 2
    return count


_INSTRUCTIONS = {
    "sm_80": "mma.sync.m16n8k16",
    "sm_90": "wgmma.m64k16",
    "sm_100": "tcgen05.mma.k16",
    "gfx942": "mfma.16x16x16",
    "interpreter": "ascending k",
}


def numeric_contract(device: torch.device) -> dict[str, object]:
    """All contracts of the backend on a device, with what they run on."""
    arch = architecture(device)
    chips = family(arch)
    product = "segments of K, each one ascending chain from 0 in float32, added by a binary tree"
    vocabulary = (("tile", VOCAB_TILE), ("split", VOCAB_SPLIT))
    table = sorted((n, k, str(dtype), s) for (n, k, dtype, f), s in SEGMENTS.items() if f == chips)
    constants = (
        ("chain_k", (chain_k(torch.bfloat16), chain_k(torch.float32))),
        ("instruction", _INSTRUCTIONS[chips]),
        ("segments", ("s < 4, columns s < 8192, depth >= 1024 s, whole steps", tuple(table))),
    )
    ops = [
        NumericContract(op="linear", order=product, rounding="float32, bias, dtype", constants=constants),
        NumericContract(
            op="linear_log_probs",
            order="that of linear, then that of log_softmax",
            rounding="logits to dtype, divided by the temperature (IEEE) in float32",
            constants=vocabulary,
        ),
        NumericContract(
            op="log_softmax",
            order="online over ascending tiles of a split, sums by halving; splits by halving",
            rounding="(z - max) - log sum, float32",
            constants=vocabulary,
        ),
        NumericContract(op="rms_norm", order="halving", rounding="float32 root and quotient, dtype, weight"),
        NumericContract(op="silu_mul", order="none", rounding="dtype"),
        NumericContract(op="rope", order="none", rounding="float32, dtype"),
        NumericContract(
            op="attention",
            order="online over ascending tiles of a split from position 0, splits merged ascending",
            rounding="weights to dtype before the product with values, quotient, dtype",
            constants=(
                ("tile", (kv_tile(torch.bfloat16), kv_tile(torch.float32))),
                ("split", KV_SPLIT),
                ("instruction", _INSTRUCTIONS[chips]),
            ),
        ),
        NumericContract(
            op="gradients",
            order="sums over rows: one chain for weights of products, else blocks by halving in segments, "
            "ascending; of hidden states over ascending chunks of the vocabulary",
            rounding="dtype",
            constants=(
                ("row_block", ROW_BLOCK),
                ("row_segment", ROW_SEGMENT),
                ("vocabulary_chunk", VOCAB_CHUNK),
            ),
        ),
    ]
    return {
        "backend": "triton",
        "version": 1,
        "arch": arch,
        "compiler": triton.__version__,  # it lowers exp and the matrix instructions
        "exp": "tl.exp",
        "fp_fusion": False,
        "vendor": sorted(certified_shapes(device)),
        "ops": [asdict(op) for op in ops],
    }
