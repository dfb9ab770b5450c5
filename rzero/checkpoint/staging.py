"""What the learner waits for: a copy of a state in memory.

Each call of torch, each of NumPy on more than 500 numbers and the end of each tensor hand the interpreter's
lock to other threads, and the learner would wait most of the time to get it back. So small tensors are copied
by Python, which keeps the lock, and all that can wait is left to whoever writes the copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rzero.checkpoint.tree import JSON, flatten, text_tensor

LARGE = 1 << 20  # bytes, from which on torch's threads are worth the lock
_KNOWN_TO_NUMPY = {torch.float32, torch.float64, torch.float16, torch.bool, torch.uint8}
_KNOWN_TO_NUMPY |= {torch.int8, torch.int16, torch.int32, torch.int64}


class Staged(NamedTuple):
    """A state of one moment, copied.

    Attributes:
        tree: What ``flatten`` made of all that is no tensor.
        copies: The tensors on the CPU by their paths; small ones as an array over the original and its bytes.
        originals: All tensors, lest one of them ends while the learner waits.
    """

    tree: Any
    copies: list[Tensor | tuple[np.ndarray, bytearray]]
    originals: dict[str, Tensor]


def stage(state: Mapping[str, Any]) -> Staged:
    """Copy a state; arguments and errors are those of ``to_tensors``."""
    tree, tensors = flatten(state)
    return Staged(tree, [_copy(tensor) for tensor in tensors.values()], tensors)


def staged_tensors(staged: Staged) -> dict[str, Tensor]:
    """What ``to_tensors`` would have returned then."""
    copies = [copy if isinstance(copy, Tensor) else _tensor(*copy) for copy in staged.copies]
    return {**dict(zip(staged.originals, copies, strict=True)), JSON: text_tensor(staged.tree)}


def _copy(tensor: Tensor) -> Tensor | tuple[np.ndarray, bytearray]:
    if type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.dtype in _KNOWN_TO_NUMPY:
        array = tensor.numpy(force=tensor.requires_grad)
        if array.nbytes < LARGE:
            return array, bytearray(array.data)
    return tensor.detach().to("cpu", copy=True)


def _tensor(original: np.ndarray, data: bytearray) -> Tensor:
    return torch.from_numpy(np.ndarray(original.shape, original.dtype, data))
