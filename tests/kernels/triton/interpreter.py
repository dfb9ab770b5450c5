"""Triton's interpreter made faithful: the kernels' own source, on a CPU, with defined bits.

Stock, its ``tl.dot`` is NumPy's BLAS, whose result depends on a row's place in the tile and which multiplies
the bit patterns of bfloat16; its casts to bfloat16 truncate. Here a dot is one ascending chain of float32
additions and casts round to nearest even. ``exp`` and ``log`` go through float64: no vector tail shows.
"""

import inspect
import sys

import numpy as np
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

PACKAGE = "rzero.kernels.triton"


class Interpreted(interpreter.InterpretedFunction):
    """Called by another kernel, whose launch has patched Triton's language already: once is enough."""

    def __call__(self, *args, **kwargs):
        return self.rewrite()(*args, **kwargs)


def interpret(monkeypatch) -> None:
    """Interpret our kernels, and the functions of Triton's own library that they call."""
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    ours = [module for name, module in sys.modules.items() if name.startswith(PACKAGE)]
    wrapped: dict[int, Interpreted] = {}
    for module in [tl, tl.standard, *ours]:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                function = wrapped.setdefault(id(value), Interpreted(value.fn))
                monkeypatch.setattr(module, name, function)


def widen(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Any float type of the interpreter to float32, exactly."""
    if dtype.scalar == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


def to_bfloat16(data: np.ndarray) -> np.ndarray:
    """Float32 to the bits of bfloat16, round to nearest even; NaN stays one."""
    bits = np.ascontiguousarray(data, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(data), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def dot(self, a, b, d, *precision):
    """D + a b, one term after the other."""
    left, right = widen(a.data, a.dtype), widen(b.data, b.dtype)
    acc = d.data.copy()
    for k in range(left.shape[-1]):
        acc += left[..., :, k, None] * right[..., k, None, :]
    return interpreter.TensorHandle(acc, d.dtype.scalar)


def cast(self, src, dst_type):
    """Casts, with bfloat16 rounded to nearest even."""
    source, target = src.dtype.scalar, dst_type.scalar
    data = widen(src.data, source) if source == tl.bfloat16 else src.data
    if target == tl.bfloat16:
        return interpreter.TensorHandle(to_bfloat16(data.astype(np.float32)), target)
    return interpreter.TensorHandle(data.astype(interpreter._get_np_dtype(dst_type)), target)


def through_float64(function):
    def elementwise(self, arg):
        return interpreter.TensorHandle(
            function(arg.data.astype(np.float64)).astype(np.float32), arg.dtype.scalar
        )

    return elementwise


def make_faithful(monkeypatch) -> None:
    """Patch the interpreter's arithmetic."""
    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "create_dot", dot)
    for name in ("create_fp_trunc", "create_fp_ext", "create_si_to_fp", "create_ui_to_fp"):
        monkeypatch.setattr(builder, name, cast)
    monkeypatch.setattr(
        builder, "create_fp_to_fp", lambda self, src, dst_type, mode: cast(self, src, dst_type)
    )
    monkeypatch.setattr(builder, "create_exp", through_float64(np.exp))
    monkeypatch.setattr(builder, "create_log", through_float64(np.log))
    assert inspect.isfunction(builder.create_dot)
