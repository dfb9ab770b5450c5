"""Compile every kernel and configuration for chips that are not here, and print what the compiler says.

    python benchmarks/kernels_aot.py                     one model's launches in two dtypes, on four chips
    python benchmarks/kernels_aot.py --arch sm_90 --dtype float16

A row is one specialisation: its registers, spills, shared memory, matrix instructions and 16-byte loads, then
the bytes and operations of all its programs against the least possible (every operand read once, every result
written once, no padded row or column). Bytes count what programs ask for; the caches serve the repeats.
"""

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

import rzero.kernels.triton as kernels
from rzero.kernels.triton.ahead_of_time import (
    LIMITS,
    Recorded,
    Resources,
    compile_launch,
    recording,
    specialised,
)
from rzero.kernels.triton.launch import LAUNCHES

# DeepSeek-R1-Distill-Qwen-1.5B: (N, K) of its projections, heads, groups, head size, vocabulary.
SHAPES = ((1536, 1536), (256, 1536), (8960, 1536), (1536, 8960))
HEADS, GROUPS, SIZE, HIDDEN, INNER, VOCABULARY = 12, 2, 128, 1536, 8960, 151_936
# How the names of the matrix instructions begin: for dtypes of 2 bytes, and for float32, which has none on
# NVIDIA, where they would be TF32.
MATRIX = {
    "sm_80": ("mma.m16n8k16", None),
    "sm_90": ("wgmma.", None),
    "sm_100": ("tcgen05.mma", None),
    "gfx942": ("v_mfma_f32_16x16x16", "v_mfma_f32_16x16x4_f32"),
}
# Kernels whose time is that of their bytes: their operands must come by 16-byte loads.
BYTES_DOMINATE = ("product", "split", "log_softmax", "rms_norm", "silu_mul", "attention_kernel", "gradient")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One specialisation on one chip."""

    arch: str
    dtype: str
    kernel: str
    constants: dict[str, Any]
    warps: int
    resources: Resources
    bytes_moved: float
    bytes_least: float
    operations: float
    operations_least: float
    faults: list[str] = field(default_factory=list)


@functools.cache
def launches(arch: str, dtype: torch.dtype, *, tokens: int = 4096, small: bool = False) -> list[Recorded]:
    """Every distinct launch of a model's forward, backward and decode steps on ``arch``.

    ``small`` takes one shape of each kernel and not every table entry.
    """
    shapes = SHAPES[-1:] if small else (*SHAPES, *_listed_shapes(dtype))

    def empty(*shape: int, grad: bool = True) -> Tensor:
        return torch.empty(shape, dtype=dtype, requires_grad=grad)

    with recording(arch) as recorded:
        for rows in (tokens,) if small else (1, 16, 64, tokens):
            for columns, depth in shapes:
                _run(kernels.linear, empty(rows, depth), empty(columns, depth), empty(columns))
            ids = torch.empty(rows, dtype=torch.int64)
            if rows == tokens:
                _run(
                    kernels.linear_log_probs,
                    empty(rows, HIDDEN),
                    empty(VOCABULARY, HIDDEN),
                    ids,
                    temperature=0.7,
                )
            else:
                with torch.no_grad():
                    kernels.linear_log_probs(empty(rows, HIDDEN), empty(VOCABULARY, HIDDEN), ids)
        with torch.no_grad():
            kernels.linear(empty(16, SHAPES[-1][1]), empty(*SHAPES[-1]))
        _run(kernels.log_softmax, empty(16, VOCABULARY))
        _run(kernels.rms_norm, empty(tokens, HIDDEN), empty(HIDDEN), eps=1e-6)
        _run(kernels.add_rms_norm, empty(tokens, HIDDEN), empty(tokens, HIDDEN), empty(HIDDEN), eps=1e-6)
        _run(kernels.silu_mul, empty(tokens, INNER), empty(tokens, INNER))
        _run(kernels.rope, empty(1, tokens, HEADS, SIZE), *torch.empty(2, 1, tokens, 1, SIZE))
        for heads, groups, size in (
            ((HEADS, GROUPS, SIZE),) if small else ((HEADS, GROUPS, SIZE), (32, 8, 64))
        ):
            _attention(empty, heads, groups, size, tokens)
    distinct = {}
    for launch in recorded:
        source = specialised(launch)
        key = (launch.kernel.__name__, str(source.signature), str(source.constants), str(source.attrs))
        distinct.setdefault((*key, str(launch.options)), launch)
    return list(distinct.values())


def _listed_shapes(dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
    return tuple((columns, depth) for columns, depth, kind, _ in LAUNCHES if kind == dtype)


def _run(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> None:
    """Forward and backward."""
    outputs = function(*inputs, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])


def _attention(empty: Callable[..., Tensor], heads: int, groups: int, size: int, tokens: int) -> None:
    offsets = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32)
    packed = empty(tokens, heads, size), empty(tokens, groups, size), empty(tokens, groups, size)
    _run(kernels.attention_varlen, *packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets, scale=0.1)
    padded = empty(2, heads, 512, size), empty(2, groups, 512, size), empty(2, groups, 512, size)
    mask = torch.ones(2, 1, 512, 512, dtype=torch.bool)
    _run(kernels.attention, *padded, scale=0.1, mask=mask)
    kernels.attention_paged(
        empty(4, heads, size),
        *(empty(1024, 16, groups, size) for _ in range(2)),
        page_table=torch.empty(4, 512, dtype=torch.int32),
        cu_seqlens_q=torch.arange(5, dtype=torch.int32),
        seqlens_k=torch.full((4,), 8192, dtype=torch.int32),
        scale=0.1,
    )


def work(launch: Recorded) -> tuple[float, float, float, float]:
    """Bytes asked for, least bytes, operations done, least operations."""
    a, name = launch.arguments, launch.kernel.__name__
    programs = math.prod(launch.grid)
    tensors = [t for t in a.values() if isinstance(t, Tensor)]
    touched = float(sum(t.numel() * t.element_size() for t in tensors))
    if name == "product_kernel":
        rows, columns, depth, item = a["rows"], a["columns"], a["depth"], a["a"].element_size()
        parts = a["SEGMENTS"] if a["SPLIT"] else 1
        read = programs * (depth / parts) * (a["BLOCK_M"] + a["BLOCK_N"]) * item
        written = parts * rows * columns * (4 if a["SPLIT"] else a["out"].element_size())
        done = programs * 2 * a["BLOCK_M"] * a["BLOCK_N"] * depth / parts
        least = (rows * depth + depth * columns) * item + rows * columns * a["out"].element_size()
        return read + written, least, done, 2 * rows * columns * depth
    if name in ("linear_split_kernel", "logit_gradient_kernel"):
        rows, depth, item = a["rows"], a["depth"], a["hidden"].element_size()
        columns = a.get("width", a["columns"])
        width = a.get("SPLIT", a.get("BLOCK_N"))
        tiles = width // a.get("TILE", width)
        read = programs * depth * (tiles * a["BLOCK_M"] + width) * item
        written = rows * columns * item if name == "logit_gradient_kernel" else programs * a["BLOCK_M"] * 12
        least = (rows + columns) * depth * item + (written if name == "logit_gradient_kernel" else rows * 16)
        return read + written, least, programs * 2 * a["BLOCK_M"] * width * depth, 2 * rows * columns * depth
    if name.startswith("attention") and "query" in a:
        return _attention_work(launch, touched)
    elements = float(max(t.numel() for t in tensors))
    return touched, touched, 2 * elements, 2 * elements


def _attention_work(launch: Recorded, touched: float) -> tuple[float, float, float, float]:
    """As if every row saw all keys of its sequence, which padding and causality then spare."""
    a, name = launch.arguments, launch.kernel.__name__
    tokens, heads, size = a["query"].shape
    item, products = (
        a["query"].element_size(),
        {"attention_kernel": 2, "attention_query_gradient_kernel": 3}.get(name, 4),
    )
    keys = (
        a["page_size"] * a["table_width"]
        if a["PAGED"]
        else a["key"].shape[-3] / (1 if a["PADDED"] else a["count"])
    )
    groups = a["key"].shape[-2]
    read = launch.grid[0] * groups * keys * size * 2 * item
    rows = launch.grid[0] * a["BLOCK_M"] * groups
    least = 2 * products * tokens * heads * keys * size
    return read + touched, touched, 2.0 * products * rows * keys * a["BLOCK_D"], float(least)


def check(launch: Recorded, resources: Resources, arch: str, dtype: torch.dtype) -> list[str]:
    """What is wrong with a compiled kernel; nothing, it is hoped."""
    registers, shared = LIMITS[arch]
    faults = []
    if resources.spilled:
        faults.append(f"spills {resources.spilled} bytes")
    if resources.registers > registers or resources.shared > shared:
        faults.append(
            f"{resources.registers} registers, {resources.shared} bytes shared: over {LIMITS[arch]}"
        )
    name = launch.kernel.__name__
    wanted, found = MATRIX[arch][dtype == torch.float32], sorted(resources.matrix_instructions)
    multiplies = "BLOCK_K" in launch.arguments or "KV_TILE" in launch.arguments
    meant = all(name.startswith(wanted or "none") for name in found) and bool(found) == bool(wanted)
    if multiplies and not meant:
        faults.append(f"{found} instead of {wanted}")
    if any(part in name for part in BYTES_DOMINATE) and not resources.wide_loads:
        faults.append("no 16-byte loads")
    return faults


def compile_row(arch: str, dtype_name: str, number: int, small: bool) -> Row:
    """Compile launch ``number`` of ``launches``, in whatever process."""
    dtype = getattr(torch, dtype_name)
    launch = launches(arch, dtype, small=small)[number]
    resources = compile_launch(launch, arch)
    moved, least, done, least_operations = work(launch)
    return Row(
        arch=arch,
        dtype=dtype_name,
        kernel=launch.kernel.__name__,
        constants={k: v for k, v in launch.arguments.items() if k.isupper()},
        warps=launch.options.get("num_warps", 4),
        resources=resources,
        bytes_moved=moved,
        bytes_least=least,
        operations=done,
        operations_least=least_operations,
        faults=check(launch, resources, arch, dtype),
    )


def compile_all(archs: list[str], dtypes: list[str], *, small: bool, processes: int) -> Iterator[Row]:
    """All rows, in order, as they become ready."""
    tasks = [
        (arch, dtype, number, small)
        for arch in archs
        for dtype in dtypes
        for number in range(len(launches(arch, getattr(torch, dtype), small=small)))
    ]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(compile_row, *zip(*tasks, strict=True))


def show(row: Row) -> str:
    """One line of the table."""
    r = row.resources
    tiles = " ".join(
        f"{k.lower()}={int(v)}" for k, v in row.constants.items() if k.startswith(("BLOCK", "SEG", "KV"))
    )
    matrix = ", ".join(f"{n} x{count}" for n, count in r.matrix_instructions.items()) or "-"
    figures = f"{r.registers:3} regs {r.spilled:3} spilled {r.shared:6} shared"
    loads = f"{r.wide_loads:3}/{r.wide_loads + r.narrow_loads:<3} wide"
    moved = f"{row.bytes_moved / 2**20:9.1f} MiB = {row.bytes_moved / row.bytes_least:5.1f}x least"
    done = f"{row.operations / 1e9:8.1f} GFLOP = {row.operations / row.operations_least:4.1f}x least"
    name = f"{row.arch:7} {row.dtype:8} {row.kernel:32} {tiles:44} {row.warps:2} warps"
    faults = [f"FAULT: {'; '.join(row.faults)}"] if row.faults else []
    return " | ".join([name, figures, f"{matrix:48}", loads, moved, done, *faults])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", default=list(MATRIX), choices=list(MATRIX))
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["bfloat16", "float32"],
        choices=["bfloat16", "float16", "float32"],
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="one shape of each kernel")
    options = parser.parse_args()
    faults = count = 0
    started = time.perf_counter()
    for row in compile_all(options.arch, options.dtype, small=options.small, processes=options.processes):
        print(show(row), flush=True)
        count, faults = count + 1, faults + bool(row.faults)
    print(f"{count} kernels compiled in {time.perf_counter() - started:.0f} s, {faults} with faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
