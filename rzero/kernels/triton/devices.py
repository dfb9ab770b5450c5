"""Where a kernel would run, and refusals of tensors that it can not take."""

import contextlib
from typing import Any

import torch
from torch import Tensor
from triton import knobs

__all__ = ["FLOATS", "architecture", "check_device", "check_dtypes", "family", "interpreting", "run"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETER = "interpreter"


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, which takes tensors of any device."""
    return knobs.runtime.interpret


def architecture(device: torch.device) -> str:
    """``sm_90``, ``gfx942``, ...: the chip that decides which instructions compute; part of the contract."""
    if interpreting():
        return INTERPRETER
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def family(arch: str) -> str:
    """The architecture whose tables serve ``arch``: those with the same matrix instructions."""
    if arch in (INTERPRETER, "gfx942", "sm_90"):
        return arch
    if arch.startswith("gfx"):
        return "gfx942"
    return "sm_100" if arch in ("sm_100", "sm_103") else "sm_80"


def check_device(function: str, *tensors: Tensor | None) -> None:
    """Refuse tensors on other devices than one GPU.

    Raises:
        ValueError: A tensor is not on a GPU, or not on that of the first one.
    """
    device = tensors[0].device if tensors[0] is not None else None
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.device != device:
            raise ValueError(f"{function}: all tensors must be on {device}, got one on {tensor.device}")
        if tensor.device.type != "cuda" and not interpreting():
            raise ValueError(
                f"{function}: tensors must be on a CUDA or ROCm device, got {tensor.device}; "
                "rzero.kernels.exact computes on any"
            )


def check_dtypes(function: str, first: Tensor, *others: Tensor | None) -> None:
    """Refuse dtypes that differ or are not supported.

    Raises:
        TypeError: The message names the dtype.
    """
    if first.dtype not in FLOATS:
        raise TypeError(f"{function}: input must have dtype float32, bfloat16 or float16, got {first.dtype}")
    for other in others:
        if other is not None and other.dtype != first.dtype:
            raise TypeError(f"{function}: all tensors must have dtype {first.dtype}, got {other.dtype}")


def run(kernel: Any, grid: tuple[int, ...], first: Tensor, *arguments: object, **settings: object) -> None:
    """Launch on the device of the first tensor, which need not be the current one.

    Never with a product and a sum contracted into one rounding: where the compiler would do so is its choice,
    and differs between two kernels that must agree.
    """
    here = torch.cuda.device(first.device) if first.device.type == "cuda" else contextlib.nullcontext()
    with here:
        kernel[grid](first, *arguments, enable_fp_fusion=False, **settings)
