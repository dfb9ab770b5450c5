"""Compile what the launchers would launch for chips that are not here, and read the compiler's own figures.

``recording`` replaces the launch by a list; the recorded arguments decide the specialisation, as they do at
run time. ``compile_launch`` makes a real cubin or hsaco without a GPU.
"""

import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rzero.kernels.triton import devices

__all__ = ["LIMITS", "TARGETS", "Recorded", "Resources", "compile_launch", "recording", "specialised"]

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Registers of a thread, and bytes of shared memory of a program.
LIMITS = {"sm_80": (255, 166912), "sm_90": (255, 232448), "sm_100": (255, 232448), "gfx942": (512, 65536)}

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A launch that did not happen.

    Attributes:
        kernel: The jitted function.
        grid: Of programs.
        arguments: Name -> tensor without memory, number or None.
        aligned: Names of the tensors that start at a multiple of 16 bytes.
        options: Of the compiler.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    aligned: frozenset[str]
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What the compiler says of a kernel on a chip.

    Attributes:
        registers: Of a thread.
        spilled: Bytes of stack or spilled registers of a thread; 0 if none spilled.
        shared: Bytes of shared memory of a program.
        matrix_instructions: Names and counts in the code, e.g. ``{"wgmma.m64n128k16": 4}``.
        wide_loads: Loads of 16 bytes a thread.
        narrow_loads: Other loads from global memory.
    """

    registers: int
    spilled: int
    shared: int
    matrix_instructions: dict[str, int]
    wide_loads: int
    narrow_loads: int


@contextlib.contextmanager
def recording(arch: str) -> Iterator[list[Recorded]]:
    """Let every launch inside the block be recorded instead, as if tensors of any device were on ``arch``."""
    launches: list[Recorded] = []

    def record(kernel: Any, grid: tuple[int, ...], *arguments: object, **settings: object) -> None:
        names = [p.name for p in kernel.params]
        given = dict(zip(names, arguments, strict=False))
        given |= {name: settings.pop(name) for name in list(settings) if name in names}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        aligned = (n for n, t in tensors.items() if t.storage_offset() * t.element_size() % 16 == 0)
        launches.append(
            Recorded(
                kernel=kernel,
                grid=grid,
                arguments=given | {name: _without_memory(tensor) for name, tensor in tensors.items()},
                aligned=frozenset(aligned),
                options={"enable_fp_fusion": False, **settings},
            )
        )

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(devices, "interpreting", lambda: True))
        for name, module in list(sys.modules.items()):
            if name.startswith("rzero.kernels.triton."):
                if "run" in vars(module):
                    stack.enter_context(mock.patch.object(module, "run", record))
                if "architecture" in vars(module):
                    stack.enter_context(mock.patch.object(module, "architecture", lambda device: arch))
        yield launches


def _without_memory(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def specialised(launch: Recorded) -> ASTSource:
    """The source with types, constants and alignment, as the launch would specialise it."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        free = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (free and type(value) is int and value == 1):
            signature[name], constants[i,] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = _POINTERS[value.dtype]
            if name in launch.aligned:
                attributes[i,] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 1 << 31 else "i64"
            if free and value % 16 == 0:
                attributes[i,] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def compile_launch(launch: Recorded, arch: str) -> Resources:
    """Compile for ``arch`` of ``TARGETS``.

    Raises:
        RuntimeError: The compiler refuses, with its message.
    """
    compiled = triton.compile(specialised(launch), target=TARGETS[arch], options=launch.options)
    if "cubin" in compiled.asm:
        registers, spilled = _cubin_figures(compiled.asm["cubin"])
        return _read(compiled.asm["ptx"], registers, spilled, compiled.metadata.shared, _NVIDIA)
    text = compiled.asm["amdgcn"]
    figures = {name: int(value) for name, value in re.findall(r"\.(\w+_count|private_\w+):\s*(\d+)", text)}
    spilled = 4 * figures["vgpr_spill_count"] + figures["private_segment_fixed_size"]
    return _read(text, figures["vgpr_count"], spilled, compiled.metadata.shared, _AMD)


# Patterns of matrix instructions, of loads of 16 bytes and of all loads from global memory.
_NVIDIA = (
    r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*",
    r"cp\.async\.c[ag]\.shared\.global[\w.:]* [^;]*, 0x10|ld\.global[\w.:]*\.(?:v4\.b32|v2\.b64)",
    r"cp\.async\.c[ag]\.shared\.global|ld\.global",
)
_AMD = (r"v_mfma_\w+", r"(?:global|buffer)_load_dwordx4", r"(?:global|buffer)_load_\w+")


def _read(text: str, registers: int, spilled: int, shared: int, patterns: tuple[str, str, str]) -> Resources:
    matrix, wide, every = patterns
    names = [_short(name) for name in re.findall(matrix, text)]
    wide_loads = len(re.findall(wide, text))
    return Resources(
        registers=registers,
        spilled=spilled,
        shared=shared,
        matrix_instructions={name: names.count(name) for name in sorted(set(names))},
        wide_loads=wide_loads,
        narrow_loads=len(re.findall(every, text)) - wide_loads,
    )


def _short(instruction: str) -> str:
    """``wgmma.m64n128k16`` of the full name; a name without a shape as it is."""
    shape = re.search(r"m\d+n\d+k\d+", instruction)
    family = instruction.split(".")[0]
    return f"{family}.{shape.group()}" if shape else instruction.split("::")[0]


def _cubin_figures(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, by NVIDIA's own tool, which Triton brings."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    figures = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return int(figures["REG"]), int(figures["STACK"]) + int(figures["LOCAL"])
