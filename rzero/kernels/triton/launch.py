"""Launch parameters: tile sizes along rows and columns, warps and stages. They decide speed, never a bit.

Tables are keyed by (N, K, dtype, architecture family) and searched by ``benchmarks/kernels_search.py`` on
a GPU; nothing is timed while a program runs. What is in no table takes the defaults here. The number of rows
chooses among the entries of a table.

On sm_90 and sm_100 no tile has fewer than 64 rows: the matrix instruction would change (wgmma to mma.sync,
tcgen05 to mma.sync), and that the two give equal bits is not established.
"""

from dataclasses import dataclass, replace

import torch

__all__ = [
    "DEFAULTS",
    "LAUNCHES",
    "Launch",
    "attention_launch",
    "options",
    "product_launch",
    "vocabulary_launch",
]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Parameters of one launch.

    Attributes:
        block_m: Rows of a tile.
        block_n: Columns of a tile; ignored where the contract fixes them.
        warps: Per program.
        stages: Of the software pipeline.
        registers: That a thread may have, on NVIDIA. None leaves it to the compiler, which may spill a few
            for the sake of more programs on a multiprocessor.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None


def _launch(block_m: int, block_n: int, warps: int, stages: int, registers: int | None = None) -> Launch:
    return Launch(block_m=block_m, block_n=block_n, warps=warps, stages=stages, registers=registers)


FEW = 64  # calls with at most so many rows are decode steps: weights dominate the bytes

# (family, elements of 4 bytes) -> (largest number of rows, parameters), ascending; the last takes all.
DEFAULTS: dict[tuple[str, bool], tuple[tuple[float, Launch], ...]] = {
    ("sm_80", False): (
        (16, _launch(16, 64, 4, 5)),
        (FEW, _launch(64, 64, 4, 4)),
        (float("inf"), _launch(128, 128, 8, 3)),
    ),
    ("sm_90", False): (
        (FEW, _launch(64, 64, 4, 5)),
        (float("inf"), _launch(128, 128, 8, 4)),
    ),
    ("sm_100", False): (
        (FEW, _launch(64, 64, 4, 5)),
        (float("inf"), _launch(128, 128, 8, 4)),
    ),
    ("gfx942", False): (
        (16, _launch(16, 64, 4, 2)),
        (FEW, _launch(64, 64, 4, 2)),
        (float("inf"), _launch(128, 128, 8, 2)),
    ),
    ("interpreter", False): ((16, _launch(16, 32, 4, 1)), (float("inf"), _launch(32, 64, 4, 1))),
    **{
        (chip, True): ((16, _launch(16, 32, 4, 2, 255)), (float("inf"), _launch(32, 32, 4, 2, 255)))
        for chip in ("sm_80", "sm_90", "sm_100", "gfx942")
    },
    ("interpreter", True): ((16, _launch(16, 32, 4, 1)), (float("inf"), _launch(32, 64, 4, 1))),
}

# (N, K, dtype, family) -> entries as above, from the search tool.
LAUNCHES: dict[tuple[int, int, torch.dtype, str], tuple[tuple[float, Launch], ...]] = {}

_VOCABULARY: dict[str, tuple[tuple[float, Launch], ...]] = {
    "sm_80": ((16, _launch(16, 128, 8, 4)), (float("inf"), _launch(128, 128, 8, 3))),
    "sm_90": ((FEW, _launch(64, 128, 4, 4)), (float("inf"), _launch(128, 128, 8, 3))),
    "sm_100": ((float("inf"), _launch(64, 128, 8, 3)),),
    "gfx942": ((16, _launch(16, 128, 4, 2)), (float("inf"), _launch(128, 128, 8, 2))),
    "interpreter": ((16, _launch(16, 128, 4, 1)), (float("inf"), _launch(32, 128, 4, 1))),
}

# (family, head size above 64) -> parameters of the forward and backward kernels, for elements of 2 bytes.
_ATTENTION = {
    ("sm_80", False): (_launch(32, 0, 4, 2), _launch(32, 0, 8, 1)),
    ("sm_80", True): (_launch(32, 0, 8, 2), _launch(32, 0, 8, 1)),
    ("sm_90", False): (_launch(64, 0, 4, 2), _launch(64, 0, 8, 2)),
    ("sm_90", True): (_launch(64, 0, 8, 2), _launch(64, 0, 8, 2)),
    ("sm_100", False): (_launch(64, 0, 8, 2), _launch(64, 0, 8, 2)),
    ("sm_100", True): (_launch(64, 0, 8, 2), _launch(64, 0, 8, 2)),
    ("gfx942", False): (_launch(64, 0, 4, 1), _launch(64, 0, 4, 1)),
    ("gfx942", True): (_launch(64, 0, 4, 1), _launch(64, 0, 4, 1)),
    ("interpreter", False): (_launch(16, 0, 4, 1), _launch(16, 0, 4, 1)),
    ("interpreter", True): (_launch(16, 0, 4, 1), _launch(16, 0, 4, 1)),
}

# family -> parameters of the forward and backward kernels, for elements of 4 bytes.
_ATTENTION_FLOAT32 = {
    "sm_80": (_launch(16, 0, 8, 1, 255), _launch(16, 0, 8, 2, 255)),
    "sm_90": (_launch(16, 0, 8, 1, 255), _launch(16, 0, 8, 1, 192)),
    "sm_100": (_launch(16, 0, 8, 1, 255), _launch(16, 0, 8, 1, 192)),
    "gfx942": (_launch(16, 0, 4, 1), _launch(16, 0, 4, 1)),
    "interpreter": (_launch(16, 0, 4, 1), _launch(16, 0, 4, 1)),
}


def product_launch(
    rows: int, columns: int, depth: int, dtype: torch.dtype, family: str, *, segments: int
) -> Launch:
    """Parameters of a product [rows, depth] x [depth, columns] in ``segments``."""
    entries = LAUNCHES.get((columns, depth, dtype, family)) or DEFAULTS[family, dtype == torch.float32]
    launch = next(launch for most, launch in entries if rows <= most)
    # Three accumulators are alive at a time in the tree of four segments.
    return replace(launch, block_n=64) if segments == 4 and launch.block_n > 64 else launch


def vocabulary_launch(rows: int, dtype: torch.dtype, family: str) -> Launch:
    """Parameters of the kernels over a vocabulary; columns are the contract's tile in the forward."""
    if dtype == torch.float32 and family != "interpreter":
        return _launch(32, 128, 8, 2)
    return next(launch for most, launch in _VOCABULARY[family] if rows <= most)


def attention_launch(size: int, dtype: torch.dtype, family: str, *, backward: bool = False) -> Launch:
    """Parameters of attention with heads of ``size``; its columns are the contract's KV tile.

    Heads of more than 128 take one stage, or sm_100 has not the shared memory; they spill registers.
    """
    table = _ATTENTION_FLOAT32[family] if dtype == torch.float32 else _ATTENTION[family, size > 64]
    return replace(table[backward], stages=1) if size > 128 else table[backward]


def options(launch: Launch, family: str) -> dict[str, object]:
    """As the compiler takes them; on AMD with the shape of matrix instruction that the contract fixes."""
    fixed: dict[str, object] = {"num_warps": launch.warps, "num_stages": launch.stages}
    if family == "gfx942":
        fixed["matrix_instr_nonkdim"] = 16
    elif launch.registers:
        fixed["maxnreg"] = launch.registers
    return fixed
