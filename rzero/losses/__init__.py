"""The method as pure functions of torch tensors: advantages, importance weights, losses, diagnostics.

Importing this package costs what torch costs.
"""

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

__all__ = [
    "ImportanceDiagnostics",
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
