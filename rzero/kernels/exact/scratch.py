"""Numbered float64 buffers that the ops use again and again.

So no step pays for fresh memory pages, and what one step leaves in the processor's cache the next one
overwrites. A few megabytes for each thread, kept for its life. A buffer's content is undefined, and valid
until the same thread asks for the same number: nothing that outlives an op may hold one, and what an op
needs across a call must have a number that the callee leaves alone (``max_scale`` takes 2, ``exact_product``
0 and 1).
"""

import math
import threading

import torch
from torch import Tensor

__all__ = ["scratch"]

LARGEST = 1 << 20  # elements; more is not kept
MOST_VIEWS = 256


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.whole: dict[tuple[int, torch.device], Tensor] = {}
        self.views: dict[tuple[int, tuple[int, ...], torch.device], Tensor] = {}


_buffers = _Buffers()


def scratch(number: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """An uninitialised contiguous float64 tensor of ``shape``."""
    view = _buffers.views.get((number, shape, device))
    return _make(number, shape, device) if view is None else view


def _make(number: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    count = math.prod(shape)
    # Not an inference tensor, even if made inside inference mode: those may not be written to outside of it.
    with torch.inference_mode(False), torch.no_grad():
        whole = _buffers.whole.get((number, device))
        if whole is None or whole.numel() < count:
            whole = torch.empty(count, dtype=torch.float64, device=device)
            if count > LARGEST:
                return whole.view(shape)
            _buffers.whole[number, device] = whole
            _buffers.views.clear()  # some of them hold the memory that this one replaces
        elif len(_buffers.views) >= MOST_VIEWS:
            _buffers.views.clear()
        view = _buffers.views[number, shape, device] = whole[:count].view(shape)
    return view
