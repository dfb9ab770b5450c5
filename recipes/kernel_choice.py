"""Which kernels compute: rzero's exact ones or torch's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recipes.errors import RecipeError
from rzero.kernels import align, log_softmax


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels under a model.

    Attributes:
        name: ``exact`` or ``native``.
        fingerprint: What goes into the sampling context.
        log_softmax: Over the last dimension of logits.
    """

    name: str
    fingerprint: str
    log_softmax: Callable[[Tensor], Tensor]


def put_kernels_under(model: Any, name: str) -> Kernels:
    """Make a model compute with the named kernels.

    Raises:
        RecipeError: If the exact kernels do not support the model.
    """
    if name == "native":
        native = f"native-torch-{torch.__version__}"
        return Kernels(
            name=name, fingerprint=native, log_softmax=lambda logits: torch.log_softmax(logits, dim=-1)
        )
    try:
        alignment = align(model)
    except TypeError as error:
        raise RecipeError(
            f"--kernels exact does not support this model, use --kernels native: {error}"
        ) from error
    return Kernels(name=name, fingerprint=alignment.fingerprint, log_softmax=log_softmax)


def require_ratios_of_one(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor) -> None:
    """Check that learner and sampler gave every counted token the same bits, as they must with equal weights.

    Args:
        log_probs: [N], the learner's.
        behavior_log_probs: [N], recorded.
        mask: bool [N].

    Raises:
        RuntimeError: If one importance ratio is not exactly 1.
    """
    wrong = int((log_probs.detach() != behavior_log_probs)[mask].sum())
    if wrong:
        raise RuntimeError(
            f"require_ratios_of_one: every ratio must be exactly 1 at lag 0 with exact kernels, "
            f"got {wrong} of {int(mask.sum())} others"
        )
