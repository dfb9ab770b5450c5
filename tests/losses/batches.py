"""Responses as plain rows, and the layouts they can be given in."""

from dataclasses import dataclass

import torch
from hypothesis import settings
from torch import Tensor

unhurried = settings(deadline=None, max_examples=50)  # a shared machine may stall, which is no failure

JUNK = (float("nan"), float("inf"), -float("inf"), 200.0, -200.0)


@dataclass(frozen=True)
class Rows:
    """B responses of different lengths, each a 1-d tensor; junk stands wherever mask is False."""

    log_probs: list[Tensor]
    behavior_log_probs: list[Tensor]
    masks: list[Tensor]
    advantages: Tensor

    def __len__(self) -> int:
        return len(self.masks)

    def select(self, indices: list[int]) -> "Rows":
        return Rows(
            [self.log_probs[i] for i in indices],
            [self.behavior_log_probs[i] for i in indices],
            [self.masks[i] for i in indices],
            self.advantages[indices],
        )


def random_rows(
    seed: int, *, num_rows: int = 6, longest: int = 9, dtype: torch.dtype = torch.float32
) -> Rows:
    """Ragged multi-turn rows of one token and more; of the last row no token counts."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (num_rows,), generator=generator).tolist()
    log_probs, behavior, masks = [], [], []
    for row, length in enumerate(lengths):
        mask = torch.rand(length, generator=generator) < 0.7
        mask[0] |= not mask.any()
        if row == num_rows - 1:
            mask[:] = False
        learner = -3 * torch.rand(length, generator=generator, dtype=torch.float64) - 0.05
        sampler = (learner + 0.5 * torch.randn(length, generator=generator, dtype=torch.float64)).clamp(max=0)
        junk = torch.tensor(JUNK, dtype=torch.float64)
        learner, sampler = (
            torch.where(mask, values, junk[torch.randint(len(JUNK), (length,), generator=generator)])
            for values in (learner, sampler)
        )
        log_probs.append(learner.to(dtype))
        behavior.append(sampler.to(dtype))
        masks.append(mask)
    advantages = torch.randn(num_rows, generator=generator, dtype=torch.float64).to(dtype)
    return Rows(log_probs, behavior, masks, advantages)


def padded(
    rows: Rows, *, extra: int = 0, left: bool = False, junk: float = float("nan")
) -> dict[str, Tensor]:
    """[B, T], T the longest row and some more, padded with junk."""
    width = max(len(mask) for mask in rows.masks) + extra

    def stack(values: list[Tensor], fill: float | bool) -> Tensor:
        full = torch.full((len(values), width), fill, dtype=values[0].dtype)
        for row, value in zip(full, values, strict=True):
            if left:
                row[width - len(value) :] = value
            else:
                row[: len(value)] = value
        return full

    return {
        "log_probs": stack(rows.log_probs, junk),
        "behavior_log_probs": stack(rows.behavior_log_probs, junk),
        "mask": stack(rows.masks, False),
    }


def packed(rows: Rows) -> dict[str, Tensor]:
    """[N] and cu_seqlens."""
    ends = torch.tensor([0, *(len(mask) for mask in rows.masks)]).cumsum(0)
    return {
        "log_probs": torch.cat(rows.log_probs),
        "behavior_log_probs": torch.cat(rows.behavior_log_probs),
        "mask": torch.cat(rows.masks),
        "cu_seqlens": ends,
    }


def jagged(rows: Rows) -> dict[str, Tensor]:
    """Nested tensors over the packed values."""
    flat = packed(rows)
    offsets = flat.pop("cu_seqlens")
    return {name: torch.nested.nested_tensor_from_jagged(value, offsets) for name, value in flat.items()}


LAYOUTS = {
    "padded": padded,
    "padded wider": lambda rows: padded(rows, extra=5, junk=float("inf")),
    "padded left": lambda rows: padded(rows, extra=1, left=True, junk=200.0),
    "packed": packed,
    "packed int32": lambda rows: {**packed(rows), "cu_seqlens": packed(rows)["cu_seqlens"].int()},
    "jagged": jagged,
}


def split_rows(values: Tensor, layout: str, rows: Rows) -> list[Tensor]:
    """Per-token values in a layout, back to one tensor per row."""
    lengths = [len(mask) for mask in rows.masks]
    if values.is_nested:
        values = values.values()
    if "padded" not in layout:
        return list(values.split(lengths))
    if "left" in layout:
        return [row[len(row) - length :] for row, length in zip(values, lengths, strict=True)]
    return [row[:length] for row, length in zip(values, lengths, strict=True)]


def loss_and_gradients(
    loss_function, rows: Rows, layout: str = "packed", **options
) -> tuple[Tensor, list[Tensor]]:
    """Value of a loss over rows in a layout, and its gradient token by token, row by row."""
    tokens = LAYOUTS[layout](rows)
    leaf = tokens["log_probs"].values() if tokens["log_probs"].is_nested else tokens["log_probs"]
    leaf = leaf.clone().requires_grad_()
    log_probs = leaf
    if tokens["log_probs"].is_nested:
        log_probs = torch.nested.nested_tensor_from_jagged(leaf, tokens["log_probs"].offsets())
    behavior, mask = tokens["behavior_log_probs"], tokens["mask"]
    cu_seqlens = tokens.get("cu_seqlens")
    loss = loss_function(log_probs, behavior, rows.advantages, mask, cu_seqlens=cu_seqlens, **options)
    loss.backward()
    return loss.detach(), split_rows(leaf.grad, layout, rows)


def reference_loss(
    rows: Rows, *, num_responses: int | None = None, detached: bool = True
) -> tuple[float, list[Tensor]]:
    """The equation as loops over float64 scalars: value, and the gradient by hand.

    Detached: -(1/B) sum_i (1/T_i) sum_t w A log pi. Otherwise the ratio: -(1/B) sum_i (1/T_i) sum_t A w. The
    gradient of both is -w A / (B T_i).
    """
    total = num_responses or len(rows)
    value, gradients = 0.0, []
    for learner, sampler, mask, advantage in zip(
        rows.log_probs, rows.behavior_log_probs, rows.masks, rows.advantages.tolist(), strict=True
    ):
        gradient = torch.zeros(len(mask), dtype=torch.float64)
        length = int(mask.sum())
        for token in range(len(mask)):
            if mask[token]:
                weight = (learner[token].double() - sampler[token].double()).exp().item()
                value -= weight * advantage * (learner[token].item() if detached else 1.0) / (length * total)
                gradient[token] = -weight * advantage / (length * total)
        gradients.append(gradient)
    return value, gradients
