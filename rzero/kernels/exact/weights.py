"""Rounded weights, kept per parameter for as long as its content stays the same and the parameter lives.

A weight is written to the grid of its rows once and kept as float64: 8 extra bytes a parameter. A stale copy
would be a silent error, and torch's version counter alone does not protect from it: ``weight.data.copy_``, a
fused optimizer step, FSDP's all-gather and writes through NumPy do not count as new versions. So a copy is
used only while

* the parameter is the same object, at the same address, of the same version, and
* its content has the checksum taken when it was rounded: the sum of all its bits, one read of the weight,
  wherever that costs little (small weights; 16 rows and more; the first use after any optimizer step), else
  1,024 of its elements.

What could escape: a write that torch cannot see, to a large weight, that changes none of the sampled
elements, is followed by no optimizer step and first used with fewer than 16 rows; or one that only permutes
elements. Whoever writes like that calls ``forget_weights``.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from rzero.kernels.exact.rounding import LOG2_NORM, MAGIC, norm_scale, round_to_grid

__all__ = ["forget_weights", "round_by_norm_", "rounded_weight"]

SMALL = 1 << 16  # elements
FEW_ROWS = 16
SAMPLES = 1024
CHUNK = 1 << 17  # elements rounded at a time, which keeps the passes in the cache
INTEGERS = {2: torch.int16, 4: torch.int32}


class _Stamp:
    """What must not change while the rounded copy of a weight is used.

    ``words`` are the weight's own bits, as the widest integers that fit; holding their storage keeps its
    address from being given to another.
    """

    __slots__ = ("address", "checksum", "layout", "sampled", "samples", "version", "words")

    def __init__(self, weight: Tensor) -> None:
        flat = weight.detach().view(-1)
        per_word = 8 // flat.element_size()
        aligned = flat.numel() % per_word == 0 and flat.storage_offset() % per_word == 0
        self.words = flat.view(torch.int64 if aligned else INTEGERS[flat.element_size()])
        self.sampled = self.words[:: max(1, self.words.numel() // SAMPLES)]
        self.version, self.address, self.layout = _version(weight), weight.data_ptr(), _layout(weight)
        self.checksum, self.samples = int(self.words.sum()), self.sampled.clone()

    def fits(self, weight: Tensor, thorough: bool) -> bool:
        """Whether ``weight`` is unchanged; at another address ``words`` may not even be read."""
        if self.address != weight.data_ptr() or self.layout != _layout(weight):
            return False
        if self.version != _version(weight):
            return False
        if thorough or weight.numel() <= SMALL:
            return self.checksum == int(self.words.sum())  # integers add in any order
        return torch.equal(self.samples, self.sampled)


@dataclass(kw_only=True)
class _Entry:
    """One float64 matrix: the rounded rows of one or several weights, one below the other."""

    rounded: Tensor
    identities: tuple[int, ...]
    stamps: tuple[_Stamp, ...]
    optimizer_steps: int


# Weight -> its entry, its place in it and its first row there; a weight's end is its entry's.
_entries: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_optimizer_steps = [0]
_hooks: list[object] = []


def round_by_norm_(x: Tensor) -> Tensor:
    """Round float64 ``x`` [..., K] in place, each row to multiples of s 2**-26 with norm < 1.389 s."""
    return round_to_grid(x, norm_scale(x).mul_(MAGIC * 2.0**-LOG2_NORM))


def rounded_weight(first: Tensor, *others: Tensor, rows: int) -> Tensor:
    """The rounded rows of weights [N_i, K], one below the other: float64 [sum N_i, K], read-only.

    Args:
        first: float32, bfloat16 or float16, of one K. Only contiguous ones are cached.
        others: Of the dtype and the K of ``first``.
        rows: How many rows they are about to be multiplied with; decides how the cached copy is checked.
    """
    weights = (first, *others)
    identities = tuple(map(id, weights))
    entry, place, start = _entries.get(first) or (None, 0, 0)
    if entry is None or (others and entry.identities != identities):
        return _store(weights, identities)
    stepped = entry.optimizer_steps != _optimizer_steps[0]
    stamps = entry.stamps if others else entry.stamps[place : place + 1]
    if not all(s.fits(w, stepped or rows >= FEW_ROWS) for s, w in zip(stamps, weights, strict=True)):
        return _store(weights, identities)
    if entry.identities == identities:
        entry.optimizer_steps = _optimizer_steps[0]
        return entry.rounded
    return entry.rounded.narrow(0, start, len(first))


def forget_weights(weights: Iterable[Tensor]) -> None:
    """Drop the rounded copies of ``weights``, e.g. ``model.parameters()``; the next use makes them again."""
    for weight in weights:
        _entries.pop(weight, None)


def _store(weights: tuple[Tensor, ...], identities: tuple[int, ...]) -> Tensor:
    if not all(weight.is_contiguous() for weight in weights):
        return _round_rows(weights)
    if not _hooks:  # fused optimizers leave the version counter alone: any step makes a thorough check due
        _hooks.append(register_optimizer_step_post_hook(_count_step))
    forget_weights(weights)  # before the new copy is made: the old one's memory is free by then
    steps, stamps = (
        _optimizer_steps[0],
        tuple(map(_Stamp, weights)),
    )  # before rounding: a race makes them stale
    entry = _Entry(rounded=_round_rows(weights), identities=identities, stamps=stamps, optimizer_steps=steps)
    start = 0
    for place, weight in enumerate(weights):
        _entries[weight] = (entry, place, start)
        start += weight.shape[0]
    return entry.rounded


def _count_step(*_: object) -> None:
    _optimizer_steps[0] += 1


def _round_rows(weights: tuple[Tensor, ...]) -> Tensor:
    columns = weights[0].shape[1]
    total = sum(weight.shape[0] for weight in weights)
    rounded = torch.empty(total, columns, dtype=torch.float64, device=weights[0].device)
    start = 0
    for weight in weights:
        for rows in weight.detach().split(max(1, CHUNK // max(1, columns))):
            round_by_norm_(rounded[start : start + rows.shape[0]].copy_(rows))
            start += rows.shape[0]
    return rounded


def _version(weight: Tensor) -> int:
    return -1 if weight.is_inference() else weight._version


def _layout(weight: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return weight.shape, weight.stride()
