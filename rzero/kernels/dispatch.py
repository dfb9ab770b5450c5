"""Which backend computes: decided in one place, by the device of the first tensor.

A CUDA or ROCm device has the Triton backend, every other device the exact one. A backend is a module with the
functions and signatures that rzero.kernels.contract lists; ``backend_of`` is where another would come in.
"""

import functools
import importlib
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import ParamSpec, TypeVar

from torch import Tensor

from rzero.kernels import exact

__all__ = [
    "attention",
    "attention_paged",
    "attention_varlen",
    "backend_of",
    "forget_weights",
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
]

P = ParamSpec("P")
R = TypeVar("R")


def backend_of(tensor: Tensor) -> ModuleType:
    """The backend for tensors on the device of ``tensor``.

    Raises:
        ImportError: It is Triton's, which is not installed.
    """
    return _triton() if tensor.device.type == "cuda" else exact


@functools.cache
def _triton() -> ModuleType:
    try:
        return importlib.import_module("rzero.kernels.triton")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(
            "rzero.kernels: tensors on a GPU need triton, got none installed; "
            "pip install 'rzero[gpu]', or call rzero.kernels.exact"
        ) from error


def forget_weights(weights: Iterable[Tensor]) -> None:
    """Drop what is cached of ``weights``, e.g. ``model.parameters()``; it is made again when next needed."""
    exact.forget_weights(weights)


def _by_device(function: Callable[P, R]) -> Callable[P, R]:
    name = function.__name__

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return getattr(backend_of(args[0]), name)(*args, **kwargs)  # type: ignore[arg-type]

    return call


attention = _by_device(exact.attention)
attention_paged = _by_device(exact.attention_paged)
attention_varlen = _by_device(exact.attention_varlen)
gated_mlp = _by_device(exact.gated_mlp)
linear = _by_device(exact.linear)
linear_joined = _by_device(exact.linear_joined)
linear_log_probs = _by_device(exact.linear_log_probs)
log_softmax = _by_device(exact.log_softmax)
matmul = _by_device(exact.matmul)
rms_norm = _by_device(exact.rms_norm)
rope = _by_device(exact.rope)
rope_table = _by_device(exact.rope_table)
round_kv = _by_device(exact.round_kv)
silu_mul = _by_device(exact.silu_mul)
