"""The method as pure functions of torch tensors: advantages, importance weights, losses, diagnostics.

Importing this package costs what torch costs: the TorchRL shells, :class:`ReinforceZeroLoss` and
:class:`GroupMeanAdvantage`, load when first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from rzero.losses.advantages import (
    batch_mean_advantages,
    count_zero_variance_groups,
    group_mean_advantages,
)
from rzero.losses.diagnostics import ImportanceDiagnostics, importance_diagnostics
from rzero.losses.distributed import all_reduce_diagnostics, global_num_responses
from rzero.losses.flash import flash_reinforce_loss, sequence_trust_mask
from rzero.losses.importance import importance_weights
from rzero.losses.reinforce import reinforce_loss

if TYPE_CHECKING:
    from rzero.losses.module import ReinforceZeroLoss
    from rzero.losses.transform import GroupMeanAdvantage

__all__ = [
    "GroupMeanAdvantage",
    "ImportanceDiagnostics",
    "ReinforceZeroLoss",
    "all_reduce_diagnostics",
    "batch_mean_advantages",
    "count_zero_variance_groups",
    "flash_reinforce_loss",
    "global_num_responses",
    "group_mean_advantages",
    "importance_diagnostics",
    "importance_weights",
    "reinforce_loss",
    "sequence_trust_mask",
]

_SHELLS = {"ReinforceZeroLoss": "rzero.losses.module", "GroupMeanAdvantage": "rzero.losses.transform"}


def __getattr__(name: str) -> object:
    """Load a TorchRL shell when it is first asked for."""
    if name not in _SHELLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_SHELLS[name]), name)
